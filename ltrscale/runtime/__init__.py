"""Where work runs: here, under torchrun or on the workers of Ray; the cluster, its doctor, and submitting to it."""
