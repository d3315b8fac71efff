"""What every job stands on: stages, their origins and inputs, run directories, trackers, tasks side by side."""
