"""Ranking mathematics: losses and metrics on ragged groups (pure torch; no I/O)."""
