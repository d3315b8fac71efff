"""All uses of Ray's internals where Ray has no public API, except those of Ray Train in `runtime.under_ray`.

Any version of Ray may change them without notice. A test compares `VERSION` with the pinned version: when the pin
changes, check each function here, run the tests that start Ray, and change `VERSION`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ltrscale.progress import log

if TYPE_CHECKING:
    import psutil

VERSION = "2.60.0"
"""The version of Ray that this module was tested with."""
_ANSWER_S = 10.0
_TRIES = 10


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replace a module's attribute while the block runs; an error if there is no such attribute."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def only_this_machine(folder: Path) -> Iterator[dict[str, Any]]:
    """Options of `ray.init`, for use inside the block, for a cluster on 127.0.0.1 with its files below a folder.

    Ray has no public option for either: it replaces 127.0.0.1 with an address that others can reach, listens on all
    interfaces, and writes below /tmp/ray. It makes the folder readable for everybody, so its parent must not be.
    """
    from ray._private import ray_constants  # imported late, as below: many processes never use Ray

    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield {"_node_ip_address": "127.0.0.1", "_temp_dir": str(folder)}


def read_environment_again() -> None:
    """Make Ray read the token settings from the environment again; by itself it reads them once per process."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def keep_sigterm() -> Iterator[None]:
    """Keep `ray.init` from installing a SIGTERM handler while the block runs; it has no option for that."""
    from ray._private import utils

    with _replaced(utils, "set_sigterm_handler", lambda _: None):
        yield


def needed_processes() -> list["psutil.Process"]:
    """The processes without which a cluster that this process has started ends: GCS, raylet, and the raylet's agents.

    A raylet follows its agents within a second, and the driver follows the raylet, often without a word.
    """
    servers = _servers()
    agents = (child for server in servers for child in server.children() if child.name().endswith("Agent"))
    return [*servers, *agents]


def is_alive(process: "psutil.Process") -> bool:
    """Whether a process runs, and has not ended without its parent having taken note."""
    import psutil  # Ray brings it along

    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextmanager
def ending_all_processes() -> Iterator[None]:
    """Kill the processes of a cluster that this process has started if they outlive the block, which ends the cluster.

    A worker whose raylet has ended may wait for storage that does not answer.
    """
    children = [child for server in _servers() for child in server.children(recursive=True)]
    yield
    for child in children:
        if child.is_running():
            child.kill()


def _servers() -> list["psutil.Process"]:
    import psutil  # Ray, imported by now, brings it along
    from ray._private import worker

    started = worker._global_node.all_processes if worker._global_node else {}
    running = (info.process for name in ("gcs_server", "raylet") for info in started.get(name, ()))
    return [psutil.Process(process.pid) for process in running if process.poll() is None]


def ready_blocks(dataset: Any) -> Iterator[Any]:
    """References to the blocks of a Ray data set, each as soon as it is ready.

    The public `iter_batches` yields copies from three threads, and one outlives an iterator that is closed early;
    `to_arrow_refs` waits for all blocks.
    """
    return (block for bundle in dataset.iter_internal_ref_bundles() for block in bundle.block_refs)


def keep_keys_out_of_trials() -> None:
    """Keep Ray Tune from copying our S3 keys from the environment into trials, which use their node's keys.

    By default it sends them with each trial in a runtime_env, which Ray writes into its logs; no option turns it off.
    """
    from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE

    ENV_VARS_TO_PROPAGATE.difference_update([name for name in ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")])


def working_directory(folder: Path) -> dict[str, int]:
    """The files of a folder that Ray sends with a job, and their bytes; other processes may write meanwhile.

    Ray leaves out what .gitignore and .rayignore name, and has no public list of the rest.
    """
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    quiet = logging.getLogger("ltrscale.packaging")
    quiet.propagate = False  # hides Ray's lines about the files: nothing is sent here
    folder = folder.absolute()
    for left in reversed(range(_TRIES)):
        files: dict[str, int] = {}

        def note(path: Path, files: dict[str, int] = files) -> None:
            if path.is_file():
                files[str(path.relative_to(folder))] = path.stat().st_size

        try:
            excludes = [_get_excludes(folder, get_runtime_env_default_excludes())]
            _dir_travel(folder, excludes, note, include_gitignore=True, logger=quiet)
            break
        except FileNotFoundError:  # removed after its folder was listed
            if not left:
                raise
    return files


def session_folder() -> Path:
    """Where Ray keeps sockets, logs and spilled objects on the node of this process."""
    from ray._private import worker

    return Path(worker._global_node.get_session_dir_path())


def is_draining(node: str) -> bool:
    """True if a node is about to be removed; Ray Train reports this only to its own workers."""
    from ray._private.state import state

    return node in state.get_draining_nodes()


def remove_placement_groups_of(actor: str) -> None:
    """Remove the placement groups of an actor, by its id: those of a dead actor stay until its job ends.

    The public table of placement groups does not name their owners. Ray Train's own cleaner asks the dashboard, which
    not every cluster has, and misses groups that still wait for capacity.
    """
    from ray import PlacementGroupID
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for row in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(row)
        if group.creator_actor_id.hex() == actor and group.state != PlacementGroupTableData.REMOVED:
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))


def is_own_cluster() -> bool:
    """True if this process has started the connected cluster, which then has no other nodes."""
    from ray._private import worker

    return "gcs_server" in worker._global_node.all_processes


class Demand(NamedTuple):
    """The request of one worker in a placement group."""

    resources: dict[str, float]
    labels: dict[str, tuple[bool, frozenset[str]]]
    """By name: true if a node must not have the values, and the values."""


@cache  # logs each reason once per process
def _log_unknown(reason: str) -> None:
    log.warning("the cluster does not say what its autoscaler cannot provide (%s)", reason)


def unmet_requests() -> list[list[Demand]] | None:
    """The placement groups that the autoscaler cannot provide; None if no autoscaler reports or answers.

    Only version 2 of the autoscaler, KubeRay's default, reports. Ray itself waits forever for what is listed here.
    """
    from ray._private import worker
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    from ray.core.generated.common_pb2 import LabelSelectorOperator
    from ray.exceptions import RpcError

    reply = GetClusterStatusReply()
    try:
        client = GcsClient(address=worker._global_node.gcs_address)
        reply.ParseFromString(client.get_cluster_status(timeout_s=_ANSWER_S))
    except RpcError as error:
        _log_unknown(str(error))
        return None
    state, other_than = reply.autoscaling_state, LabelSelectorOperator.LABEL_OPERATOR_NOT_IN
    if not state.autoscaler_state_version:
        return None

    def labels(request: Any) -> dict[str, tuple[bool, frozenset[str]]]:
        selected = (constraint for selector in request.label_selectors for constraint in selector.label_constraints)
        return {one.label_key: (one.operator == other_than, frozenset(one.label_values)) for one in selected}

    groups = [  # the older field holds the same bundles without their labels
        group.bundle_selectors[0].resource_requests if group.bundle_selectors else group.requests
        for group in state.infeasible_gang_resource_requests
    ]
    return [[Demand(dict(one.resources_bundle), labels(one)) for one in requests] for requests in groups]
