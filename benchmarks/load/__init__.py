"""Many requests at once: throughput, long prompts, shared prefixes, and equal texts."""
