"""Processes are killed and links cut while a cluster decodes: recovery times and equal texts."""
