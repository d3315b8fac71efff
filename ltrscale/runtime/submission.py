"""Jobs on a Ray cluster: submitted through its dashboard, followed, stopped, and found again.

The id of a submission is the job's name and a hash of its settings. So the same command given twice
follows the first submission; if that has ended, it starts another attempt, which resumes like the job itself.

The code goes to the cluster as a copy that nothing changes: Ray reads it twice, for its hash and for its content, and
fails if a file changes in between.
"""

import io
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.progress import called, log
from ltrscale.runtime import ray_internals
from ltrscale.runtime.credentials import refuse_credentials, refuse_files
from ltrscale.runtime.dashboard import address_of, connected, follow, show_log, state

_POLL_S = 1.0
_PATIENCE_S = 60.0
_STOP_S = 120
"""How long a job that is asked to stop may write its checkpoint before Ray kills it."""
_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's variable for the seconds between a job's SIGTERM and SIGKILL; by default 3."""
_PLACES = ("out", "data", "inputs", "path", "bundle", "bundles", "pretrained", "production", "candidate", "evaluation")
"""Keys with paths as values, even without a slash."""


class EntrypointConfig(Config):
    """What the submitted process reserves on its node. Its workers reserve more, by the job's own `workers`."""

    cpus: float = Field(0, ge=0)
    """Logical CPUs; with 0 of everything the process runs on the head."""
    gpus: float = Field(0, ge=0)
    """GPUs, for a job that trains in its own process."""
    memory_gb: float = Field(0, ge=0)
    """Memory in 10^9 bytes, for a job that holds much data in its own process, such as trees."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources, such as {reader: 1}."""


class SubmitConfig(Config):
    """A job for a Ray cluster."""

    fixed: ClassVar = {"stop_seconds": 120}

    command: tuple[str, ...] = ()
    """The job and its arguments, as after `python -m jobs.`: what follows `--` on the command line."""
    address: str | None = None
    """The cluster's dashboard, http://HEAD:8265; by default RAY_API_SERVER_ADDRESS of the environment."""
    action: Literal["run", "status", "stop"] = "run"
    """Run the job, or follow it if it runs already; show its attempts, or without a job all of the cluster; stop it."""
    id: str | None = Field(None, pattern=r"^[\w.-]+(~\d+)?$")
    """Name of the submission; by default the job's name and a hash of its settings. With `~` and a number, one of its
    attempts."""
    follow: bool = True
    """Show the job's log until it ends, and exit with its status; otherwise print the id and leave."""
    check: bool = True
    """Read the job's config here first. With false only the cluster reads it, for files that only the cluster has."""
    working_dir: str | None = "."
    """Directory to send: what git tracks there, or, without git, all but what its .gitignore names; in both cases
    without data sets and what its .rayignore names. Null if the nodes have the jobs installed. Files of credentials are
    refused."""
    environment: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(default_factory=dict)
    """Variables for the job and its workers. Credentials are refused: the dashboard shows the variables."""
    entrypoint: EntrypointConfig = EntrypointConfig()
    """What the submitted process reserves."""


@dataclass(frozen=True)
class Submission:
    """A job to submit."""

    name: str
    """The id of its first attempt."""
    module: str
    """Name of the job and of its module."""
    entrypoint: str
    """The command."""
    files: tuple[str, ...]
    """Files that it reads from the working directory."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Relative paths among its settings, by key; see `relative_places`."""


def relative_places(config: Config) -> dict[str, str]:
    """The relative paths in a job's settings, by key: `out`, and paths that exist in this directory.

    Text without a slash is a path only under a key of `_PLACES`: a column may be called `docs`, too.
    """
    places = {}
    for key, text in _texts(config.model_dump(mode="json")):
        name = next((part for part in reversed(key.split(".")) if not part.isdigit()), "")
        if "://" in text or Path(text).is_absolute() or not ("/" in text or name in _PLACES):
            continue
        if key == "out" or _is_here(text):
            places[key] = text
    return places


