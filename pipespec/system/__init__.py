"""What this machine has: files, folders, interfaces, and how a process ends."""
