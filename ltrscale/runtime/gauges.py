"""Gauges of a running job: its reports as Ray metrics, for Ray's dashboard and Prometheus.

Ray exports them with the prefix `ray_`, and counters with the suffix `_total`: `ray_ltrscale_documents_total`. A
process that is not connected to Ray exports and imports nothing.
"""

import math
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self

from ltrscale.progress import log

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
        self._set("", OF_RUN, record, tags)
        if "epoch" in record:
            self._set("epoch_", OF_EPOCH, record, tags)
            workers = record.get("workers")
            for rank, figures in enumerate(workers if isinstance(workers, list) else ()):
                self._set("worker_", OF_WORKER, figures, {**tags, "rank": str(rank)})
            for name, value in record.items():
                if name.startswith("validation_"):
                    tagged = {**tags, "metric": name.removeprefix("validation_")}
                    self._set("", OF_VALIDATION, {"validation": value}, tagged)
        elif "step" in record:
            self._set("", OF_STEP, record, tags)
            self._count(record, tags)

    def _set(self, prefix: str, known: Mapping[str, str], record: Mapping[str, object], tags: dict[str, str]) -> None:
        for name, description in known.items():
            if (value := _number(record.get(name))) is not None:
                gauge = self._metric("Gauge", prefix + name, description, tags)
                gauge.set(value, tags=tags)
                self._last[prefix + name, *tags.values()] = gauge, value, tags

    def _refresh(self) -> None:
        while not self._over.wait(_REFRESH_S):
            for gauge, value, tags in list(self._last.values()) if _is_connected() else ():
                gauge.set(value, tags=tags)

    def _count(self, record: Mapping[str, object], tags: dict[str, str]) -> None:
        for name, description in COUNTERS.items():
            if (value := _number(record.get(name))) is not None and value > 0:  # Ray counts nothing else
                self._metric("Counter", name, description, tags).inc(value, tags=tags)

    def _metric(self, kind: str, name: str, description: str, tags: Mapping[str, str]) -> Any:
        """The Ray metric with this name, created with its first number."""
        from ray.util import metrics

        if name not in self._metrics:
            make = metrics.Counter if kind == "Counter" else metrics.Gauge
            self._metrics[name] = make(f"ltrscale_{name}", description, tag_keys=tuple(tags))
        return self._metrics[name]


def _is_connected() -> bool:
    """True if this process is connected to Ray; imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _number(value: object) -> float | None:
    """A finite number; None for anything else.

    Example:
        >>> _number(3), _number(None), _number(float("nan")), _number(True)
        (3.0, None, None, None)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]
