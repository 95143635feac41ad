"""Who proposes the children of a node."""
