"""Speculation policies: which nodes the draft expands, and which the next batch contains."""
