"""Drafts: how accurate they are, what their accuracy is worth, and what they cost."""
