"""Products with weights that stay in the few bits in which they are stored."""
