"""A synthetic log to try everything on without a download, and simulated users."""
