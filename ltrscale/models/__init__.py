"""Networks: feature transform, encoders, heads (torch only; no I/O)."""
