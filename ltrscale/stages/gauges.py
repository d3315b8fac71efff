"""Numbers of a running job for Ray's dashboard and Prometheus, as metrics of Ray.

A process connected to Ray exports its reports with the prefix `ray_` and for counters the suffix `_total`:
`ray_ltrscale_documents_total`. Other processes import nothing of Ray.
"""

import math
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self

from ltrscale.progress import log
from ltrscale.stages.trackers import numbers

_REFRESH_S = 5.0  # Ray drops a gauge that was not set for 20 s, twice its export interval

COUNTERS = {
    "documents": "Documents that all workers have read",
    "groups": "Query groups that all workers have read",
    "wait_s": "Seconds spent waiting for data, mean over the workers",
}
"""Counted by step, under the names in a step's record."""
OF_RUN = {
    "epoch": "Epochs of the phase that are complete",
    "running_workers": "Workers that have started",
    "restarts": "Times that the workers have been started again",
    "checkpoints": "Checkpoints committed since the launch",
    "missed": "Query groups that the last complete epoch has missed, at least",
    "repeated": "Query groups that the last complete epoch has repeated, at least",
}
OF_STEP = {
    "step": "Steps of the run so far",
    "loss": "Mean loss of the last step",
    "auxiliary_loss": "Mean auxiliary loss of the last step",
}
OF_EPOCH = {
    "groups": "Query groups of the last complete epoch",
    "loss": "Mean loss of the last complete epoch",
}
OF_WORKER = {
    "wait_percent": "Percentage of the last epoch that a worker has waited for data",
    "memory_gb": "Peak memory of a worker's process",
    "gpu_gb": "Peak memory of a worker on its GPU",
}
OF_VALIDATION = {"validation": "Metric of the last validation"}


class Gauges:
    """Passes the records of one run to Ray, if this process is connected to Ray when they arrive.

    Every number is labelled with the run's name and its phase, or its stage if it has no phases. A context manager: a
    thread keeps the gauges alive in Ray until exit.
    """

    def __init__(self, run: str, stage: str) -> None:
        self._run, self._stage = run, stage
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, ...], tuple[Any, float, dict[str, str]]] = {}
        self._refreshing: threading.Thread | None = None
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def __call__(self, record: Mapping[str, object]) -> None:
        """Export the known fields of a record of a step, an epoch or the run.

        If Ray refuses a number, a warning says so, and the run continues without gauges.
        """
        if self._over.is_set() or not _is_connected():
            return
        try:
            self._export(record)
        except Exception as error:  # whatever Ray raises
            self._over.set()
            log.warning("gauges: %s; this run exports none any more", error)

    def _export(self, record: Mapping[str, object]) -> None:
        if self._refreshing is None:
            self._refreshing = threading.Thread(target=self._refresh, name="gauges", daemon=True)
            self._refreshing.start()
        tags = {"run": self._run, "phase": str(record.get("phase", self._stage))}
        self._set(OF_RUN, record, tags)
        if "epoch" in record:
            self._set(OF_EPOCH, record, tags, "epoch_")
            workers = record.get("workers")
            for rank, figures in enumerate(workers if isinstance(workers, list) else ()):
                self._set(OF_WORKER, figures, {**tags, "rank": str(rank)}, "worker_")
            for name, value in record.items():
                if name.startswith("validation_"):
                    tagged = {**tags, "metric": name.removeprefix("validation_")}
                    self._set(OF_VALIDATION, {"validation": value}, tagged)
        elif "step" in record:
            self._set(OF_STEP, record, tags)
            self._set(COUNTERS, record, tags, counts=True)

    def _set(
        self,
        known: Mapping[str, str],
        record: Mapping[str, object],
        tags: dict[str, str],
        prefix: str = "",
        *,
        counts: bool = False,
    ) -> None:
        """Set the gauges of the known numbers of a record, or increase their counters; each is made when first used."""
        from ray.util import metrics

        for name, value in numbers(record).items():
            if name not in known or not math.isfinite(value) or (counts and value <= 0):  # Ray refuses such counts
                continue
            key = prefix + name
            if key not in self._metrics:
                make = metrics.Counter if counts else metrics.Gauge
                self._metrics[key] = make(f"ltrscale_{key}", known[name], tag_keys=tuple(tags))
            if counts:
                self._metrics[key].inc(value, tags=tags)
            else:
                self._metrics[key].set(value, tags=tags)
                self._last[key, *tags.values()] = self._metrics[key], value, tags

    def _refresh(self) -> None:
        while not self._over.wait(_REFRESH_S):
            for gauge, value, tags in list(self._last.values()) if _is_connected() else ():
                gauge.set(value, tags=tags)


def _is_connected() -> bool:
    """True if this process is connected to Ray; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
