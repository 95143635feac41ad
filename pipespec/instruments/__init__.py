"""Tools beside the runtime: simulation, benchmarks, comparison, emulation, diagnosis."""
