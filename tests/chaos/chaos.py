"""The job: an undisturbed run for each kind of round, then the disturbed rounds, then the report."""

import fcntl
import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from rich.console import Console
from rich.table import Table

from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.progress import log
from tests.chaos.arena import BUCKET, Arena
from tests.chaos.commands import give
from tests.chaos.compare import Outcome, outcome
from tests.chaos.faults import KINDS, Kind, plan
from tests.chaos.player import MOST_TIMES, Player
from tests.chaos.report import Diary, write_report
from tests.chaos.workload import STAGES, Stage, chosen, command, fingerprint

_NO_DISK = "full: left out, because a small disk needs the right to mount one"


class ChaosJob(Config):
    """Run the jobs through random faults."""

    out: str
    """Directory of undisturbed runs and reports, on a local disk."""
    seed: int = 0
    """Seed of the faults; each seed has a directory `chaos-SEED` below `out`."""
    minutes: float = Field(default=10.0, gt=0)
    """Minutes in which faults occur; on a slow machine up to three times as many, until a round of each kind has ended.
    The current round is then finished without further faults."""
    every: float = Field(default=20.0, gt=0)
    """Mean seconds between two faults."""
    patience: float = Field(default=180.0, gt=0)
    """Seconds after the last fault until a running command counts as hung."""
    kinds: tuple[Kind, ...] = Field(KINDS, min_length=1)
    """Kinds of faults."""
    stages: tuple[str, ...] = tuple(stage.name for stage in STAGES)
    """The jobs to run; each needs the outputs of the earlier ones. Name fewer to examine the faults of one job."""
    rounds: tuple[Literal["alone", "ray"], ...] = Field(("alone", "ray"), min_length=1)
    """Kinds of rounds, which alternate: without Ray, or with Ray in the jobs that can use it."""

    @field_validator("stages")
    @classmethod
    def _are_stages(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or (unknown := set(names) - {stage.name for stage in STAGES}):
            raise ValueError(
                f"{', '.join(unknown) if names else 'empty'}: the jobs are {', '.join(s.name for s in STAGES)}"
            )
        return names


def chaos(job: ChaosJob) -> bool:
    """Run, or resume an interrupted run; returns whether everything held.

    Raises:
        InputError: no S3 server is installed, the undisturbed run failed, or another process uses the directory.
    """
    folder = Path(job.out).absolute() / f"chaos-{job.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder.parent):
        stages = chosen(job.stages)
        undisturbed = {kind == "ray": _undisturbed(folder.parent, stages, kind) for kind in sorted(set(job.rounds))}
        _start_anew_after_a_change(folder, job.model_dump_json() + fingerprint(stages, ray=True))
        diary = Diary(folder / "events.jsonl")
        if diary.by_kind("end"):
            log.info("chaos: %s is up to date", folder)
        else:
            _run(job, folder, diary, undisturbed)
        left_out = _NO_DISK if any(e["left_out"] for e in diary.by_kind("begin")) else ""
        summary = write_report(folder, diary, seed=job.seed, left_out=left_out)
    _show(summary, folder)
    return bool(summary["held"])


def _run(job: ChaosJob, folder: Path, diary: Diary, undisturbed: dict[bool, Outcome]) -> None:
    arena = Arena(folder, _mark(folder))
    with arena.opened():
        kinds = [kind for kind in job.kinds if kind != "full" or arena.small_disk]
        what = "resumed" if diary.by_kind("begin") else "begin"
        left_out = len(kinds) < len(job.kinds)
        text = f"seed {job.seed}, {job.minutes:g} minutes; {_NO_DISK if left_out else 'all kinds of faults'}"
        diary.write(what, diary.clock_s, text, left_out=left_out)
        player = Player(
            arena,
            diary,
            faults=plan(job.seed, MOST_TIMES * job.minutes, job.every, kinds),
            total_s=60 * job.minutes,
            patience_s=job.patience,
            stages=chosen(job.stages),
            rounds=[kind == "ray" for kind in job.rounds],
            undisturbed=undisturbed,
        )
        player.play()
    diary.write("end", player.clock_s, f"{len(diary.by_kind('failure'))} failures")
    if not diary.by_kind("failure"):
        arena.remove()


def _undisturbed(out: Path, stages: Sequence[Stage], kind: str) -> Outcome:
    """The outcome of a round without faults, stored for all seeds."""
    name, ray = f"undisturbed-{kind}", kind == "ray"
    kept = out / f"{name}-{fingerprint(stages, ray=ray)}.json"
    if kept.exists():
        values = json.loads(kept.read_text())
        return Outcome(values["facts"], tuple(values["unlisted"]), tuple(values["damage"]))
    arena = _new_arena(out / name)
    with arena.opened():
        for number, stage in enumerate(stages):
            given = give(arena, number, stage, command(stage, arena.folder, f"{BUCKET}/{name}", ray=ray))
            given.process.wait()
            log.info("undisturbed: %s, exit status %d", stage.name, given.process.returncode)
            verdict = given.verdict()
            if verdict is None or verdict.what != "done":
                raise InputError(f"undisturbed {stage.name}: {verdict and verdict.line}; see {given.output}")
        found = outcome(f"{BUCKET}/{name}")
    if found.damage:
        raise InputError(f"undisturbed run: {'; '.join(found.damage)}")
    arena.remove()
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(asdict(found), indent=1) + "\n")
    part.replace(kept)  # atomic: a killed run leaves no half outcome
    return found


def _start_anew_after_a_change(folder: Path, identity: str) -> None:
    """Remove the leftovers of a run with other settings or other code, if any."""
    path = folder / "identity"
    if path.exists() and path.read_text() != identity:
        log.info("chaos: %s belongs to other settings or other code; starting anew", folder)
        _new_arena(folder)
    path.write_text(identity)


def _new_arena(folder: Path) -> Arena:
    """An empty arena: ends the processes of an earlier run in this folder, and removes its disk and its files."""
    if folder.exists():
        old = Arena(folder, _mark(folder))
        old.clear()
        old.remove()
        shutil.rmtree(folder)
    folder.mkdir()
    return Arena(folder, _mark(folder))


def _mark(folder: Path) -> str:
    """The mark of a run's processes; it is stored for the case that chaos is killed."""
    path = folder / "mark"
    if not path.exists():
        path.write_text(secrets.token_hex(6))
    return path.read_text()


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{out}: another process runs chaos here; wait until it ends") from error
        yield


def _show(summary: dict[str, object], folder: Path) -> None:
    table = Table("what", "number", title=f"chaos, seed {summary['seed']}")
    faults, failures = summary["faults"], summary["failures"]
    assert isinstance(faults, dict)
    assert isinstance(failures, list)
    for name in ("minutes", "rounds", "commands", "given_again", "resumed", "differences"):
        table.add_row(name.replace("_", " "), str(summary[name]))
    table.add_row("faults", ", ".join(f"{kind} {number}" for kind, number in faults.items()))
    table.add_row("failures", str(len(failures)))
    Console(width=120).print(table)
    print(f"{'everything held' if summary['held'] else 'NOT everything held'}: {folder / 'report.md'}")
