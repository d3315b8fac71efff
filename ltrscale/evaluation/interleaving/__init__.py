"""Rankers compared by simulated interleaving."""
