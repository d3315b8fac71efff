"""Export of bundles to the programs that serve them, checked by readers independent of this package."""
