"""The HTTP server: what it adds to a token's latency, and what its clients leave behind."""
