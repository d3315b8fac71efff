"""What spans several parts: runs, stages, the pipeline."""
