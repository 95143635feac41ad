"""`pipespec plan`: the scheduler run against an imagined cluster."""
