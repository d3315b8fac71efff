"""Handing a bundle over to the programs that serve it, checked by a reader that knows nothing of this package."""
