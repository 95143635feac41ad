"""Hosts that are added to a running cluster or leave it, and hosts started by hand."""
