"""Self-supervised objectives: augmentations and contrastive losses (pure torch; no I/O)."""
