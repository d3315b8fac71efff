"""The events of a run, one line of JSON each, from which an interrupted run resumes."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltrscale.progress import log


@dataclass
class Diary:
    """The events of a run, oldest first, including those before an interruption."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path.exists():
            whole = self.path.read_text().rpartition("\n")[0]  # a kill can leave half a last line
            self.events = [json.loads(line) for line in whole.splitlines()]
            self.path.write_text(f"{whole}\n" if whole else "")

    def write(self, what: str, clock_s: float, text: str, **values: Any) -> None:
        """Add an event, and log it."""
        event = {"what": what, "clock_s": round(clock_s, 1), "time": round(time.time(), 1), "text": text, **values}
        self.events.append(event)
        with self.path.open("a") as file:
            print(json.dumps(event), file=file, flush=True)
        log.info("%s %6.1f s  %-8s %s", time.strftime("%H:%M:%S"), clock_s, what, text)

    def of(self, what: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["what"] == what]

    @property
    def clock_s(self) -> float:
        """Seconds of chaos so far."""
        return max((float(event["clock_s"]) for event in self.events), default=0.0)
