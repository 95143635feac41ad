"""The pages of the server in a real browser. A package, so that its tests share a cluster."""
