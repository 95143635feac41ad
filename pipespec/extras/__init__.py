"""What `generate` and `serve` do without: benchmarks, planning, emulation, diagnosis."""
