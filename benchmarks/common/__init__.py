"""What several benchmarks share: options, stored results, plots, the demo pair, traces."""
