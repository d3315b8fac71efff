"""The tracker that writes event files for TensorBoard."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.stages.trackers import Figures, Tracked, flat, run_name

TENSORBOARD = "LTRSCALE_TENSORBOARD"
_begun: dict[str, int] = {}
"""The second in which this process began the newest file of a place: TensorBoard reads files in the order of their
names, which have this second, and then numbers as text."""


class EventFiles:
    """The event files of a run, for TensorBoard."""

    name = "TensorBoard"
    every_s = 0.0

    def __init__(self, folder: str, run: Tracked) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401 - here, because importing threads wait for each other
        except ImportError as error:
            raise InputError(
                f"{TENSORBOARD}: TensorBoard is not installed; pip install 'ltrscale[tensorboard]'"
            ) from error
        self.place, self._run = storage.join(folder, run_name(run.out)), run
        self._writer: Any = None
        self._passed: dict[str, int] = {}
        """The last step of each prefix that is written and repeated, if `purge_step` cannot remove it."""

    def open(self) -> None:
        """Begin; a run that does not continue removes everything of an earlier run of the same name."""
        self._write_from(None if self._run.goes_on else 0)

    def _write_from(self, step: int | None) -> None:
        """Start a new file, which invalidates earlier records of this step and later ones in all curves."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        while int(time.time()) <= _begun.get(self.place, 0):  # this is a thread of its own
            time.sleep(0.05)
        self._writer = SummaryWriter(self.place, purge_step=step)
        _begun[self.place] = int(time.time())
        if step == 0:
            settings = flat(self._run.config.model_dump(mode="json"))
            rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def send(self, figures: Sequence[Figures]) -> None:
        """Write figures, after removing the ones that they repeat."""
        for point, values, time_s in figures:
            if point.again:
                self._write_from(0 if point.step <= 1 else point.step)
                self._passed = {prefix: min(last, point.step - 1) for prefix, last in point.replaced.items()}
            if point.step > self._passed.get(point.prefix, 0):
                for name, value in values.items():
                    self._writer.add_scalar(f"{point.prefix}/{name}", value, point.step, time_s)
        self._writer.flush()

    def end(self, folder: Path, status: str) -> Iterator[None]:  # noqa: ARG002
        """Close the file."""
        yield self._writer.close()
