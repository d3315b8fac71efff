"""Files of a data set are scored one by one: what is planned, and how this process or actors of Ray score a file.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets.
"""

import logging
import math
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import Config, Operational, Strict
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles, PeriodName
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.data.dataset.scores import (
    Layout,
    ScoredGroups,
    ScoreFile,
    WrongIdsError,
    file_name,
    period_url,
    write_file,
)
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.dataset.split import Texts
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.devices import Device, choose_device, round_to_tf32
from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import Advance
from ltrscale.runtime import ray_internals
from ltrscale.runtime.engine import plain_errors, ray_cluster


class ScoreWorkersConfig(Config):
    """The processes that score under Ray, and the resources of each."""

    number: int = Field(2, ge=1)
    """Number of workers; fewer run if the cluster has less room."""
    cpus: float = Field(1, gt=0)
    """Logical CPUs of each, and threads of a tree model."""
    gpus: float = Field(0, ge=0)
    """GPUs of each; a fraction shares one among several workers."""


class ScorerConfig(Config):
    """The bundle that scores, and how."""

    bundle: str | tuple[str, ...] = Field(min_length=1)
    """Bundle that scores: a finetuned ranker or trees; several bundles give the mean of their scores."""
    docs_per_batch: Operational[int] = Field(8192, ge=1)
    """Documents that are scored at once, and held in memory together with a row group."""
    device: Operational[Device] = "auto"
    """Where a network runs: `auto` takes the GPU if there is one; or `cpu`, `cuda`, `cuda:1`."""
    ray: Operational[bool] = False
    """Score files in parallel on a Ray cluster; the scores are the same."""
    workers: Operational[ScoreWorkersConfig] = ScoreWorkersConfig()
    """The processes that score if `ray` is set."""

    @property
    def bundles(self) -> tuple[str, ...]:
        """The bundles that score."""
        return (self.bundle,) if isinstance(self.bundle, str) else self.bundle

    @property
    def name(self) -> str:
        """The bundles in words, for errors."""
        return " and ".join(self.bundles)


@dataclass(frozen=True, eq=False)
class Plan:
    """The work to do: the periods of a data set with scores out of date, and their files in order."""

    scorer: ScorerConfig
    layout: Layout
    meta: Texts
    out: str
    """Absolute URL of the directory of the scores."""
    bundle_hashes: Mapping[str, str]
    """Content hash of each bundle; see `bundle_manifest.content_hash`."""
    bundle_hash: str
    """The hash of the only bundle, or of all together."""
    dataset: Dataset
    selection: Selection
    files: Mapping[str, DataFiles]
    """The files of each period that must be scored."""
    n_current: int
    """Number of periods that are up to date."""

    @cached_property
    def all_files(self) -> DataFiles:
        """The files of all periods."""
        return DataFiles.joined([*self.files.values()])


_LARGEST = float(np.finfo(np.float32).max)


class Done(Strict):
    """A file of scores, in place."""

    period: PeriodName
    file: ScoreFile
    counts: Counts


class FileScorer:
    """Scores a data file at a time and puts the scores in place."""

    def __init__(self, plan: Plan, *, device: str, threads: int) -> None:
        self._plan = plan
        self._row_groups = plan.selection.row_groups.by_file()
        self._bundles = {url: self._loaded(url) for url in plan.scorer.bundles}
        self._selection = bundles.with_tokens_of(plan.selection, self._bundles.values())
        on = choose_device(device)
        round_to_tf32(False)  # scores equal those of the CPU to float32 precision
        features = plan.selection.features
        self._scorers = bundles.scorers_of(self._bundles, features=features, device=on, threads=threads)

    def _loaded(self, url: str) -> bundles.Bundle:
        bundle = bundles.load(url)
        if bundle.content_hash != self._plan.bundle_hashes[url]:
            raise InputError(f"{url}: the bundle was replaced meanwhile; run the same command again")
        return bundle

    def score(self, file: DataFile, advance: Advance) -> Done:
        """Score one file and put its scores in place, for the period's commit to take over."""
        url = storage.listed_file(self._plan.dataset.url, file.path)
        with storage.Commit(period_url(self._plan.out, file.period), helping=True) as commit:
            with commit.file(file_name(file)) as path, closing(self._names(url)) as names:
                scored, layout = self._scored(url, advance), self._plan.layout
                try:
                    counts = write_file(path, file.row_groups, scored, names, layout=layout)
                except WrongIdsError as error:
                    raise InputError(f"{url}: {error}; prepare the data set again") from error
            (placed,) = commit.leave()
        of_file = ScoreFile(**vars(placed), data=file.path, data_sha256=file.sha256)
        return Done(period=file.period, file=of_file, counts=counts)

    def _names(self, url: str) -> Generator[pa.Table]:
        """The columns of a file to copy to its scores, by row group."""
        meta = [f"meta_{name.removeprefix('meta_')}" for name in self._plan.meta]
        for table in read_direct(self._row_groups[url], ["gid", "query_id", "doc_ids", *meta]):
            if missing := next((name for name in meta if name not in table.column_names), None):
                raise InputError(f"{url}: no column {missing!r} (meta); list it under columns.meta of prepare")
            yield table

    def _scored(self, url: str, advance: Advance) -> Iterator[ScoredGroups]:
        """The scores of a file's groups, in its order."""
        selection = self._selection.only(self._row_groups[url])
        for groups in iterate(selection, docs_per_batch=self._plan.scorer.docs_per_batch):
            assert groups.ids_Q is not None
            scores = [self._scorers[url](groups).double() for url in self._plan.scorer.bundles]
            scores_N = torch.stack(scores).mean(0).numpy()
            scored = ScoredGroups(groups.ids_Q.numpy(), groups.offsets_Q1.numpy(), scores_N)
            bad_N = ~(np.abs(scores_N) <= _LARGEST)  # NaN too
            if bad_N.any():
                document = int(bad_N.argmax())
                gid = scored.gids_Q[np.searchsorted(scored.offsets_Q1, document, side="right") - 1]
                raise InputError(
                    f"{self._plan.scorer.name}: the score of a document of query group {gid} of {url} is "
                    f"{scores_N[document]}, no finite float32; look at that group's features, or train the bundle again"
                )
            yield scored
            advance(groups.n_documents)


def score_here(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan one by one in this process."""
    scorer = FileScorer(plan, device=plan.scorer.device, threads=0)
    for file in plan.all_files:
        yield scorer.score(file, advance)


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
