"""The record of every run beside its output: resolved config, versions, metrics, log.

A stage's directory holds `run/config.yaml`, `run/environment.json`, `run/metrics.jsonl` and `run/log.txt`. If other
programs read the directory as a table the folder is `_run`, which they skip. On a local disk the files grow while the
stage runs. For another URL they are written to scratch and copied to the URL every minute and at the end, also when the
stage fails. They are not listed in the stage's manifest, unlike the output itself.
"""

import json
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import ExpectedEnd, InputError, UnavailableError, without_credentials
from ltrscale.processor import alongside
from ltrscale.progress import Report, log
from ltrscale.stages.metrics_file import MetricsFile, record_in
from ltrscale.stages.trackers import Tracked
from ltrscale.stages.tracking import Track, tracked

PACKAGES = ("ltrscale", "torch", "ray", "lightgbm", "pyarrow", "numpy")
LOG, METRICS, CONFIG, ENVIRONMENT = "log.txt", "metrics.jsonl", "config.yaml", "environment.json"
RUN_FILES = tuple(f"{storage.RUN}/{name}" for name in (LOG, METRICS, CONFIG, ENVIRONMENT))
"""The files that `recorded` writes below a directory."""
_COPY_S = 60.0
_listeners: ContextVar[tuple[Report, ...]] = ContextVar("listeners", default=())


