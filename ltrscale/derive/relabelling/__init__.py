"""Simulated and cleaned labels, in steps."""
