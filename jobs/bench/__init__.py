"""Benchmarks: ratios of two ways to do the same work, measured in one run."""
