"""Scores of a data set by bundles, ranked items of raw rows, and how these rows differ from training's."""
