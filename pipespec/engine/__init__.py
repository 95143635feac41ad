"""Rows through a slice of layers: used by the stages and by the draft."""
