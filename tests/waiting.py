"""Waiting for events. The time limit of the test is the only one: on a busy machine everything takes longer."""

import time
from collections.abc import Callable


def wait_until(so: Callable[[], object]) -> None:
    """Returns when something is so."""
    while not so():
        time.sleep(0.02)
