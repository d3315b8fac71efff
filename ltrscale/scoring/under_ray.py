"""The files of a plan scored by actors of Ray Data, each a file at a time."""

import logging
import math
import warnings
from collections.abc import Generator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ltrscale import storage
from ltrscale.engine import ray_cluster
from ltrscale.errors import InputError
from ltrscale.progress import Advance
from ltrscale.scoring.files import Done, FileScorer
from ltrscale.scoring.plan import Plan

_RETRIES = 3


class _Actor:
    """What scores under Ray. It loads the bundle with the first file, so that all its errors are a file's.

    An error of the user's is returned: Ray Data would wrap it in its own.
    """

    def __init__(self, plan: Plan, leases: tuple[storage.Lease, ...]) -> None:
        storage.join_leases(leases)
        self._plan = plan

    @cached_property
    def _scorer(self) -> FileScorer:
        config = self._plan.config
        return FileScorer(self._plan, device=config.device, threads=math.ceil(config.actors.cpus))

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Score the file with this number; returns what came of it as JSON, or the error."""
        (number,) = batch["item"].tolist()
        done = error = ""
        try:
            done = self._scorer.score(self._plan.all_files[number], lambda *_: None).model_dump_json()
        except InputError as raised:
            error = str(raised)
        return {"done": np.array([done]), "error": np.array([error])}


def score_with_ray(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan in actors of Ray Data; they come as they are ready."""
    FileScorer(plan, device="cpu", threads=1)  # what is wrong with the bundle is told before Ray starts
    actors = plan.config.actors
    if plan.files:
        with ray_cluster(math.ceil(actors.number * actors.cpus) + 1):
            yield from _results(plan, advance)


def _results(plan: Plan, advance: Advance) -> Generator[Done]:
    import ray  # here, for the many processes that never use Ray
    from ray.exceptions import RayActorError

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it says of errors is raised too
    try:
        for bundle in _dataset(plan).iter_internal_ref_bundles():
            for block in bundle.block_refs:
                for row in ray.get(block).to_pylist():
                    if row["error"]:
                        raise InputError(row["error"])
                    done = Done.model_validate_json(row["done"])
                    advance(done.counts.documents)
                    yield done
    except RayActorError as error:
        raise InputError(
            f"{plan.config.bundle}: the process that scored a file with it ended several times; look for its end in "
            "Ray's log, and if it ran out of memory lower docs_per_batch, or give each of the actors more cpus"
        ) from error


def _dataset(plan: Plan) -> Any:
    """The numbers of the files as a Ray data set, and what actors make of them."""
    import ray.data
    from ray.util.annotations import RayDeprecationWarning

    actors, n = plan.config.actors, len(plan.all_files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)  # of the only way to say max_task_retries
        dataset = ray.data.from_items(list(range(n)), override_num_blocks=n).map_batches(
            _Actor,
            fn_constructor_args=(plan, storage.held()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(actors.number, n)),
            num_cpus=actors.cpus,
            num_gpus=actors.gpus or None,
            max_task_retries=_RETRIES,  # by default a file that always kills its process is tried for ever
        )
    dataset.context.enable_progress_bars = False
    return dataset
