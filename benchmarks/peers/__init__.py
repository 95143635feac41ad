"""pipespec beside other engines on one machine."""
