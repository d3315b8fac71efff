"""A data file is scored: its scores are written in order and put in place, for the commit of their period to take over.

Shapes: N documents, Q groups.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Counts, DataFile, PeriodName
from ltrscale.data.dataset.scores import ScoredGroups, ScoreFile, file_name, period_url, write_file
from ltrscale.data.dataset.selection import RowGroup
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.readers import read_direct
from ltrscale.devices import choose_device
from ltrscale.errors import InputError
from ltrscale.progress import Advance
from ltrscale.scoring.plan import Plan

_LARGEST = float(np.finfo(np.float32).max)


class Done(Config):
    """A file of scores, in place."""

    period: PeriodName
    file: ScoreFile
    counts: Counts


class FileScorer:
    """Scores a data file at a time and puts the scores in place."""

    def __init__(self, plan: Plan, *, device: str, threads: int) -> None:
        self._plan = plan
        self._row_groups: dict[str, list[RowGroup]] = defaultdict(list)
        self._bundles = [self._loaded(url) for url in plan.scorer.bundles]
        self._selection = bundles.with_tokens_of(plan.selection, self._bundles)
        for row_group in plan.selection.row_groups:
            self._row_groups[row_group.url].append(row_group)
        on = choose_device(device)
        features = plan.selection.features
        self._scorers = [bundle.scorer(features=features, device=on, threads=threads) for bundle in self._bundles]

    def _loaded(self, url: str) -> bundles.Bundle:
        bundle = bundles.load(url)
        # hashed after loading, so that a bundle replaced before or while it was loaded is noticed
        if bundles.content_hash(url) != self._plan.bundle_hashes[url]:
            raise InputError(f"{url}: the bundle was replaced meanwhile; run the same command again")
        return bundle

    def score(self, file: DataFile, advance: Advance) -> Done:
        """Score one file and put its scores in place, for the period's commit to take over."""
        url = storage.listed_file(self._plan.dataset.url, file.path)
        with storage.Commit(period_url(self._plan.out, file.period), part=True) as commit:
            with commit.file(file_name(file)) as path, closing(self._names(url)) as names:
                scored, layout = self._scored(url, advance), self._plan.layout
                try:
                    counts = write_file(path, file.row_groups, scored, names, layout=layout)
                except ValueError as error:
                    raise InputError(f"{url}: {error}; prepare the data set again") from error
            (placed,) = commit.leave()
        of_file = ScoreFile(**vars(placed), data=file.path, data_sha256=file.sha256)
        return Done(period=file.period, file=of_file, counts=counts)

    def _names(self, url: str) -> Generator[pa.Table]:
        """The columns of a file that its scores are written with, by row group."""
        meta = [f"meta_{name.removeprefix('meta_')}" for name in self._plan.meta]
        for table in read_direct(self._row_groups[url], ["gid", "query_id", "doc_ids", *meta]):
            if lacking := next((name for name in meta if name not in table.column_names), None):
                raise InputError(f"{url}: no column {lacking!r} (meta); list it under columns.meta of prepare")
            yield table

    def _scored(self, url: str, advance: Advance) -> Iterator[ScoredGroups]:
        """The scores of the groups of a file, in its order."""
        selection = replace(self._selection, row_groups=tuple(self._row_groups[url]))
        for groups in iterate(selection, docs_per_batch=self._plan.scorer.docs_per_batch):
            assert groups.ids_Q is not None
            scores_N = torch.stack([scorer(groups).double() for scorer in self._scorers]).mean(0).numpy()
            scored = ScoredGroups(groups.ids_Q.numpy(), groups.offsets_Q1.numpy(), scores_N)
            bad_N = ~(np.abs(scores_N) <= _LARGEST)  # NaN too
            if bad_N.any():
                raise self._not_finite(url, scored, int(bad_N.argmax()))
            yield scored
            advance(groups.n_documents)

    def _not_finite(self, url: str, scored: ScoredGroups, document: int) -> InputError:
        gid = scored.gids_Q[np.searchsorted(scored.offsets_Q1, document, side="right") - 1]
        return InputError(
            f"{self._plan.scorer.name}: the score of a document of query group {gid} of {url} is "
            f"{scored.scores_N[document]}, no finite float32; look at that group's features, or train the bundle again"
        )


def score_here(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan one after the other in this process."""
    scorer = FileScorer(plan, device=plan.scorer.device, threads=0)
    for file in plan.all_files:
        yield scorer.score(file, advance)
