"""`pipespec bench` and `compare`: requests from a data set, and figures over their answers."""
