"""Asks a running cluster, and puts the answer together."""
