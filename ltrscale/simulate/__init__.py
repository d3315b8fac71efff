"""Simulators: synthetic logs to try everything on without a download."""
