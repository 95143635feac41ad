"""A pretended GPU, which reports where the host waits for it and what mixes devices."""
