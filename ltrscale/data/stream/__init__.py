"""From a data set to batches: the order of an epoch, readers, windows, and ragged batches that can be resumed."""
