"""Run a training function in this process or as the workers of Ray Train.

The function is the same either way: it finds its rank through `torch.distributed` and its data reader in the context
that it is given. Under Ray the workers form a gloo process group and read through Ray Data; what rank 0 reports travels
to this process through a queue, so the metrics of the run are in one place. Its log lines are Ray's to forward.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty
from typing import Any

from ltrscale.data.readers import Reader, read_direct, read_with_ray
from ltrscale.errors import InputError
from ltrscale.progress import Report

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a relative path means the same in a worker as here
_POLL_S = 0.2


@dataclass(frozen=True)
class Context:
    """What a training function gets from its launcher."""

    reader: Reader
    report: Report


TrainFunction = Callable[[Mapping[str, Any], Context], None]


def launch(function: TrainFunction, arguments: Mapping[str, Any], *, workers: int, report: Report) -> None:
    """Run `function(arguments, context)` on `workers` workers; with one worker in this very process.

    Args:
        function: a module-level function; what it makes it writes to storage.
        arguments: plain data, the same for every worker.
        workers: how many; more than one start Ray, or use the cluster this process is connected to.
        report: receives the records of rank 0.

    Raises:
        InputError: a worker raised one.
    """
    if workers == 1:
        function(arguments, Context(read_direct, report))
        return
    with ray_cluster(workers):
        _train(function, arguments, workers, report)


@contextmanager
def ray_cluster(workers: int) -> Iterator[None]:
    """Ray while the block runs, where there is more than one worker: the connected one, or one of our own.

    One of our own has CPUs left for read tasks, without which training would wait for data for ever.
    """
    if workers == 1:
        yield
        return
    import ray

    ours = not ray.is_initialized()
    if ours and "RAY_ADDRESS" in os.environ:
        ray.init()
    elif ours:
        cpus = max(2 * workers, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=True, dashboard_host="127.0.0.1")
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _train(function: TrainFunction, arguments: Mapping[str, Any], workers: int, report: Report) -> None:
    import tempfile

    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    records = Queue(actor_options={"num_cpus": 0})
    with tempfile.TemporaryDirectory(prefix="ltrscale-ray-") as scratch:
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"function": function, "arguments": dict(arguments), "records": records},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=scratch, name="train"),
        )
        failure: list[BaseException] = []

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:  # handed to the caller below
                failure.append(error)

        thread = threading.Thread(target=fit)
        thread.start()
        while thread.is_alive() or not records.empty():
            try:
                report(records.get(timeout=_POLL_S))
            except Empty:
                continue
        thread.join()
    records.shutdown()
    if failure:
        _raise(failure[0])


def _raise(error: BaseException) -> None:
    """Raise what a worker raised: an `InputError` as itself, for it is meant for the user."""
    chain: list[Any] = [error, *getattr(error, "worker_failures", {}).values()]
    while chain:
        cause = chain.pop()
        if isinstance(cause, InputError):
            raise cause
        chain += [c for c in (getattr(cause, "cause", None), getattr(cause, "__cause__", None)) if c is not None]
    raise error


def _worker(config: dict[str, Any]) -> None:
    """What Ray Train runs in each worker."""
    import ray.train

    records, first = config["records"], ray.train.get_context().get_world_rank() == 0

    def report(record: Mapping[str, object]) -> None:
        if first:
            records.put(dict(record))

    config["function"](config["arguments"], Context(read_with_ray, report))
