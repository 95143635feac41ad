"""Several devices compute the same layers."""
