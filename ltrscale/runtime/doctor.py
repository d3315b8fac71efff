"""Checks this machine, the nodes of a cluster and a store, and says what is wrong and how to fix it."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, without_credentials
from ltrscale.runtime import checks, ray_internals
from ltrscale.runtime.checks import PORTS, CheckResult, open_dashboard, open_ports
from ltrscale.runtime.dashboard import ADDRESS, check_answers
from ltrscale.runtime.engine import ray_cluster
from ltrscale.runtime.submission import SubmitConfig, job_log

_HERE = "this machine"
_PATIENCE_S = 10
"""For a store that does not answer."""
_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


class DoctorConfig(Config):
    """What to check."""

    address: str | None = None
    """A cluster to check node by node: its dashboard, http://HEAD:8265, or from one of its nodes HEAD:6379.
    By default RAY_ADDRESS, else RAY_API_SERVER_ADDRESS of the environment; with neither, only this machine."""
    store: str | None = None
    """A directory, s3://bucket/path or local, in which to write, read and delete small files: from every node of the
    cluster or else from here, with the keys found there."""
    config: str | None = None
    """A config to check; the first part of its name is its job, as in pretrain-news.yaml."""
    job: str | None = None
    """The job of `config`, if its name does not say so."""
    ports: tuple[int, ...] = PORTS
    """Ports on which Ray may serve others without a token."""
    expected: dict[str, str] = Field(default_factory=dict)
    """Versions that the nodes should have, by package; by default those of this machine."""
    working_dir: str | None = "."
    """The checkout that is sent to a cluster; null if its nodes have the jobs installed."""
    format: Literal["text", "json"] = "text"
    """Text to read, or a line of JSON for each check."""


@dataclass(frozen=True)
class _Found:
    """A result line and its machine."""

    where: str
    line: CheckResult


def doctor(config: DoctorConfig, config_of: Callable[[str], type[Config]]) -> int:
    """Run all checks and print their results; returns the exit status: 1 with an error, otherwise 0."""
    page, failed = _Page(), False
    for finding in _findings(config, config_of):
        failed |= finding.line.level == "error"
        if config.format == "json":
            sys.stdout.write(json.dumps({"where": finding.where, **vars(finding.line)}) + "\n")
            sys.stdout.flush()
        else:
            page.show(finding)
    if config.format != "json":
        page.end()
    return int(failed)


def _findings(config: DoctorConfig, config_of: Callable[[str], type[Config]]) -> Iterator[_Found]:
    address = config.address or os.environ.get("RAY_ADDRESS") or os.environ.get(ADDRESS)
    if config.config is not None:
        yield _Found(_HERE, checks.config_validity(config.config, config.job, config_of))
    pins = checks.pinned_versions()
    look = Look(pins, "cluster/constraints.txt has", config.ports, None if address else config.store)
    for line in look.lines():
        yield _Found(_HERE, line)
    if address is None:
        return
    try:
        yield from _dashboard_diagnoses(address, config) if "://" in address else _node_diagnoses(address, config)
    except InputError as error:
        yield _Found("cluster", checks.from_error(error))


@dataclass(frozen=True)
class Look:
    """The checks of one machine, and their expectations."""

    expected: Mapping[str, str]
    whose: str
    ports: tuple[int, ...]
    store: str | None = None
    """The URL of a store to try."""
    object_store: float | None = None
    """Bytes of Ray's object store there."""
    gpus: float = 0
    """GPUs that Ray counts there."""
    on_node: bool = False
    """True if Ray runs there."""

    def lines(self) -> Iterator[CheckResult]:
        """The results of the checks on this process's machine."""
        os.environ.setdefault(storage.PATIENCE, str(_PATIENCE_S))
        yield checks.packages(self.expected, self.whose)
        yield checks.gpus(self.gpus)
        yield checks.shared_memory(self.object_store)
        yield checks.spill_disk(ray_internals.session_folder() if self.on_node else None, self.object_store)
        yield open_ports(self.ports)
        if self.store is not None:
            access = checks.store_access(self.store)
            yield access
            if access.level == "ok":  # otherwise the next check would only repeat the reason
                yield checks.store_conditions(self.store)
                yield checks.store_clock(self.store)


