"""Search over settings: what is tried next, what was tried, and what came of it."""
