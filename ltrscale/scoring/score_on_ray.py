"""Files of a data set are scored in actors of Ray, which share them; an actor scores one at a time."""

import logging
import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ltrscale import storage
from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import Advance
from ltrscale.runtime import ray_internals
from ltrscale.runtime.engine import plain_errors, ray_cluster
from ltrscale.scoring.score_files import Done, FileScorer, Plan

_ACTOR_RETRIES = 3


def score_with_ray(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan in actors of Ray Data; results come in the order of completion."""
    FileScorer(plan, device="cpu", threads=1)  # reports a fault of the bundle before Ray starts
    if not plan.files:
        return
    import ray  # imported late: many processes never use Ray

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the errors that it logs are raised too
    workers, whose = plan.scorer.workers, f"{plan.scorer.name}: the process that scored a file with it"
    with (
        ray_cluster(math.ceil(workers.number * workers.cpus) + 1),  # one more for Ray Data's own tasks
        plain_errors(whose, "lower docs_per_batch, or give each of the workers more cpus"),
    ):
        for block in ray_internals.ready_blocks(_ray_dataset(plan)):
            for row in ray.get(block).to_pylist():
                if row["error"]:
                    raise (UnavailableError if row["outage"] else InputError)(row["error"])
                result = Done.model_validate_json(row["done"])
                advance(result.counts.documents)
                yield result


def _ray_dataset(plan: Plan) -> Any:
    """A Ray data set of the actors' results, from the numbers of the files."""
    import ray
    import ray.data
    from ray.util.annotations import RayDeprecationWarning

    workers, n = plan.scorer.workers, len(plan.all_files)
    shared = ray.put(plan)  # once for all actors of a node
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)  # for the only way to set max_task_retries
        dataset = ray.data.from_items(list(range(n)), override_num_blocks=n).map_batches(
            _Actor,
            fn_constructor_args=([shared], storage.share_leases()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers.number, n)),
            num_cpus=workers.cpus,
            num_gpus=workers.gpus or None,
            max_task_retries=_ACTOR_RETRIES,  # by default a file that always kills its process is retried forever
        )
    dataset.context.enable_progress_bars = False
    return dataset


class _Actor:
    """A Ray actor that scores files."""

    # It loads the bundle with the first file, so that every error belongs to a file, and returns errors for the user as
    # text, because Ray Data replaces an actor's exception with another that lacks the original.

    def __init__(self, shared: Sequence[Any], leases: tuple[storage.Lease, ...]) -> None:
        import ray

        storage.join_leases(leases)
        self._plan: Plan = ray.get(shared[0])

    @cached_property
    def _scorer(self) -> FileScorer:
        scorer = self._plan.scorer
        return FileScorer(self._plan, device=scorer.device, threads=math.ceil(scorer.workers.cpus))

    def __call__(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Score the file with this number; returns the result as JSON, or the error."""
        (number,) = batch["item"].tolist()
        result, error, outage = "", "", False
        try:
            result = self._scorer.score(self._plan.all_files[number], lambda *_: None).model_dump_json()
        except (InputError, UnavailableError) as raised:
            error, outage = str(raised), isinstance(raised, UnavailableError)
        return {"done": np.array([result]), "error": np.array([error]), "outage": np.array([outage])}
