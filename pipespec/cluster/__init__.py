"""Starts, watches and mends the processes of all hosts."""
