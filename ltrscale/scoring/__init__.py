"""Scores of a data set by bundles, ranked items of raw rows, and what these rows have that training's rows had not."""
