"""Programs that measure what README and docs/ state; their results are in `benchmarks/results/`."""
