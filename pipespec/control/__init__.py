"""The controller: a task graph and a request log in Redis, moved by the scripts in `lua/`."""
