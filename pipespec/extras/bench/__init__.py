"""`pipespec bench`: requests from a data set, and figures over their answers."""
