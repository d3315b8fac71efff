r"""The chain at any size as a user runs it, each command killed once: accounts, seconds and peak memory in one table.

The stages are the configs `jobs/configs/results/*-scale.yaml`: a log, its data set, a day added, one epoch of
pretraining, finetuning, trees, scores, evaluation, gate and report. In each a process gets SIGKILL at a random moment:
the command itself, which is then given again, or one of its workers under Ray. The outputs go to `root`, on the storage
that the environment names; `out` has the output of the commands and the table.

  python -m tests.chaos.scale --set out=runs/scale --set root=s3://ltrscale/scale --set lists=35000000
  python -m tests.chaos.scale --set out=runs/small --set root=s3://ltrscale/small --set lists=20000

If it is killed itself, the same command resumes with the stages that are not done.
"""

import json
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from jobs.cli import Command, Job, main
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Manifest, open_dataset
from ltrscale.data.dataset.scores import read_period
from ltrscale.errors import InputError
from ltrscale.progress import log
from ltrscale.storage import join, read_manifest
from ltrscale.texts import escape
from tests.chaos.processes import MARK, Process, choose, end, marked

_REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = _REPOSITORY / "jobs" / "configs" / "results"
_ROOT = "s3://ltrscale/scale"
_LOOK_S, _LEFT_S = 1.0, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_WRITES = b": writing "
_REFUSED = 3  # the status of a gate that says no
_LAST_WEEK = [f"2026-03-{day}" for day in range(10, 17)]
_EPOCH = re.compile(r"epoch 1 of 1: ([\d,]+) groups \((\d+) missed, (\d+) repeated\)")


class ScaleJob(Config):
    """Run the chain, or the stages that are not done."""

    out: str
    """Directory of configs, logs and the table, on a local disk."""
    root: str
    """Directory of the data, models and results, on a local disk or object storage."""
    lists: int = Field(default=20_000, ge=1)
    """Lists of the ten weeks; the added day has a seventieth of them."""
    seed: int = 0
    """Seed of the moments of the kills."""
    kills: bool = True
    """Whether a process of each stage is killed once."""
    stages: tuple[str, ...] = ()
    """The stages to run, by name; all if empty."""


@dataclass(frozen=True)
class Stage:
    """A command of the chain, the seconds of its work with any lists and with a million more, and its account.

    The moment of its kill is drawn from the first half of these. An account returns what was counted, and raises an
    `AssertionError` that names what does not add up.
    """

    name: str
    job: str
    configs: tuple[str, ...]
    account: Callable[["Places"], str]
    per_million_s: float
    least_s: float = 10.0
    options: Callable[["Places"], list[str]] = lambda _: []


@dataclass(frozen=True)
class Places:
    """The outputs of the chain, and the log of the command that was given last."""

    root: str
    lists: int
    output: Path = Path()

    @property
    def data(self) -> Manifest:
        """The manifest of the data set as it is now."""
        return open_dataset(join(self.root, "data")).manifest

    def groups(self, first: str, last: str) -> int:
        """Groups of some periods."""
        files = (file for file in self.data.files if first <= file.period <= last)
        return sum(cell.groups for file in files for cell in file.row_groups)


def account_of(url: str) -> dict[str, Any]:
    """The account of a committed log of the portal."""
    manifest = read_manifest(url)
    assert manifest is not None, f"{url}: no log is committed there"
    account: dict[str, Any] = manifest["account"]
    return account


def _log_account(name: str) -> Callable[[Places], str]:
    def account(places: Places) -> str:
        counts = account_of(join(places.root, name))
        assert counts["rows"] == counts["rows_kept"] + sum(counts["rejected"].values())
        return f"{counts['lists']:,} lists, {counts['rows']:,} rows, {sum(counts['broken'].values()):,} of them broken"

    return account


def _data_account(*names: str) -> Callable[[Places], str]:
    def account(places: Places) -> str:
        said, rules = Counter[str](), Counter[str]()
        for counts in (account_of(join(places.root, name)) for name in names):
            said.update({key: value for key, value in counts.items() if isinstance(value, int)})
            rules.update(counts["rejected"])
        data = places.data
        found = data.accounting
        assert (found.rows_in, found.rows_kept, found.rules) == (said["rows"], said["rows_kept"], dict(rules))
        assert (found.groups_in, found.groups_kept) == (said["lists"], said["lists_kept"])
        assert data.counts().groups == found.groups_kept == found.groups_in - found.groups_rejected
        assert data.counts().labelled == said["lists_labelled"]
        return (
            f"{found.groups_in:,} lists in = {found.groups_kept:,} kept + {found.groups_rejected:,} rejected; "
            f"{found.rows_rejected:,} rows rejected, by rule as generated"
        )

    return account


