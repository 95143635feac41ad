"""Times and counts: the clock, traces, times by batch size, and the statistics of a request."""
