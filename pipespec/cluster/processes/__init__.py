"""Starts the processes of a host, watches them and ends them."""
