"""A run of the whole chain of jobs through random faults, compared with a run that nothing disturbed."""
