"""The basis of every job: stages, their origins and inputs, run directories, trackers, parallel tasks."""
