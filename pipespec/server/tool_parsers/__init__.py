"""Parsers of tool calls in generated text, one for each family of models."""
