"""Agreement of rankings with a reference ranking of the same documents, such as students' with their teacher's.

Shapes: N documents, Q groups, Q1 = Q + 1 offsets; in a chunk of M groups, L slots a group, and R of them (a block of
rows) against all L.
"""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from ltrscale.arrays import Doubles, Ints
from ltrscale.batch import length_chunks
from ltrscale.bundle import load, scorers_of, with_tokens_of
from ltrscale.config import Operational
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.evaluation.measure.report import GROUPS
from ltrscale.evaluation.statistics.blocks import Blocks
from ltrscale.evaluation.statistics.summarise import Summary, scopes
from ltrscale.progress import Report, progress
from ltrscale.reports.findings import Findings, commit_report
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.stage import Origin, Stage

_OVERLAP_AT = (1, 5, 10)
_MEASURES = ("tau", *(f"overlap@{k}" for k in _OVERLAP_AT))
_PAIRS = 1 << 21
_SLOTS = 1 << 18


def kendall_tau(one_N: Tensor, other_N: Tensor, offsets_Q1: Tensor) -> Tensor:
    """Kendall's tau-b of two rankings of each group, shape [Q], float64 (Kendall 1945).

    `(C - D) / sqrt((n - ties of one) (n - ties of the other))` over the n pairs of documents, where C pairs are in the
    same order in both rankings and D in opposite orders: 1 for equal rankings, -1 for opposite ones. NaN where either
    ranks nothing: in a group of equal scores, or of one document. Scores are finite; only their order within a
    group matters. Time is O(sum of L^2); memory is one block of pairs.
    """
    tau_Q = torch.full((len(offsets_Q1) - 1,), torch.nan, dtype=torch.float64)
    for chunk in length_chunks(offsets_Q1, budget=_PAIRS):
        first_ML, second_ML = (
            torch.where(chunk.mask_ML, scores_N[chunk.rows_ML].double(), torch.nan) for scores_N in (one_N, other_N)
        )
        sums_3M = torch.zeros(3, len(chunk.groups_M), dtype=torch.int64)
        step = max(1, _PAIRS // first_ML.numel())
        for row in range(0, first_ML.shape[1], step):
            block = slice(row, row + step)
            first_MRL, second_MRL = _signs(first_ML, block), _signs(second_ML, block)
            products = (first_MRL * second_MRL, first_MRL.abs(), second_MRL.abs())
            sums_3M += torch.stack([product.sum((1, 2), dtype=torch.int64) for product in products])
        agreeing_M, ranked_M, ranked_by_other_M = sums_3M.double()
        # each pair is counted twice, above and below the diagonal, in both numerator and denominator
        tau_Q[chunk.groups_M] = agreeing_M / (ranked_M.sqrt() * ranked_by_other_M.sqrt())
    return tau_Q


def _signs(scores_ML: Tensor, block: slice) -> Tensor:
    """1, -1 or 0, int8, where a row's score is above, below or equal to another score; padding is NaN and gives 0."""
    rows_MR1, all_M1L = scores_ML[:, block, None], scores_ML[:, None]
    return (rows_MR1 > all_M1L).to(torch.int8) - (rows_MR1 < all_M1L).to(torch.int8)


def top_overlap(one_N: Tensor, other_N: Tensor, offsets_Q1: Tensor, *, k: int) -> Tensor:
    """The share of the first k documents of each group that two rankings have in common, shape [Q], float64.

    Documents that tie for the last places have equal chances of a place, independently in both rankings; the value is
    the expected overlap. NaN in groups of at most k documents, where the first k are all documents. Scores are finite.
    """
    overlap_Q = torch.full((len(offsets_Q1) - 1,), torch.nan, dtype=torch.float64)
    for chunk in length_chunks(offsets_Q1, budget=_SLOTS, quadratic=False):
        if chunk.mask_ML.shape[1] <= k:
            continue
        chances = [
            _chances(torch.where(chunk.mask_ML, scores_N[chunk.rows_ML].double(), -torch.inf), chunk.mask_ML, k)
            for scores_N in (one_N, other_N)
        ]
        shared_M = (chances[0] * chances[1]).sum(1) / k
        overlap_Q[chunk.groups_M] = torch.where(chunk.mask_ML.sum(1) > k, shared_M, torch.nan)
    return overlap_Q


def _chances(scores_ML: Tensor, mask_ML: Tensor, k: int) -> Tensor:
    """Probability that each document is among the first k, shape [M, L]."""
    last_M1 = scores_ML.topk(k).values[:, -1:]
    above_ML = scores_ML > last_M1
    tied_ML = (scores_ML == last_M1) & mask_ML  # with fewer than k documents, the last score is padding
    places_M1 = (k - above_ML.sum(1, keepdim=True)).double()
    return above_ML + tied_ML * (places_M1 / tied_ML.sum(1, keepdim=True).clamp(min=1))


class AgreementJob(Stage):
    """Compare the rankings of bundles with committed scores, and report the means of each model."""

    stage: ClassVar = "agreement"
    models: dict[str, BundleUrl] = Field(min_length=1)
    """Bundles, by name."""
    scores: str
    """Directory of the reference scores, made by jobs.score."""
    test: Split
    """All its groups count, with and without labels."""
    resamples: int = Field(10_000, ge=100)
    """Number of bootstrap resamples of the groups."""
    seed: int = 0
    """Seed of the resampling."""
    docs_per_batch: Operational[int] = Field(65_536, ge=1)
    """Documents scored in one batch; the result does not depend on it."""

    def work(self, origin: Origin, report: Report) -> None:
        """Commit `agreement.json` (`Agreement.read` reads it), and `groups.parquet` with the values of every group.

        Raises:
            InputError: a bundle or the scores are missing, or belong to other data.
        """
        selection = select(self.test.with_scores(self.scores), labelled=True)
        values_QTM, gids_Q, documents = _agreement_by_group(self, selection)
        of_models = [Blocks.from_values(values_QtM) for values_QtM in np.split(values_QTM, len(self.models), axis=1)]
        (scopes_K,) = scopes([of_models], _MEASURES, baseline=None, samples=self.resamples, seed=self.seed)
        models = {name: scope.summaries for name, scope in zip(self.models, scopes_K, strict=True)}
        tables = [
            pa.table({"gid": gids_Q, "model": [name] * len(gids_Q), **dict(zip(_MEASURES, values_QM.T, strict=True))})
            for name, values_QM in zip(self.models, values_QTM.swapaxes(0, 1), strict=True)
        ]
        found = Agreement(models=models, groups=len(gids_Q), documents=documents)
        commit_report(self.out, found, made_by=origin, tables={GROUPS: pa.concat_tables(tables)})
        for name, summaries in models.items():
            report({"model": name, **{measure: summary.mean for measure, summary in summaries.items()}})


class Agreement(Findings):
    """`agreement.json`: means over groups with their intervals, by model and by `tau` or `overlap@K`."""

    called: ClassVar = "an agreement"
    made_by_job: ClassVar = "jobs.distill"
    file: ClassVar = "agreement.json"
    models: dict[str, dict[str, Summary]]
    groups: int
    documents: int


def _agreement_by_group(job: AgreementJob, selection: Selection) -> tuple[Doubles, Ints, int]:
    """Agreement of every group [Q, models, measures], NaN where undefined; ids of the groups; number of documents."""
    bundles = {name: load(url) for name, url in job.models.items()}
    selection = with_tokens_of(selection, bundles.values())
    scorers = scorers_of(bundles, features=selection.features)
    values: list[list[Doubles]] = []
    gids, documents = [], 0
    with progress("agreement", selection.n_documents) as advance:
        for groups in iterate(selection, docs_per_batch=job.docs_per_batch):
            assert groups.labels_N is not None
            assert groups.ids_Q is not None
            values.append([])
            for scorer in scorers.values():
                rankings = scorer(groups), groups.labels_N, groups.offsets_Q1
                overlaps = [top_overlap(*rankings, k=k) for k in _OVERLAP_AT]
                values[-1].append(torch.stack([kendall_tau(*rankings), *overlaps], dim=1).numpy())
            gids.append(groups.ids_Q.numpy())
            documents += groups.n_documents
            advance(groups.n_documents)
    values_QTM = np.concatenate([np.stack(of_batch, axis=1) for of_batch in values])
    return values_QTM, np.concatenate(gids), documents
