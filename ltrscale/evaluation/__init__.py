"""Evaluation: metrics by group, outlier slices, significance, the report."""
