"""One request in the pipeline: time between tokens, tokens per step, where a step's time goes."""
