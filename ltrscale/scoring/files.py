"""Scores of one data file after another, put in place for the commit of their period.

Shapes: N documents, Q groups.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from ltrscale import bundle as bundles
from ltrscale import storage
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Counts, DataFile, Period
from ltrscale.data.dataset.scores import Scored, ScoreFile, file_name, period_url, write_file
from ltrscale.data.dataset.split import RowGroup
from ltrscale.data.stream.batches import iterate
from ltrscale.devices import choose_device
from ltrscale.errors import InputError
from ltrscale.progress import Advance
from ltrscale.scoring.plan import Plan, hash_of_bundle

_LARGEST = float(np.finfo(np.float32).max)


class Done(Config):
    """A file of scores, in place."""

    period: Period
    file: ScoreFile
    counts: Counts


class FileScorer:
    """Scores a data file at a time and puts the scores in place."""

    def __init__(self, plan: Plan, *, device: str, threads: int) -> None:
        self._plan = plan
        self._row_groups: dict[str, list[RowGroup]] = defaultdict(list)
        for row_group in plan.selection.row_groups:
            self._row_groups[row_group.url].append(row_group)
        bundle = bundles.load(plan.config.bundle)
        if hash_of_bundle(bundle.url) != plan.bundle_hash:
            raise InputError(f"{bundle.url}: the bundle was replaced meanwhile; run the same command again")
        there = plan.selection.features
        self._scorer = bundle.scorer(features=there, device=choose_device(device), threads=threads)

    def score(self, file: DataFile, advance: Advance) -> Done:
        """Score one file; its scores are in place, for the commit of the period to take over."""
        url = storage.listed_file(self._plan.dataset.url, file.path)
        with storage.Commit(period_url(self._plan.out, file.period), part=True) as commit:
            with commit.file(file_name(file)) as path:
                counts = write_file(path, file.row_groups, self._scored(url, advance))
            (placed,) = commit.leave()
        scored = ScoreFile(**vars(placed), data=file.path, data_sha256=file.sha256)
        return Done(period=file.period, file=scored, counts=counts)

    def _scored(self, url: str, advance: Advance) -> Iterator[Scored]:
        """The scores of the groups of a file, in its order."""
        selection = replace(self._plan.selection, row_groups=tuple(self._row_groups[url]))
        for groups in iterate(selection, docs_per_batch=self._plan.config.docs_per_batch):
            assert groups.ids_Q is not None
            scores_N = self._scorer(groups).double().numpy()
            scored = Scored(groups.ids_Q.numpy(), groups.offsets_Q1.numpy(), scores_N)
            bad_N = ~(np.abs(scores_N) <= _LARGEST)  # NaN too
            if bad_N.any():
                raise self._not_finite(url, scored, int(bad_N.argmax()))
            yield scored
            advance(groups.n_documents)

    def _not_finite(self, url: str, scored: Scored, document: int) -> InputError:
        gid = scored.gids_Q[np.searchsorted(scored.offsets_Q1, document, side="right") - 1]
        return InputError(
            f"{self._plan.config.bundle}: the score of a document of query group {gid} of {url} is "
            f"{scored.scores_N[document]}, no finite float32; look at that group's features, or train the bundle again"
        )


def score_here(plan: Plan, advance: Advance) -> Generator[Done]:
    """Score the files of a plan one after the other in this process."""
    scorer = FileScorer(plan, device=plan.config.device, threads=0)
    for file in plan.all_files:
        yield scorer.score(file, advance)
