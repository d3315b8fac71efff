"""The data set itself: its manifest, its files and their checks, its splits and samples, and scores for it."""
