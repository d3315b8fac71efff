"""The data set itself: its manifest, its files and their checks, splits and samples of it, scores beside it."""
