"""What runs in the process of a rank: its parts, wired together, and its heartbeat."""
