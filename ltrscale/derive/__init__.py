"""One data set from another: relabelled, or with exact-match features."""
