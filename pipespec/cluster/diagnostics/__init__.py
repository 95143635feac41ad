"""Hosts and the links between them: what keeps them from working together, how fast they are."""
