"""Running a function here, in the processes of torchrun, or on the workers of Ray Train."""