def _epoch_account(places: Places) -> str:
    found = _EPOCH.findall(places.output.read_text(errors="replace"))
    assert found, "no line of the epoch's account in the output"
    groups, missed, repeated = (int(number.replace(",", "")) for number in found[-1])
    assert (groups, missed, repeated) == (places.groups("2026-01-05", "2026-03-02"), 0, 0)
    return f"{groups:,} groups, 0 missed, 0 repeated"


def _scores_account(places: Places) -> str:
    scored = [read_period(join(places.root, "scores"), period) for period in _LAST_WEEK]
    groups = sum(period.groups for period in scored if period)
    assert groups == places.groups(_LAST_WEEK[0], _LAST_WEEK[-1])
    return f"{groups:,} groups scored, all of the week"


def _none(_: Places) -> str:
    return ""


def _report_options(places: Places) -> list[str]:
    words = {"out": "report", "evaluation": "evaluation", "gate": "gate"}
    return [part for key, name in words.items() for part in ("--set", f"{key}={join(places.root, name)}")]


STAGES = (
    Stage("log", "simulate", ("simulate-scale",), _log_account("log"), 15, options=lambda p: _lists(p.lists)),
    Stage(
        "day", "simulate", ("simulate-scale-day",), _log_account("day"), 0.3, options=lambda p: _lists(p.lists // 70)
    ),
    Stage("prepare", "prepare", ("prepare-scale",), _data_account("log"), 180),
    Stage("add", "prepare", ("prepare-scale", "prepare-scale-day"), _data_account("log", "day"), 3),
    Stage("pretrain", "pretrain", ("pretrain-scale",), _epoch_account, 100, least_s=40),
    Stage("finetune", "finetune", ("finetune-scale",), _none, 3),
    Stage("trees", "train_gbdt", ("gbdt-scale",), _none, 5),
    Stage("score", "score", ("score-scale",), _scores_account, 5),
    Stage("evaluate", "evaluate", ("evaluate-scale",), _none, 3),
    Stage("gate", "gate", ("gate-scale",), _none, 3),
    Stage("report", "report", (), _none, 1, options=_report_options),
)


def _lists(n: int) -> list[str]:
    return ["--set", f"log.lists={n}"]


@dataclass
class Memory:
    """Peaks by role, in megabytes: of the resident memory, and of the part that no other process shares."""

    resident: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)

    def note(self, role: str, resident_mb: float, own_mb: float) -> None:
        """Take note of a process."""
        self.resident[role] = max(self.resident.get(role, 0.0), resident_mb)
        self.own[role] = max(self.own.get(role, 0.0), own_mb)


@dataclass
class Outcome:
    """What a stage took; written when it is done."""

    name: str
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory: Memory = field(default_factory=Memory)
    kills: list[str] = field(default_factory=list)
    status: int = 0
    account: str = ""


