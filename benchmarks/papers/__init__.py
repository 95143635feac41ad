"""The papers' figures beside ours under their conditions, and what needs a GPU to compare."""
