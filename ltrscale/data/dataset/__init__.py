"""The data set itself: its manifest, files and checks, its splits and samples, and its scores."""
