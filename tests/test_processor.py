"""The processor time of this process and of others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ltrscale.processor import Busy

BURN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end:\n    pass\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not count the time of all processes")
def test_the_time_of_a_running_process_is_that_of_others_and_of_an_ended_child_is_own() -> None:
    before, began = Busy.now(), time.monotonic()
    running = subprocess.Popen([sys.executable, "-c", f"{BURN}print(1, flush=True)\ninput()"], stdin=-1, stdout=-1)
    assert running.stdout is not None
    running.stdout.readline()
    seconds, after = time.monotonic() - began, Busy.now()
    share = after.others_since(before, seconds)
    assert share is not None
    assert share * seconds * (os.cpu_count() or 1) >= 0.45, "others may use more, but not less"
    assert after.own - before.own < 0.4
    running.communicate(b"\n")
    assert Busy.now().own - after.own > 0.45, "it has ended"
    assert after.others_since(before, 0) is None
