"""The Ray cluster that the tests of a process share."""

import gc
import os
import time
from pathlib import Path


class SharedCluster:
    """Four logical CPUs, on a node with as many of a custom resource, `reader`; it starts when it is first asked for.

    Its workers have the environment of its start, so it starts anew where keys of a store have come since; also where
    what the tests of another file have left holds a CPU.
    """

    def __init__(self) -> None:
        self._keys: dict[str, str] | None = None
        self._file: Path | None = None

    def start(self, file: Path) -> None:
        """Connect this process to it, for tests of a file."""
        import ray

        import ltrscale.runtime.engine  # noqa: F401 - it has settings for the processes of Ray

        keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        if keys != self._keys or not ray.is_initialized() or (file != self._file and not _is_idle()):
            self.stop()
            ray.init(address="local", num_cpus=4, resources={"reader": 4}, include_dashboard=False, log_to_driver=False)
        self._keys, self._file = keys, file

    def stop(self) -> None:
        """End it."""
        if self._keys is not None:
            import ray

            ray.shutdown()
            self._keys = None


def _is_idle() -> bool:
    """Whether all CPUs are free within a few seconds, which actors hold until Python has dropped them."""
    import ray

    gc.collect()
    for _ in range(30):
        if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
            return True
        time.sleep(0.1)
    return False
