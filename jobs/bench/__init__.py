"""Benchmarks, which are ratios of two ways to do the same work in one run, and comparisons that docs/results reports.

`python -m jobs.bench` runs the benchmarks. The comparisons are commands of their own, because they take hours:
`baselines`, and `restored_lists`, whose data `text_vectors` makes.
"""
