"""Layers that keep a running state (linear attention, Mamba 2, short convolutions), over trees of
draft tokens."""
