"""Metrics corrected for positions: slow sums, and users whose bias and relevance are known, from log to page."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from click_sessions import Truth, position_based, rows_of, write_log
from shop import BIAS
from small_trainers import grow_trees

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.errors import InputError
from ltrscale.evaluation.click_log import ClicksJob
from ltrscale.evaluation.measure.corrected import Correction, PropensitiesConfig, WeightCounts, summarised
from ltrscale.evaluation.measure.evaluate import _debiased, evaluate
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.evaluation.measure.measuring import _clicks_of, order_shown
from ltrscale.evaluation.measure.report import Evaluation
from ltrscale.evaluation.measure.settings import AS_SHOWN, EvaluateConfig
from ltrscale.evaluation.statistics.blocks import Tally
from ltrscale.evaluation.statistics.summarise import scopes
from ltrscale.reports.document import cell
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.untrained import FeatureJob
from ltrscale.trees.configs import LightGBMConfig

CLICKS = PropensitiesConfig(clicks="clicks", clip=4)
PROPENSITIES = np.array([1.0, 0.5, np.nan, 0.2, 0.1])


def random_groups(seed: int, q: int = 40) -> tuple[QueryGroups, list[torch.Tensor]]:
    """Graded labels, places with gaps, ties and some below all that is known; scores of two rankers with ties."""
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(1, 9, q))
    n = int(lengths.sum())
    positions = rng.integers(1, 8, n).astype(np.float32)
    positions[rng.random(n) < 0.1] = np.nan
    labels = torch.from_numpy(rng.integers(0, 4, n).astype(np.float32) * (rng.random(n) < 0.4))
    groups = QueryGroups(
        torch.zeros(n, 1), to_offsets(lengths), labels.float(), positions_N=torch.from_numpy(positions)
    )
    return groups, [torch.from_numpy(rng.integers(0, 5, n).astype(np.float64)) for _ in range(2)]


def discounted(scores: list[float], worth: list[float], k: int) -> float:
    """Slow: the expected discounted worth of the first k ranks over all orders of ties."""
    total = 0.0
    for i, score in enumerate(scores):
        above, tied = sum(s > score for s in scores), sum(s == score for s in scores)
        ranks = range(above + 1, above + tied + 1)
        total += worth[i] * sum(1 / math.log2(1 + r) for r in ranks if r <= k) / tied
    return total


@pytest.mark.parametrize("clicks", [[0.0], [0.0, 1.0, 0.0]])
@pytest.mark.parametrize("other", [None, [1.0]])
def test_clicks_of_fewer_or_more_documents_than_a_list_has_are_refused(
    clicks: list[float], other: list[float] | None
) -> None:
    groups = QueryGroups(torch.zeros(3, 1), torch.tensor([0, 2, 3]))
    with pytest.raises(InputError, match="'clicks' does not have one value a document"):
        _clicks_of(pa.table({"clicks": pa.array([clicks, other], pa.list_(pa.float32()))}), groups)


def test_the_sums_are_those_of_a_loop_over_documents() -> None:
    groups, scores_T = random_groups(0)
    assert groups.labels_N is not None
    assert groups.positions_N is not None
    found = Correction(CLICKS, PROPENSITIES, (1, 3)).sums(scores_T, groups)
    used, unknown, clipped = [], 0, 0
    for q, (a, b) in enumerate(zip(groups.offsets_Q1[:-1].tolist(), groups.offsets_Q1[1:].tolist(), strict=True)):
        corrected, plain = [], []
        for label, place in zip(groups.labels_N[a:b].tolist(), groups.positions_N[a:b].tolist(), strict=True):
            known = place == place and place <= 5 and not math.isnan(PROPENSITIES[int(place) - 1])
            inverse = 1 / PROPENSITIES[int(place) - 1] if known else 0.0
            gain = 2**label - 1
            corrected.append(gain * min(inverse, 4.0))
            plain.append(gain * known)
            if label > 0:
                used += [min(inverse, 4.0)] * known
                unknown, clipped = unknown + (not known), clipped + (inverse > 4)
        for t, scores_N in enumerate(scores_T):
            own = scores_N[a:b].tolist()
            expected = [discounted(own, worth, k) for worth in (corrected, plain) for k in (1, 3)]
            assert found.blocks.sums_BTM[q, t] == pytest.approx(expected)
        assert found.blocks.defined_BM[q] == pytest.approx([sum(corrected)] * 2 + [sum(plain)] * 2)
    assert found.counts.relevant == len(used) + unknown
    assert (found.counts.unknown, found.counts.clipped) == (unknown, clipped)
    assert unknown > 0
    assert clipped > 0
    assert found.counts.effective == pytest.approx(sum(used) ** 2 / sum(w * w for w in used))


def figures(correction: Correction, groups: QueryGroups, scores_T: list[torch.Tensor]) -> list[tuple[float, float]]:
    """The corrected and the plain share at the first cut-off, of each trial."""
    sums = correction.sums(scores_T, groups)
    of_trials = [replace(sums.blocks, sums_BTM=sums.blocks.sums_BTM[:, [t]]) for t in range(len(scores_T))]
    (scopes_T,) = scopes([of_trials], correction.figures, baseline=0, samples=200, seed=0)
    found = summarised(correction, sums.counts, {f"m{t}": scope for t, scope in enumerate(scopes_T)})
    k = correction.cutoffs[0]
    return [(m.corrected[k].mean or 0.0, m.plain[k].mean or 0.0) for m in found.methods]


def test_equal_propensities_correct_nothing_and_their_scale_does_not_matter() -> None:
    groups, scores_T = random_groups(1)
    wide = PropensitiesConfig(clicks="clicks", clip=1e6)
    for corrected, plain in figures(Correction(wide, np.full(7, 0.5), (3,)), groups, scores_T):
        assert corrected == pytest.approx(plain)
    one, half = (figures(Correction(wide, scale * PROPENSITIES, (3,)), groups, scores_T) for scale in (1, 0.5))
    assert one == [pytest.approx(both) for both in half]
    assert one[0][0] != pytest.approx(one[0][1], rel=1e-3)


def test_parts_of_any_size_have_the_same_sums() -> None:
    groups, scores_T = random_groups(2)
    correction = Correction(CLICKS, PROPENSITIES, (1, 3))
    whole = correction.sums(scores_T, groups)
    tally, counts = Tally(len(scores_T), len(correction.figures)), WeightCounts()
    for first in range(0, groups.n_groups, 7):
        some = torch.arange(first, min(first + 7, groups.n_groups))
        rows = torch.cat([torch.arange(groups.offsets_Q1[q], groups.offsets_Q1[q + 1]) for q in some.tolist()])
        part = correction.sums([scores_N[rows] for scores_N in scores_T], groups.select(some))
        tally.add(some.numpy(), part.blocks)
        counts = counts.plus(part.counts)
    assert counts == pytest.approx(whole.counts)
    np.testing.assert_array_equal(tally.blocks().sums_BTM, whole.blocks.sums_BTM)
    np.testing.assert_array_equal(tally.blocks().defined_BM, whole.blocks.defined_BM)


def test_groups_of_data_without_positions_add_nothing_but_their_count() -> None:
    groups, scores_T = random_groups(3)
    assert groups.labels_N is not None
    found = Correction(CLICKS, PROPENSITIES, (3,)).sums(scores_T, replace(groups, positions_N=None))
    assert not found.blocks.sums_BTM.any()
    assert not found.blocks.defined_BM.any()
    assert found.counts == WeightCounts(*(2 * [int((groups.labels_N > 0).sum())]))
    assert found.counts.effective == 0


@pytest.mark.nightly
def test_over_many_draws_of_clicks_it_is_right_on_average_where_the_raw_figure_is_not() -> None:
    """Relevance is known, so is the share that a ranking has of it; users examine place p with p^-.7."""
    rng, q, length, draws = np.random.default_rng(3), 60, 10, 400
    relevance = rng.beta(1, 3, (q, length))
    place = np.argsort(np.argsort(-(relevance + rng.normal(0, 0.3, relevance.shape)), axis=1), axis=1)
    better = relevance + rng.normal(0, 0.12, relevance.shape)
    rank = np.argsort(np.argsort(-better, axis=1), axis=1)
    discount = np.where(np.arange(length) < 5, 1 / np.log2(np.arange(length) + 2), 0.0)
    truth = [float((relevance * discount[by]).sum() / relevance.sum()) for by in (rank, place)]
    examined = (np.arange(length) + 1.0) ** -BIAS
    correction = Correction(PropensitiesConfig(clicks="clicks"), examined, (5,))
    offsets = torch.arange(0, q * length + 1, length)
    positions = torch.from_numpy(place.ravel() + 1.0).float()
    total, mass = np.zeros((2, 2)), np.zeros(2)
    for _ in range(draws):
        clicks = rng.random(relevance.shape) < relevance * examined[place]
        labels = torch.from_numpy(clicks.ravel().astype(np.float32))
        groups = QueryGroups(torch.zeros(q * length, 1), offsets, labels, positions_N=positions)
        sums = correction.sums([torch.from_numpy(better.ravel()), order_shown(groups)], groups).blocks
        total += sums.sums_BTM.sum(axis=0)
        mass += sums.defined_BM.sum(axis=0)
    corrected, raw = (total / mass).T
    np.testing.assert_allclose(corrected, truth, atol=0.004)
    assert truth[0] > truth[1] + 0.05
    assert raw[0] < raw[1] - 0.02  # the raw figure prefers what was shown


class Log(NamedTuple):
    """A log, what is true of it, and the shares of relevance that rankers have in the test period."""

    truth: Truth
    url: str
    clicks: str
    good: str
    shares: dict[str, float]

    def config(self, **settings: Any) -> EvaluateConfig:
        parts = {
            name: {"data": self.url, "periods": p}
            for name, p in zip(("train", "validation", "test"), "abc", strict=True)
        }
        values = {"models": {"good": [self.good]}, "splits": parts, "baseline": AS_SHOWN, "resamples": 1000}
        values |= {"outliers": {"gap": None}, "propensities": {"clicks": self.clicks}}
        return EvaluateConfig.model_validate(values | settings)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Users of a poor ranker, whose clicks are the labels, and a better ranker by a feature."""
    folder = tmp_path_factory.mktemp("clicks")
    truth = position_based(0, queries=150, impressions=40, eta=BIAS, noise=0.0, skill=0.3)
    x_D = truth.relevance_D + np.random.default_rng(5).normal(0, 0.12, len(truth.relevance_D))
    made = [
        {**row, "labels": row["clicks"], "x": [x_D[int(name[1:])] for name in row["doc_ids"]]} for row in rows_of(truth)
    ]
    url = write_log(str(folder / "data"), made)
    clicks, good = str(folder / "clicks"), str(folder / "good")
    ClicksJob.model_validate({"out": clicks, "log": {"data": url}, "query": "meta_query"}).run()
    parts = {name: {"data": url, "periods": p} for name, p in zip(("train", "validation", "test"), "abc", strict=True)}
    FeatureJob.model_validate({"out": good, "splits": parts, "order": {"feature": "x"}}).run()
    tested = [i for i, row in enumerate(made) if row["period"] == "c"]
    pairs = truth.sessions.pairs_SP[tested]
    discount = np.where(np.arange(10) < 5, 1 / np.log2(np.arange(10) + 2), 0.0)
    relevance = truth.relevance_D[pairs]
    rank = np.argsort(np.argsort(-x_D[pairs], axis=1), axis=1)
    shares = {"good": discount[rank], AS_SHOWN: np.broadcast_to(discount, rank.shape)}
    known = {name: float((relevance * each).sum() / relevance.sum()) for name, each in shares.items()}
    return Log(truth, url, clicks, good, known)