def run(job: ScaleJob) -> None:
    """Run the stages that are not done, then write the table.

    Raises:
        InputError: a command failed that was not killed, or an account does not add up.
    """
    folder = Path(job.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "mark"
    if mark.exists():
        end(mark.read_text())
    mark.write_text(secrets.token_hex(6))
    for stage in STAGES:
        done = folder / f"{stage.name}.json"
        if done.exists() or (job.stages and stage.name not in job.stages):
            continue
        outcome = _run_stage(job, stage, folder, mark.read_text())
        done.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        log.info("scale: %s done in %.0f s, %.0f CPU seconds; %s", stage.name, outcome.wall_s, outcome.cpu_s, outcome)
    _write_table(folder)


def _run_stage(job: ScaleJob, stage: Stage, folder: Path, mark: str) -> Outcome:
    """Give the command until it ends by itself."""
    places = Places(job.root, job.lists, folder / f"{stage.name}.log")
    random_ = random.Random(f"{job.seed} {stage.name}")
    moment = random_.uniform(0.0, 0.5) * (stage.least_s + stage.per_million_s * job.lists / 1e6)
    outcome, begin = Outcome(stage.name), time.monotonic()
    kill: float | None = moment if job.kills else None
    places.output.unlink(missing_ok=True)
    while True:
        kills = len(outcome.kills)
        outcome.status = _give(_words(stage, places, folder), places.output, mark, kill, random_, outcome)
        kill = None
        _wait_for_the_rest(mark)
        if outcome.status == 0 or len(outcome.kills) == kills:
            break
        outcome.kills[-1] += ", given again"
    outcome.wall_s = round(time.monotonic() - begin, 1)
    if outcome.status != 0 and not (stage.name == "gate" and outcome.status == _REFUSED):
        raise InputError(f"{stage.name}: exit status {outcome.status}; see {places.output}")
    try:
        outcome.account = stage.account(places)
    except AssertionError as error:
        raise InputError(f"{stage.name}: its account does not add up: {error}; see {places.output}") from error
    return outcome


def _words(stage: Stage, places: Places, folder: Path) -> list[str]:
    """The command of a stage; writes its configs, with `root` in place of the directory that they name."""
    words = [sys.executable, "-m", f"jobs.{stage.job}"]
    for name in stage.configs:
        path = folder / f"{name}.yaml"
        path.write_text((CONFIGS / path.name).read_text().replace(_ROOT, places.root))
        words += ["--config", str(path)]
    return words + stage.options(places)


def _give(
    words: list[str], output: Path, mark: str, kill: float | None, random_: random.Random, outcome: Outcome
) -> int:
    """Run a command and watch its processes; returns its exit status.

    After `kill` seconds of work, from the line on that says where it writes, one of its processes is killed.
    """
    # Ray's workers set their titles, and would overwrite the mark
    environment = {**os.environ, MARK: mark, "SPT_NOENV": "1"}
    cpu: dict[tuple[int, str], float] = {}
    with output.open("ab") as stream:
        stream.write(f"$ {' '.join(words)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            words,
            env=environment,
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    begin = math.inf
    while process.poll() is None:
        there = marked(mark)
        for one in there:
            _note(one, outcome.memory, cpu)
        if begin == math.inf and _WRITES in output.read_bytes():
            begin = time.monotonic()
        if kill is not None and time.monotonic() - begin >= kill:
            busy = [one for one in there if one.role != "helper" and "IDLE" not in one.title]
            if (victim := choose(busy, random_.random())) and victim.signal(signal.SIGKILL):
                outcome.kills.append(f"{_role(victim)} after {time.monotonic() - begin:.0f} s")
                kill = None
        time.sleep(_LOOK_S)
    outcome.cpu_s = round(outcome.cpu_s + sum(cpu.values()), 1)
    return process.returncode


def _note(process: Process, memory: Memory, cpu: dict[tuple[int, str], float]) -> None:
    """Take note of a process's memory and CPU seconds so far."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return
    sizes = {line.partition(":")[0]: int(line.split()[1]) / 1024 for line in status.splitlines() if line.endswith("kB")}
    if "VmRSS" in sizes:
        memory.note(_role(process), sizes["VmRSS"], sizes["RssAnon"])
    cpu[process.pid, process.started] = (int(times[11]) + int(times[12])) / _TICKS


def _role(process: Process) -> str:
    """`driver` for the command, the name of the task or actor for Ray's workers, `services` for the rest."""
    if process.role == "worker":
        return re.sub(r"\W.*", "", process.title.removeprefix("ray::")) or "worker"
    return "driver" if process.role == "job" else "services"


def _wait_for_the_rest(mark: str) -> None:
    """Wait until all processes of a command are gone, as they must soon after it."""
    deadline = time.monotonic() + _LEFT_S
    while there := marked(mark):
        if time.monotonic() > deadline:
            log.warning("scale: still there after %.0f s: %s", _LEFT_S, ", ".join(one.name for one in there))
            end(mark)
            return
        time.sleep(_LOOK_S)


def _write_table(folder: Path) -> None:
    """Write the outcomes of the stages that are done, as JSON and as Markdown."""
    outcomes = [json.loads(path.read_text()) for stage in STAGES if (path := folder / f"{stage.name}.json").exists()]
    (folder / "scale.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    heads = ["stage", "wall, s", "CPU, s", "driver, MB", "workers, MB", "killed", "account"]
    lines = [heads, ["---"] * len(heads), *_rows(outcomes)]
    (folder / "scale.md").write_text("".join(f"| {' | '.join(map(escape, line))} |\n" for line in lines))
    print((folder / "scale.md").read_text())


def _rows(outcomes: list[dict[str, Any]]) -> Iterator[list[str]]:
    for outcome in outcomes:
        resident = outcome["memory"]["resident"]
        others = {role: mb for role, mb in resident.items() if role not in ("driver", "services", "IDLE")}
        workers = ", ".join(f"{role} {mb:,.0f}" for role, mb in sorted(others.items()))
        numbers = [f"{outcome['wall_s']:,.0f}", f"{outcome['cpu_s']:,.0f}", f"{resident.get('driver', 0):,.0f}"]
        yield [outcome["name"], *numbers, workers, "; ".join(outcome["kills"]), outcome["account"]]


def _job() -> Job:
    return ScaleJob, run


if __name__ == "__main__":
    main(Command("scale", _job, __doc__, package="tests.chaos"))
