"""What a model thinks before its answer: parsers for the families that mark it."""
