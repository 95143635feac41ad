"""`pipespec doctor --gpu`: what works on a GPU, and how fast, for a report."""
