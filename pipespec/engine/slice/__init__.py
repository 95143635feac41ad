"""A contiguous slice of a model: loading it, and computing batches with it."""
