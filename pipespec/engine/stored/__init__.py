"""Weights that lie in files in another form than they are computed with."""
