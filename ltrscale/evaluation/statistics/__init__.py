"""Means, intervals and tests over label draws and groups."""
