"""What a cluster will do, and which device should hold what; nothing is run."""
