"""Self-supervised objectives with their configs: augmentations, contrast, reconstruction (pure torch; no I/O)."""
