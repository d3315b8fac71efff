"""What the package uses of Ray's inside, for which Ray has no public way; the rest of the package knows none of it.

Every version of Ray may change it without notice. A test compares `VERSION` with the pinned version; after a change of
that one, look at each function here, run the tests that start Ray, and change `VERSION`. `launch.rendezvous` goes into
Ray Train, likewise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from types import ModuleType
from typing import Any

VERSION = "2.60.0"
"""Of Ray: the one that all of this was tried with."""


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """While the block runs, a name of a module means something else; an error where the module has no such name."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def only_this_machine(folder: Path) -> Iterator[dict[str, Any]]:
    """Options of `ray.init`, to be given in the block, for a cluster on 127.0.0.1 with its files below a folder.

    There is no public option for either: Ray replaces 127.0.0.1 by an address that others can reach, listens on all
    interfaces, and writes below /tmp/ray. It opens the folder to everybody, so the one above must be closed.
    """
    from ray._private import ray_constants  # here, as below, for the many processes that never use Ray

    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield {"_node_ip_address": "127.0.0.1", "_temp_dir": str(folder)}


def read_environment_again() -> None:
    """Let Ray go by what the environment says of the token now; by itself it reads that once in a process."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def sigterm_left_alone() -> Iterator[None]:
    """While the block runs, `ray.init` sets no handler of SIGTERM; it has no option for that."""
    from ray._private import utils

    with _replaced(utils, "set_sigterm_handler", lambda _: None):
        yield


def raylet() -> Popen[bytes]:
    """The process of the only node of a cluster that this process has started, without which nothing runs there."""
    from ray._private import worker

    (info,) = worker._global_node.all_processes["raylet"]
    process: Popen[bytes] = info.process
    return process


def blocks(dataset: Any) -> Iterator[Any]:
    """References to the blocks of a Ray data set, as they are ready.

    The public `iter_batches` hands out copies from three threads, of which one outlives an iterator that is closed
    early; `to_arrow_refs` waits until all blocks are there.
    """
    return (block for bundle in dataset.iter_internal_ref_bundles() for block in bundle.block_refs)


def keep_keys_out_of_trials() -> None:
    """Let Ray Tune leave the keys of S3 in our environment where they are; trials have those of their node.

    By itself it sends them with each trial in a runtime_env, which Ray writes into its logs, and there is no option.
    """
    from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE

    ENV_VARS_TO_PROPAGATE.difference_update([name for name in ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")])
