"""What this machine can run; with --gpu, what works on its GPU, and how fast."""
