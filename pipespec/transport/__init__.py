"""How batches get from one rank to the next."""
