"""The task graph, the way of the verdicts, the request log and who is alive, in Redis."""