@pytest.mark.nightly
def test_the_good_ranker_is_ahead_once_clicks_are_corrected_and_behind_before(log: Log, tmp_path: Path) -> None:
    job = EvaluateJob(out=str(tmp_path / "out"), evaluate=log.config())
    job.run(show=False)
    found = Evaluation.read(job.out)
    assert found.corrected is not None
    raw = found.methods[0].slices["all"].comparisons["ndcg@5"]
    assert raw.high is not None
    assert raw.high < 0
    of_good, of_shown = found.corrected.methods
    assert [of_good.name, of_shown.name] == ["good", AS_SHOWN]
    difference = of_good.comparisons[5]
    assert difference.low is not None
    assert difference.low > 0
    assert of_shown.comparisons == {}
    for method in found.corrected.methods:
        figure = method.corrected[5]
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= log.shares[method.name] <= figure.high
        plain = method.plain[5]
        assert plain.low is not None
        assert not plain.low <= log.shares[method.name] <= (plain.high or 0)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "*Corrected for positions*" in text
    assert text.index("No model ranks better than what was shown") < text.index("*Corrected for positions*")
    assert f" {cell(of_good.corrected[5])} |" in text
    assert f"The effective sample is {found.corrected.effective:,.0f} documents" in text
    assert 0 < found.corrected.effective < found.corrected.relevant
    assert found.corrected.unknown == 0
    assert "relevant documents are left out" not in text


