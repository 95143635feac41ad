"""Decoding methods: which nodes the draft expands, and which enter the pipeline now."""
