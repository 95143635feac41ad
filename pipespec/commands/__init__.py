"""One module per command of `pipespec`: `add` describes it to the parser, `run` runs it.

Whatever imports torch is imported by `run`, so that help and mistakes are answered at once.
"""
