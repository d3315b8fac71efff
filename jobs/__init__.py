"""One thin entry point per verb: parse the config, call one function of the package."""

import os

# Threads that wait for each other sleep instead of spinning, which costs many times the time when the cores are shared.
# It must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
