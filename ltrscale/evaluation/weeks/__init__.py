"""Drift and decay over weeks, and the gate in front of production."""
