"""From logits to a verdict: the last stage calls `verifier.verify_batch`; docs/sampling.md derives
the rules."""
