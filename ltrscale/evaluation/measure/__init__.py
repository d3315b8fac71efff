"""Metrics of bundles on test groups and their slices."""
