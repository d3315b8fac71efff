"""Checks this machine, the nodes of a cluster and a store, and says what is wrong and how to fix it."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError, UnavailableError, without_credentials
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

    fixed: ClassVar = {"patience_s": 10}

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


Finding = tuple[str, CheckResult]
"""A machine, and the result of a check of it."""


def doctor(config: DoctorConfig, config_of: Callable[[str], type[Config]]) -> int:
    """Run all checks and print their results; returns the exit status: 1 with an error, otherwise 0."""
    console, heading = Console(highlight=False, soft_wrap=True), ""
    counts = dict.fromkeys(_COLOURS, 0)
    for where, result in _findings(config, config_of):
        counts[result.level] += 1
        if config.format == "json":
            sys.stdout.write(json.dumps({"where": where, **vars(result)}) + "\n")
            sys.stdout.flush()
            continue
        if where != heading:
            heading = where
            console.print(Text(where, style="bold"))
        console.print(_paragraph(result, width=min(max(console.width, 60), 120)))
    if config.format != "json":
        console.print(", ".join(f"{count} {level}" for level, count in counts.items()))
    return int(counts["error"] > 0)


def _paragraph(result: CheckResult, width: int) -> Text:
    """A result as text, with its remedy below it."""
    margin = " " * 11
    texts = [result.what, *([f"-> {result.remedy}"] if result.remedy else [])]
    text = "\n".join(
        textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
        for text in map(without_credentials, texts)
    )
    return Text(f"  {result.level:9}", style=_COLOURS[result.level]).append(text[len(margin) :], style="default")


def _findings(config: DoctorConfig, config_of: Callable[[str], type[Config]]) -> Iterator[Finding]:
    address = config.address or os.environ.get("RAY_ADDRESS") or os.environ.get(ADDRESS)
    if config.config is not None:
        yield _HERE, checks.config_validity(config.config, config.job, config_of)
    pins = checks.pinned_versions()
    for result in _machine(pins, "cluster/constraints.txt has", config.ports, None if address else config.store):
        yield _HERE, result
    if address is None:
        return
    try:
        yield from _dashboard_diagnoses(address, config) if "://" in address else _node_diagnoses(address, config)
    except (InputError, UnavailableError) as error:
        yield "cluster", checks.from_error(error)


def _machine(
    expected: Mapping[str, str],
    whose: str,
    ports: Collection[int],
    store: str | None,
    *,
    object_store: float | None = None,
    gpus: float = 0,
    on_node: bool = False,
) -> Iterator[CheckResult]:
    """Check this process's machine; a node of Ray has these bytes of object store and this many GPUs."""
    os.environ.setdefault(storage.PATIENCE, str(_PATIENCE_S))
    yield checks.packages(expected, whose)
    yield checks.gpus(gpus)
    yield checks.shared_memory(object_store)
    yield checks.spill_disk(ray_internals.session_folder() if on_node else None, object_store)
    yield open_ports(ports)
    if store is not None:
        access = checks.store_access(store)
        yield access
        if access.level == "ok":  # otherwise the next check would only repeat the reason
            yield checks.store_conditions(store)
            yield checks.store_clock(store)


def _node_diagnoses(address: str, config: DoctorConfig) -> Iterator[Finding]:
    """Check every node of the connected cluster."""
    import ray  # imported late, as below: checking a laptop needs no Ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    os.environ["RAY_ADDRESS"] = address
    with ray_cluster(0):
        ports = (*config.ports, int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
        given = (config.expected or checks.versions(), "expected are", {*ports}, config.store)
        remote = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(_on_node)  # max_calls: a new process each
        waiting = {}
        for node in (node for node in ray.nodes() if node["Alive"]):
            resources = node["Resources"]
            task = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            result = task.remote(
                *given, object_store=resources.get("object_store_memory"), gpus=resources.get("GPU", 0)
            )
            waiting[result] = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
        yield from _answers(ray, waiting)


def _answers(ray: Any, waiting: dict[Any, str]) -> Iterator[Finding]:
    """The nodes' results, then the differences of their clocks."""
    ahead_s = {}
    while waiting:
        ready, _ = ray.wait([*waiting], timeout=_NODE_S)
        now = time.time()
        if not ready:
            break
        node = waiting.pop(ready[0])
        try:
            results, then = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())
            problem = f"the checks failed there ({reason[-300:]})"
            yield node, CheckResult("error", problem, "see Ray's log of that node")
            continue
        ahead_s[node] = then - now
        for result in results:
            yield node, result
    for node in waiting.values():
        problem = f"ran no task within {_NODE_S:.0f} s"
        yield node, CheckResult("error", problem, "see whether the node lives, and its log in the dashboard")
    if ahead_s:
        yield "cluster", checks.clocks(ahead_s)


_NODE_S = 180.0


def _on_node(*given: Any, object_store: float | None, gpus: float) -> tuple[list[CheckResult], float]:
    """The results of the checks on a node, and its time at the end."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from tasks that ask for none
    results = list(_machine(*given, object_store=object_store, gpus=gpus, on_node=True))
    return results, time.time()


def _dashboard_diagnoses(address: str, config: DoctorConfig) -> Iterator[Finding]:
    """Check a cluster from outside: its dashboard, and its nodes through a job that runs these same checks there."""
    check_answers(address)
    yield "cluster", open_dashboard(address)
    settings = {
        "format": "json",
        "expected": config.expected or checks.versions(),
        "ports": config.ports,
        "store": config.store,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    job = SubmitConfig(command=("doctor", *words), address=address, working_dir=config.working_dir)
    log = job_log(job)
    results = [json.loads(line) for line in log.splitlines() if line.startswith('{"where": ')]
    # the submitted process runs on a node that its own task has checked as well
    findings = [(where, CheckResult(**result)) for result in results if (where := result.pop("where")) != _HERE]
    if not findings:
        last = next(iter(log.strip().splitlines()[-1:]), "it has no log")
        yield "cluster", CheckResult("error", f"the checks did not run there ({last})", "see the job in the dashboard")
    yield from findings
