"""The report of a run."""

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path

from jobs.chaos.diary import Diary
from jobs.chaos.faults import KINDS, MEANINGS


def write_report(folder: Path, diary: Diary, *, seed: int, left_out: str) -> dict[str, object]:
    """Write `report.json` and `report.md`; returns the summary."""
    ended = diary.of("ended")
    summary = {
        "seed": seed,
        "held": bool(diary.of("end")) and not diary.of("failure"),
        "minutes": round(diary.clock_s / 60, 1),
        "rounds": len(diary.of("round")),
        "faults": {kind: sum(e["kind"] == kind for e in diary.of("fault")) for kind in KINDS},
        "left_out": left_out,
        "commands": len(ended),
        "given_again": sum(not e["done"] and not e["failed"] for e in ended if "(second)" not in e["text"]),
        "resumed": len(diary.of("resumed")),
        "differences": sum(len(e["differences"]) for e in diary.of("round")),
        "failures": [e["text"] for e in diary.of("failure")],
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
