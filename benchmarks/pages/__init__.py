"""Tables of README.md and docs/, from the stored results."""
