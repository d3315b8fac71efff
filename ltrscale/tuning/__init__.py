"""Search over settings: the space, proposals, history and results."""
