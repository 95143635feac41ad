"""What a checkpoint is, from its headers, before anything is loaded."""
