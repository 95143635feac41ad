"""Runs batches through a slice of a model's layers; used by the stages and by the draft."""
