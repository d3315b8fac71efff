"""The Ray cluster that the tests of a process share."""

import os


class SharedCluster:
    """Four logical CPUs, on a node with as many of a custom resource, `reader`; it starts when it is first asked for.

    Its workers have the environment of its start, so it starts anew where keys of a store have come since.
    """

    def __init__(self) -> None:
        self._keys: dict[str, str] | None = None

    def start(self) -> None:
        """Connect this process to it."""
        import ray

        import ltrscale.runtime.engine  # noqa: F401 - it has settings for the processes of Ray

        keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        if keys != self._keys or not ray.is_initialized():
            self.stop()
            ray.init(address="local", num_cpus=4, resources={"reader": 4}, include_dashboard=False, log_to_driver=False)
            self._keys = keys

    def stop(self) -> None:
        """End it."""
        if self._keys is not None:
            import ray

            ray.shutdown()
            self._keys = None