def _node_diagnoses(address: str, config: DoctorConfig) -> Iterator[_Found]:
    """Check every node of the connected cluster."""
    import ray  # imported late, as below: checking a laptop needs no Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    os.environ["RAY_ADDRESS"] = address
    with ray_cluster(0):
        ports = (*config.ports, int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
        local_look = Look(config.expected or checks.versions(), "expected are", tuple({*ports}), config.store)
        remote_look = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(_looked)  # max_calls: a new process each
        waiting = {}
        for node in (node for node in ray.nodes() if node["Alive"]):
            resources = node["Resources"]
            look_there = replace(
                local_look,
                object_store=resources.get("object_store_memory"),
                gpus=resources.get("GPU", 0),
                on_node=True,
            )
            task = remote_look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            waiting[task.remote(look_there)] = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
        yield from _answers(ray, waiting)


def _answers(ray: Any, waiting: dict[Any, str]) -> Iterator[_Found]:
    """The nodes' results, then the differences of their clocks."""
    ahead_s = {}
    while waiting:
        ready, _ = ray.wait([*waiting], timeout=_NODE_S)
        now = time.time()
        if not ready:
            break
        node = waiting.pop(ready[0])
        try:
            lines, then = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())
            yield _Found(
                node, CheckResult("error", f"the checks failed there ({reason[-300:]})", "see Ray's log of that node")
            )
            continue
        ahead_s[node] = then - now
        for line in lines:
            yield _Found(node, line)
    for node in waiting.values():
        problem = f"ran no task within {_NODE_S:.0f} s"
        yield _Found(node, CheckResult("error", problem, "see whether the node lives, and its log in the dashboard"))
    if ahead_s:
        yield _Found("cluster", checks.clocks(ahead_s))


_NODE_S = 180.0


def _looked(look: Look) -> tuple[list[CheckResult], float]:
    """The results of the checks on a node, and its time at the end."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from tasks that ask for none
    lines = list(look.lines())
    return lines, time.time()


def _dashboard_diagnoses(address: str, config: DoctorConfig) -> Iterator[_Found]:
    """Check a cluster from outside: its dashboard, and its nodes through a job that runs these same checks there."""
    check_answers(address)
    yield _Found("cluster", open_dashboard(address))
    settings = {
        "format": "json",
        "expected": config.expected or checks.versions(),
        "ports": config.ports,
        "store": config.store,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    job = SubmitConfig(command=("doctor", *words), address=address, working_dir=config.working_dir)
    log = job_log(job)
    findings = [_finding(line) for line in log.splitlines() if line.startswith('{"where": ')]
    if not any(finding.where != _HERE for finding in findings):
        last = next(iter(log.strip().splitlines()[-1:]), "it has no log")
        yield _Found(
            "cluster", CheckResult("error", f"the checks did not run there ({last})", "see the job in the dashboard")
        )
    # the submitted process runs on a node that its own task has checked as well
    yield from (finding for finding in findings if finding.where != _HERE)


def _finding(text: str) -> _Found:
    values = json.loads(text)
    return _Found(values.pop("where"), CheckResult(**values))


class _Page:
    """Prints the findings as text: a heading per machine, then its lines as they arrive."""

    def __init__(self) -> None:
        self._console, self._where = Console(highlight=False, soft_wrap=True), ""
        self._counts = dict.fromkeys(_COLOURS, 0)

    def show(self, finding: _Found) -> None:
        """Print a finding, with its remedy below it."""
        if finding.where != self._where:
            self._where = finding.where
            self._console.print(Text(finding.where, style="bold"))
        line, margin = finding.line, " " * 11
        self._counts[line.level] += 1
        width = min(max(self._console.width, 60), 120)
        texts = [line.what, *([f"-> {line.remedy}"] if line.remedy else [])]
        text = "\n".join(
            textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
            for text in map(without_credentials, texts)
        )
        level = Text(f"  {line.level:9}", style=_COLOURS[line.level])
        self._console.print(level.append(text[len(margin) :], style="default"))

    def end(self) -> None:
        """Print the number of findings of each level."""
        self._console.print(", ".join(f"{count} {level}" for level, count in self._counts.items()))