def _is_here(text: str) -> bool:
    """True if a text is a path or glob pattern that matches something below this directory."""
    try:
        return Path(text).exists() or any(Path().glob(text))
    except (OSError, ValueError):  # not a path
        return False


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in plain data, with their dotted keys."""
    if isinstance(value, str):
        yield key, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _texts(part, f"{key}.{name}" if key else str(name))


def submission(
    config: SubmitConfig, digest: str, files: Sequence[str], places: Mapping[str, str] | None = None
) -> Submission | None:
    """The submission that a config describes; None if it names no job.

    The job's settings have this digest; it reads these files, and its settings name these relative places by key.

    Raises:
        InputError: something that would be sent looks like a credential.
    """
    if config.action == "run":
        refuse_credentials(config.environment, config.command)
    if not config.command:
        return None
    module, *arguments = config.command
    entrypoint = shlex.join(["python", "-m", f"jobs.{module}", *arguments])
    local_files = tuple(file for file in files if "://" not in file)
    name = (config.id or f"{module}-{digest[:12]}").partition("~")[0]  # of the job, where an attempt is named
    return Submission(name, module, entrypoint, local_files, places or {})


def submit(config: SubmitConfig, job: Submission | None) -> int:
    """Run, show or stop a job on a cluster; returns the exit status of a job that was followed to its end, else 0.

    Raises:
        InputError: the cluster refuses the job, a file looks like credentials, or there is no such job.
        UnavailableError: the cluster does not answer.
        Stopped: by Ctrl-C; the job keeps running.
    """
    name = job.name if job else config.id
    if name is None and config.action != "status":
        raise InputError("no job is named; give it after --, as in `-- pretrain --config C.yaml`, or its --id")
    address = address_of(config.address)
    with connected(address) as client:
        attempts = _attempts(client, name)
        match config.action:
            case "status":
                _show(attempts, name, address)
            case "stop":
                _stop(client, attempts, str(name))
            case "run":
                chosen = _started(client, attempts, job, config, address)
                if config.follow:
                    return follow(client, chosen, address)
                sys.stdout.write(f"{chosen}\n")
    return 0


def job_log(config: SubmitConfig) -> str:
    """Run a job on the cluster to its end and return its log; nothing is shown meanwhile.

    Raises:
        InputError: as for `submission` and `submit`.
        UnavailableError: the cluster does not answer.
    """
    name = f"{config.command[0]}-{secrets.token_hex(6)}"  # each run is a new one
    job, address = submission(config.replace(id=name), "", ()), address_of(config.address)
    with connected(address) as client:
        text = io.StringIO()
        show_log(client, _started(client, [], job, config, address), text)
        return text.getvalue()


def _attempts(client: Any, name: str | None) -> list[Any]:
    """The attempts of a submission, or all submissions, oldest first."""
    own_ids = re.compile(rf"{re.escape(name)}(?:~\d+)?" if name else ".*")
    attempts = [job for job in client.list_jobs() if job.submission_id and own_ids.fullmatch(job.submission_id)]
    return sorted(attempts, key=lambda job: (job.start_time or 0, job.submission_id))


def _started(client: Any, attempts: Sequence[Any], job: Submission | None, config: SubmitConfig, address: str) -> str:
    """The id of the running attempt, or of a newly submitted one."""
    last = attempts[-1] if attempts else None
    if last is not None and (job is None or not last.status.is_terminal()):
        log.info("%s: %s since %s; not submitted again", last.submission_id, state(last), _when(last.start_time))
        return str(last.submission_id)
    if job is None:
        raise InputError(f"{config.id}: no such submission at {address}; give the job after --")
    numbers = [int(each.submission_id.removeprefix(job.name).lstrip("~") or 1) for each in attempts]
    chosen = f"{job.name}~{1 + max(numbers)}" if numbers else job.name
    variables = {**config.environment, _STOP_WAIT: str(_STOP_S)}
    reserved = config.entrypoint
    try:
        with _sent(config.working_dir, job) as working_dir:
            client.submit_job(
                entrypoint=job.entrypoint,
                submission_id=chosen,
                runtime_env={"env_vars": variables, **working_dir},
                entrypoint_num_cpus=reserved.cpus,
                entrypoint_num_gpus=reserved.gpus,
                entrypoint_memory=round(reserved.memory_gb * 1e9),
                entrypoint_resources=reserved.resources or None,
            )
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
        log.info("%s: submitted at the same moment elsewhere", chosen)
    else:
        log.info("%s: submitted `%s`; %s/#/jobs/%s shows it", chosen, job.entrypoint, address, chosen)
    return chosen


@contextmanager
def _sent(folder: str | None, job: Submission) -> Iterator[dict[str, str]]:
    """Ray's `working_dir` setting for a job: a copy with the job and its configs, without credentials."""
    if folder is None:
        _check_places(job, (), "the nodes have the jobs, not this directory")
        yield {}
        return
    if "://" in folder:  # an archive that Ray fetches
        yield {"working_dir": folder}
        return
    if not Path(folder).is_dir():
        raise InputError(
            f"working_dir: {folder} is no directory; name the checkout, or null if the nodes have the jobs"
        )
    names = [os.path.relpath(file, folder) for file in job.files]
    with sent_copy(Path(folder), [name for name in names if not name.startswith("..")]) as taken:
        _check_copy(folder, taken, job)
        yield {"working_dir": str(taken.folder)}


_PACKAGES, _MANIFESTS = ("jobs", "ltrscale"), (storage.MANIFEST, storage.HIDDEN_MANIFEST)
"""Directories where new files are sent before git tracks them; manifests of outputs, which are not sent."""


