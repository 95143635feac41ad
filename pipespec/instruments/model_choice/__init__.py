"""Chooses target, quantisation and draft for the hosts' memory from what the caches hold."""
