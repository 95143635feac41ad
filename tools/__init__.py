"""Programs that make checkpoints and pictures; `rig/` runs clusters for tests and benchmarks, and
`gpu_code/` checks the kernels for GPUs."""
