"""Raw input to a data set: logs and LETOR text are read, checked, grouped and written; bad rows are quarantined."""
