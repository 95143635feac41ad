"""Programs that make checkpoints and pictures; `rig/` runs clusters for tests and benchmarks."""
