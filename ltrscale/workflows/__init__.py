"""Work that spans several rooms: runs, stages, pipelines."""