@pytest.mark.nightly
def test_the_figures_do_not_depend_on_batches_and_another_look_makes_them_anew(log: Log, tmp_path: Path) -> None:
    one, other = (evaluate(log.config(docs_per_batch=n), str(tmp_path / str(n)), made_by={}) for n in (70, 100_000))
    assert one.corrected is not None
    assert other.corrected is not None
    assert one.corrected.methods == other.corrected.methods
    job = EvaluateJob(out=str(tmp_path / "out"), evaluate=log.config())
    before = job.inputs()
    assert log.clicks in before


@pytest.mark.slow
def test_what_cannot_be_corrected_is_an_error_with_the_remedy(log: Log, tmp_path: Path) -> None:
    def refused(config: EvaluateConfig) -> str:
        with pytest.raises(InputError) as error:
            evaluate(config, str(tmp_path / "bad"), made_by={})
        assert not (tmp_path / "bad").exists()
        return str(error.value)

    assert "jobs.clicks" in refused(log.config(propensities={"clicks": log.url}))
    fixed = position_based(0, queries=60, impressions=3, jitter=0.0, skill=0.0)
    rows = [{**row, "labels": row["clicks"]} for row in rows_of(fixed)]
    apart, clicks = write_log(str(tmp_path / "apart"), rows), str(tmp_path / "clicks")
    ClicksJob.model_validate({"out": clicks, "log": {"data": apart}, "query": "meta_query"}).run()
    said = refused(log.config(propensities={"clicks": clicks}))
    assert "has none by `harvested`: positions do not overlap" in said
    assert "set way to ratio" in said
    evaluate(
        log.config(propensities={"clicks": clicks, "way": "ratio"}),
        str(tmp_path / "ratio"),
        made_by={},
    )
    bare = write_log(str(tmp_path / "bare"), [{**row, "positions": None, "x": [0.0] * 10} for row in rows])
    parts = {n: {"data": bare, "periods": p} for n, p in zip(("train", "validation", "test"), "abc", strict=True)}
    assert "evaluate.propensities: " in refused(log.config(splits=parts, baseline=None))


@pytest.mark.slow
def test_the_page_says_which_trainings_corrected_for_positions(log: Log, tmp_path: Path) -> None:
    models, splits = {}, log.config().splits
    for name, unbiased in (("plain", False), ("unbiased", True)):
        models[name] = [str(tmp_path / name)]
        trees = LightGBMConfig(num_trees=5, num_threads=1, seed=len(models), unbiased=unbiased)
        grow_trees(trees, splits, models[name][0])
    out = tmp_path / "both"
    both = evaluate(log.config(models=models), str(out), made_by={})
    assert [method.trials[0].debiased for method in both.methods] == [None, "unbiased", None]
    assert " unbiased " in (out / "report.md").read_text().partition("## Methods")[2]


def test_a_network_states_how_it_was_corrected() -> None:
    configs = (
        FinetuneConfig.model_validate({"loss": {"kind": "softmax"}, "debias": debias})
        for debias in ({"kind": "dla"}, None)
    )
    assert [_debiased(config.model_dump(mode="json")) for config in configs] == ["dla", None]
