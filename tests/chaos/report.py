"""The diary of a run, and the report made from it."""

import html
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltrscale.progress import log
from tests.chaos.faults import KINDS, MEANINGS


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

    def by_kind(self, what: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["what"] == what]

    @property
    def clock_s(self) -> float:
        """Seconds of chaos so far."""
        return max((float(event["clock_s"]) for event in self.events), default=0.0)


def write_report(folder: Path, diary: Diary, *, seed: int, left_out: str) -> dict[str, object]:
    """Write `report.json` and `report.md`; returns the summary."""
    ended = diary.by_kind("ended")
    summary = {
        "seed": seed,
        "held": bool(diary.by_kind("end")) and not diary.by_kind("failure"),
        "minutes": round(diary.clock_s / 60, 1),
        "rounds": len(diary.by_kind("round")),
        "faults": {kind: sum(e["kind"] == kind for e in diary.by_kind("fault")) for kind in KINDS},
        "left_out": left_out,
        "commands": len(ended),
        "given_again": sum(not e["done"] and not e["failed"] for e in ended if "(second)" not in e["text"]),
        "resumed": len(diary.by_kind("resumed")),
        "differences": sum(len(e["differences"]) for e in diary.by_kind("round")),
        "failures": [e["text"] for e in diary.by_kind("failure")],
    }
    (folder / "report.json").write_text(json.dumps({**summary, "events": diary.events}, indent=1) + "\n")
    (folder / "report.md").write_text(_page(summary, diary))
    return summary


def _page(summary: dict[str, object], diary: Diary) -> str:
    faults, failures = summary["faults"], summary["failures"]
    assert isinstance(faults, dict)
    assert isinstance(failures, list)
    rows = [(name, summary[name]) for name in summary if name not in ("faults", "failures", "left_out")]
    return "\n".join(
        [
            f"# Chaos, seed {summary['seed']}: {'all held' if summary['held'] else 'NOT all held'}",
            "",
            *_table(("what", "number"), rows),
            "",
            *_table(("fault", "number", "meaning"), [(kind, faults[kind], MEANINGS[kind]) for kind in KINDS]),
            *([str(summary["left_out"]), ""] if summary["left_out"] else []),
            "",
            "## Failures",
            "",
            *([f"- {_cell(text)}" for text in failures] or ["None."]),
            "",
            "## What happened",
            "",
            *_table(
                ("time", "second of the chaos", "what", ""),
                [(_hour(e["time"]), e["clock_s"], e["what"], e["text"]) for e in diary.events],
            ),
            "",
        ]
    )  # fmt: skip


def _hour(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[str]:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in [head, *rows]]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _cell(value: object) -> str:
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")
