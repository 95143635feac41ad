"""The commands that measure, compare and advise, one module each."""
