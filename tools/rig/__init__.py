"""Whole clusters for tests and benchmarks: in threads, in a process that is asked, over hosts."""
