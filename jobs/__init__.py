"""One command line a verb: it reads a config, and imports the package of its job when it runs."""

import os
import signal
import sys
from pathlib import Path

# OpenMP threads that wait for each other should sleep: spinning makes jobs many times slower when cores are shared.
# torch reads this variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# `python -m jobs.NAME` and `ltrscale` import this first, and torch when the job runs, which takes seconds: Ctrl-C ends
# in one line.
_PROGRAM = Path((sys.argv or [""])[0]).stem
if _PROGRAM in ("-m", "ltrscale") and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    from ltrscale.errors import end_at_once

    signal.signal(signal.SIGINT, lambda *_: end_at_once())

# `python -m jobs.NAME` of a former job says in one line, as `ltrscale NAME` does, what does its work.
if _PROGRAM == "-m":
    from jobs.verbs import GONE, command_or_end

    for word in sys.orig_argv:
        if word.removeprefix("jobs.") in GONE and word.startswith("jobs."):
            command_or_end(word.removeprefix("jobs."))
