"""This machine: files, folders, network interfaces, devices, processes and their exit codes."""