@dataclass(frozen=True)
class SentCopy:
    """A copy of what is sent."""

    folder: Path
    """Directory of the copy."""
    sent: dict[str, int]
    """The files that Ray takes from it, and their bytes."""
    rule: str
    """The rule that selected them, in words."""


@contextmanager
def sent_copy(folder: Path, configs: Collection[str]) -> Iterator[SentCopy]:
    """Copy a directory while the block runs: what git tracks there, or else all that is not ignored.

    Data sets and other outputs of jobs are left out, with a warning. `configs` are sent even if git does not track
    them.
    """
    names = {*_git(folder, "--cached")}
    if any(name.startswith("jobs/") for name in names):  # otherwise the repository is another project's
        rule = "what git tracks and .rayignore does not name"
        names |= {*_git(folder, "--others", "--exclude-standard", "--", *_PACKAGES), *configs}
    else:
        rule = "all but what .gitignore and .rayignore name"
        names = {*ray_internals.working_directory(folder)}
    manifests = [name for name in sorted(names) if PurePosixPath(name).name in _MANIFESTS and "/" in name]
    outputs = [name.rpartition("/")[0] for name in manifests]
    for output in outputs:
        log.warning("not sent: %s, as it is the output of a job; give it a place that every node sees", folder / output)
    with storage.scratch.directory() as copy:
        _copy(folder, copy, [name for name in names if not any(name.startswith(f"{output}/") for output in outputs)])
        yield SentCopy(copy, ray_internals.working_directory(copy), rule)


def _git(folder: Path, *options: str) -> list[str]:
    """Files of a directory, relative to it, from `git ls-files`; none without git."""
    command = ("git", "-C", str(folder), "ls-files", "-z", *options)
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _copy(folder: Path, copy: Path, names: Collection[str]) -> None:
    """Copy files that still exist: git tracks a deleted file until the deletion is committed."""
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if (folder / name).is_dir():  # a submodule, or a link to a directory
                shutil.copytree(folder / name, target, dirs_exist_ok=True)
            else:
                shutil.copy2(folder / name, target)


def _check_copy(folder: str, taken: SentCopy, job: Submission) -> None:
    """Check that the copy has the job and its configs, and no credentials."""
    sent = taken.sent
    refuse_files(Path(folder), sent, taken.folder)
    if not {f"jobs/{job.module}.py", f"jobs/{job.module}/__main__.py"} & set(sent):
        raise InputError(
            f"working_dir: jobs/{job.module}.py is not in {Path(folder).resolve()}; give the command in the checkout, "
            "or set working_dir=null if the nodes have the jobs installed"
        )
    for file in job.files:
        name = os.path.relpath(file, folder)
        if name not in sent:
            raise InputError(
                f"{file}: is not sent with {folder}, as it is outside, or .gitignore or .rayignore names it; move it, "
                "for instance to jobs/configs, or upload it and give its URL"
            )
    _check_places(job, sent, f"sent is {taken.rule}")
    log.info("sending %d files of %s, %.1f MB: %s", len(sent), folder, sum(sent.values()) / 1e6, taken.rule)


def _check_places(job: Submission, sent: Collection[str], reason: str) -> None:
    """Check that no relative path in the settings exists on this machine only."""
    for key, text in job.places.items():
        name = os.path.normpath(text)
        if key != "out" and any(file == name or file.startswith(f"{name}/") for file in sent):
            continue
        problem = "would be lost with the job's copy of it" if key == "out" else "is on this machine only"
        raise InputError(
            f"{key}: {text} is a path in this directory, and {problem}: {reason}; give a place that every node sees, "
            f"such as --set {key}=s3://BUCKET/{name} or an absolute path on a shared disk"
        )


def _stop(client: Any, attempts: Sequence[Any], name: str) -> None:
    """Stop the running attempts, and wait until they end."""
    if not attempts:
        raise InputError(f"{name}: no such submission; `{called('submit')} --action status` lists all")
    running = [job.submission_id for job in attempts if not job.status.is_terminal()]
    if not running:
        log.info("%s: %s already", attempts[-1].submission_id, state(attempts[-1]))
    for each in running:
        client.stop_job(each)
        deadline = time.monotonic() + _STOP_S + _PATIENCE_S
        while not (job := client.get_job_info(each)).status.is_terminal():
            if time.monotonic() > deadline:
                raise InputError(f"{each}: still runs after {_STOP_S} s; look for it in the dashboard")
            time.sleep(_POLL_S)
        log.info("%s: %s", each, state(job))


def _show(attempts: Sequence[Any], name: str | None, address: str) -> None:
    if not attempts:
        log.info("%s: no submission%s", address, f" {name}" if name else "")
    for job in attempts:
        sys.stdout.write(f"{job.submission_id}  {state(job)}  since {_when(job.start_time)}  {job.entrypoint}\n")


def _when(milliseconds: int | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((milliseconds or 0) / 1000))
