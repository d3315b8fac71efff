"""Slow, obvious oracles: each formula as printed, one list at a time, with loops.

Losses and objectives are float64 torch scalars, so that autograd gives the gradient of the plain loop.
"""
