"""Gradient boosted trees, from the same data sets into the same bundles as networks."""
