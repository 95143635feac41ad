"""Whole clusters for tests and benchmarks: in threads, in a process, behind HTTP, over hosts."""
