"""Proposers of draft tokens: draft model, suffix matching, and combinations of them."""
