"""Looks at hosts and at the links between them: what they have, what they can do, how fast."""
