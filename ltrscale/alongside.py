"""A thread that runs beside a block of code and ends with it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def alongside(
    work: Callable[[threading.Event], object], *, until: tuple[type[Exception], ...] = (), waits: bool = True
) -> Iterator[None]:
    """Run a function in a thread while the block runs; the event that it receives is set at the end of the block.

    The end of the block waits for it unless `waits` is false. An exception in `until` ends the function silently.
    """
    over = threading.Event()

    def run() -> None:
        with suppress(*until):
            work(over)

    thread = threading.Thread(target=run, name="alongside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if waits:
            thread.join()
