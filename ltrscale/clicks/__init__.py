"""What clicks say of positions and documents: overlap, propensities, signs of trust, click models. Reads no files."""
