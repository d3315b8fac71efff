"""Gradient boosted trees on the same data sets, in the same bundles."""