def environment() -> dict[str, object]:
    """Versions, git commit and machine: everything needed to repeat the run."""
    return {
        "time": _now(),
        "command": [without_credentials(word, settings=True) for word in sys.argv],
        **_git_state(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@cache
def _git_state(checkout: Path) -> dict[str, str | int | None]:
    """Commit and number of changed files of a checkout; None and 0 if the folder is none.

    A folder below another repository, as that of an installed package may be, is none: the state is not its own.
    """
    top, _, commit = _git(checkout, "rev-parse", "--show-toplevel", "HEAD").partition("\n")
    if top != str(checkout):
        return {"git_commit": None, "git_changed_files": 0}
    return {"git_commit": commit, "git_changed_files": len(_git(checkout, "status", "--porcelain").splitlines())}


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command in a folder; empty outside a repository."""
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()


@contextmanager
def holding(out: str, *, only_left: bool = False) -> Iterator[bool]:
    """Hold an output directory while the block runs; yields whether it removed leftovers of a dead holder.

    With `only_left` it is held only if a dead holder has left its lease. Leftovers of helper processes are removed at
    the end.
    """
    within = storage.is_held(out)  # its holder may not have committed its helpers' files yet

    def end() -> None:
        if not within:
            storage.sweep_helpers(out)

    with storage.hold(out, only_left=only_left) as before:
        if before:
            storage.sweep(out, before)
        try:
            yield bool(before)
        except BaseException:
            with suppress(InputError, UnavailableError):  # the store may fail here too: report the first error
                end()
            raise
        end()


def record_folder(out: str) -> str | None:
    """The folder with the record of the run that made or is making an output; None if there is no record."""
    folders = (storage.join(out, name) for name in (storage.RUN, storage.HIDDEN_RUN))
    return next((folder for folder in folders if storage.exists(storage.join(folder, CONFIG))), None)


def record_file(folder: str, name: str) -> str | None:
    """The text of a file of a record; None if the file does not exist."""
    data = storage.read_if_there(storage.join(folder, name))
    return None if data is None else data.decode(errors="replace")


def metric_records(folder: str) -> list[dict[str, Any]]:
    """The metrics of a record, in order."""
    lines = (record_file(folder, METRICS) or "").splitlines()
    return [record for line in lines if (record := record_in(line))]


def check_replaceable(out: str, stage: str) -> None:
    """Raise an `InputError` unless the stage replaces its own output: a model must not overwrite a data set."""
    before = _committed_by(out)
    if before not in (None, stage):
        raise InputError(
            f"{out}: the output of {before} is there, which {stage} would delete; choose another directory"
        )


def _committed_by(out: str) -> str | None:
    """The stage that committed a directory; None if nothing is committed."""
    manifest = storage.read_manifest(out)
    if manifest is not None:
        return manifest.get("made_by", {}).get("stage") or "something else"
    from ltrscale.data.dataset.scores import read_period, scored_periods  # listing runs needs no pyarrow

    # scores are committed by period, without a manifest above
    return "score" if any(read_period(out, period) is not None for period in scored_periods(out)) else None


@contextmanager
def recorded(
    out: str, config: Config, stage: str, *, name: str = storage.RUN, origin: Mapping[str, object] | None = None
) -> Iterator[Report]:
    """Keep config, environment, log and metrics of the block in a folder of `out`; yields a recorder of metrics.

    The environment contains the start time and, if the block ends without an error, the end time.

    This appends to the log and the metrics of an earlier run, such as the interrupted part of a resumed run. Trackers
    treat runs with the same origin as one run; by default, the origin is what the config says of the result.

    Raises:
        InputError: `out` holds the output of another stage; nothing is written there.
    """
    check_replaceable(out, stage)
    with holding(out), _writing_record(storage.join(out, name)) as folder:
        with storage.named_errors(str(folder), "write"):
            (folder / CONFIG).write_text(configs.dump(config))
            began = environment()
            (folder / ENVIRONMENT).write_text(json.dumps(began, indent=1) + "\n")
            handler = _LogFile(folder / LOG)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        listeners = _listeners.get()
        try:
            with (
                MetricsFile(folder / METRICS, stage, partial(_warn_of_gaps, folder)) as metrics,
                tracked(Tracked(out, config, stage, origin, folder, goes_on=metrics.goes_on)) as track,
            ):
                for listener in listeners:
                    listener({})
                yield partial(_pass_on, metrics, track, listeners)
            with suppress(OSError):  # a full disk must not fail a finished run
                (folder / ENVIRONMENT).write_text(json.dumps({**began, "ended": _now()}, indent=1) + "\n")
        except BaseException as error:
            handler.emit_failure(error)
            raise
        finally:
            log.removeHandler(handler)
            with suppress(OSError):  # a full disk: a warning about the lost lines was logged
                handler.close()


def _pass_on(metrics: MetricsFile, track: Track, listeners: Iterable[Report], record: Mapping[str, object]) -> None:
    """Give a record to all who keep it."""
    track(record, metrics.append(record))
    for listener in listeners:
        listener(record)


class _LogFile(logging.FileHandler):
    """The log of a run, which survives write errors: a disk that is full for a while leaves a gap."""

    def emit_failure(self, error: BaseException) -> None:
        """Write the error that ends the run, to this file only: the job itself prints it."""
        trace = None if isinstance(error, ExpectedEnd | KeyboardInterrupt) else sys.exc_info()
        record = log.makeRecord(log.name, logging.ERROR, "", 0, "failed: %s", (error,), trace)
        log.filter(record)
        self.emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        """Warn once; the base class would print a traceback for every line."""
        _warn_of_gaps(Path(self.baseFilename).parent, str(sys.exc_info()[1]))


_with_gaps: set[Path] = set()


def _warn_of_gaps(folder: Path, error: str) -> None:
    if folder not in _with_gaps:
        _with_gaps.add(folder)  # before the warning, which goes to the same log and may fail there again
        log.warning("%s: cannot write (%s); the log and the metrics of this run have gaps", folder, error)


@contextmanager
def heard_by(listener: Report) -> Iterator[None]:
    """Also pass the reports of stages that start in this thread to a listener; listeners can be nested.

    A stage reports an empty record when it begins to work.
    """
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextmanager
def _writing_record(target: str) -> Iterator[Path]:
    """A local folder for the files of a run directory: itself, or scratch that is copied there every minute."""
    if storage.is_local(target):
        folder = storage.local_path(target)
        with storage.named_errors(target, "write"):
            folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with storage.scratch.directory() as folder:
        for name in (LOG, METRICS):
            if storage.exists(url := storage.join(target, name)):
                (folder / name).write_bytes(storage.read_bytes(url))
        try:
            with alongside(partial(_copy_until, folder, target)):
                yield folder
        finally:
            _copy_at_last(folder, target)


def _copy_at_last(folder: Path, target: str) -> None:
    """Copy to the target, or else to a local temporary directory; a failure does not fail the run."""
    try:
        _copy(folder, target)
    except (InputError, UnavailableError, OSError) as error:
        copy = Path(tempfile.mkdtemp(prefix="ltrscale-run-"))
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        log.warning("%s; the log and the metrics of this run are in %s", error, copy)


def _copy_until(folder: Path, target: str, over: threading.Event) -> None:
    while not over.wait(_COPY_S):
        try:
            _copy(folder, target)
        except (InputError, UnavailableError) as error:
            log.warning("%s; log and metrics are copied there again in %.0f s", error, _COPY_S)


def _copy(folder: Path, target: str) -> None:
    for path in sorted(folder.iterdir()):
        storage.write_bytes(storage.join(target, path.name), path.read_bytes())
