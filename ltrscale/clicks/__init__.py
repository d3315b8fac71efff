"""A click log: its sessions, and what they say of positions and documents: propensities, trust, click models."""
