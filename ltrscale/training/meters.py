"""What a training measures of itself: its time, the account, speed and memory of an epoch, and the log of epochs."""

import resource
import sys
import time
from collections.abc import Mapping

import torch

from ltrscale.progress import log
from ltrscale.ranking.choices import metric_label
from ltrscale.runtime.workers import rank_and_world
from ltrscale.training.loop import State, Trainer
from ltrscale.training.reduce import gather_over_workers

Record = dict[str, object]


class TimeSpent:
    """The time of a training, over all its processes, and its limit."""

    def __init__(self, minutes: float | None, before_s: float) -> None:
        self._minutes, self._began = minutes, time.monotonic() - before_s

    @property
    def seconds(self) -> float:
        """Seconds so far, those of earlier processes included."""
        return time.monotonic() - self._began

    def is_all(self) -> bool:
        """Whether the minutes are up, by the latest clock of all workers, which must all ask."""
        if self._minutes is None:
            return False
        seconds = gather_over_workers(torch.tensor([self.seconds], dtype=torch.float64)).max().item()
        return seconds >= 60 * self._minutes


class EpochMeter:
    """Measures an epoch; rates count from its start or from the resume."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.began, self.waited_s = trainer, time.monotonic(), trainer.waited_s
        self.documents = trainer.state.account.documents

    def record(self, done: State) -> Record:
        """Loss and account of the epoch; speed, waiting and memory of the workers, all of which must call it."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        gpu = self.trainer.device.type == "cuda"
        gpu_bytes = torch.cuda.max_memory_allocated(self.trainer.device) if gpu else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB on Linux
        peak_bytes = peak if sys.platform == "darwin" else 1024 * peak
        own_figures = torch.tensor([(self.trainer.waited_s - self.waited_s) / seconds, gpu_bytes, peak_bytes])
        waiting, on_gpu, resident = gather_over_workers(own_figures.double()).T.tolist()
        workers = [
            {
                "wait_percent": round(100 * waiting[rank], 2),
                "memory_gb": round(resident[rank] / 1e9, 3),
                **({"gpu_gb": round(on_gpu[rank] / 1e9, 3)} if gpu else {}),
            }
            for rank in range(rank_and_world()[1])
        ]
        return {
            "epoch": done.epoch + 1,
            "loss": done.mean_loss if done.count else None,
            **done.account._asdict(),
            **gaps(self.trainer, done),
            "documents_per_s": round((done.account.documents - self.documents) / seconds),
            "wait_percent": round(100 * sum(waiting) / len(waiting), 2),
            "workers": workers,
        }


class EpochLog:
    """Logs the first and last epoch, and in between at most one every `EVERY_S` seconds."""

    EVERY_S = 10.0

    def __init__(self, title: str, epochs: int, *, exact: bool) -> None:
        self.title, self.epochs, self.exact = title, epochs, exact
        self._next = 0.0

    def __call__(self, record: Mapping[str, object], *, last: bool) -> None:
        """Log the record of an epoch if it is time to, or if it is the last one."""
        now = time.monotonic()
        if now < self._next and not last:
            return
        self._next = now + self.EVERY_S
        account = " (0 missed, 0 repeated)" if self.exact else ""  # otherwise the trainer would have raised
        loss = "" if record["loss"] is None else f", loss {record['loss']:.4g}"
        judged = {name.removeprefix("validation_"): record[name] for name in record if name.startswith("validation_")}
        metric = "".join(f", validation {metric_label(name)} {value:.4f}" for name, value in judged.items())
        log.info(
            f"{self.title}, epoch {record['epoch']} of {self.epochs}: "
            f"{record['groups']:,} groups{account}, {record['documents']:,} documents, "
            f"{record['documents_per_s']:,} documents/s, waiting for data {record['wait_percent']:.1f}%{loss}{metric}"
        )


def gaps(trainer: Trainer, epoch: State) -> Record:
    """Missed and repeated groups of an epoch; empty if the expected account is unknown."""
    return {} if trainer.expected is None else {**epoch.account.gaps(trainer.expected)}
