"""The look at a click log before training on it."""
