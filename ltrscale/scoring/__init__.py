"""Scoring data sets with bundles, ranking the items of raw rows, and finding how rows differ from training's."""
