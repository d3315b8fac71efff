"""One thin entry point per verb: parse the config, call one function of the package."""

import os

# OpenMP threads that wait for each other should sleep: spinning makes jobs many times slower when cores are shared.
# torch reads this variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
