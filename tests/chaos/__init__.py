"""Run the whole chain of jobs through random faults, and compare it with an undisturbed run."""
