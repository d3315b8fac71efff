"""A click log: its sessions, and what they say about positions and documents: propensities, trust, click models."""
