"""Interleaving: credit by the definitions, what simulated users give, and the job that compares all pairs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from linear_teacher import linear_teacher
from numpy.typing import NDArray
from reference import clicks as reference
from reference import interleaving as slow
from scipy.stats import ttest_1samp

from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.evaluation import impressions, interleave
from ltrscale.evaluation.impressions import (
    METHODS,
    Pair,
    RankedGroups,
    Traffic,
    _balanced,
    _balanced_credit,
    _debiased_weights,
    _interleaved_positions,
    _team_credit,
    _team_draft,
    lift,
    measure_agreement,
    simulate,
)
from ltrscale.evaluation.interleave import Interleaved, InterleaveJob, document
from ltrscale.evaluation.statistics.crossed import Difference
from ltrscale.evaluation.statistics.lifts import samples_needed
from ltrscale.reports.render import markdown
from ltrscale.scoring.score import ScoreJob
from ltrscale.simulate.users import Cascade, PositionBased, User
from ltrscale.trees.gbdt import GBDTJob

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
ONE, READER = [Pair(0, 1)], PositionBased()
SEPARATE = METHODS.index("separate")


def lists_of(n: int, *, noise: tuple[float, ...], seed: int = 0, length: int = 6) -> RankedGroups:
    """Groups of `length` documents and rankers that see the attraction through noise of these deviations."""
    rng = np.random.default_rng(seed)
    attraction_N = rng.random(n * length) ** 2
    scores_RN = np.stack([attraction_N + deviation * rng.normal(size=n * length) for deviation in noise])
    return RankedGroups(np.arange(n) + 1000 * seed, np.arange(n + 1) * length, attraction_N, scores_RN)


def traffic(user: User = READER, *, per_group: float = 20, depth: int | None = 4, seed: int = 0) -> Traffic:
    eta = user.eta if isinstance(user, PositionBased) else 1.0
    return Traffic(user, depth, eta, per_group, seed)


def test_separate_lists_have_the_clicks_of_the_click_model() -> None:
    grades, n = [0, 3, 1, 2], 20_000
    rho_N = np.array([0.1 + 0.9 * reference.rho(grade, 4) for grade in grades])
    scores_RN = np.array([[4.0, 3, 2, 1], [1.0, 2, 3, 4]])
    lists = RankedGroups(np.array([7]), np.array([0, 4]), rho_N, scores_RN)
    for user in (PositionBased(eta=0.7), Cascade()):
        found = simulate(lists, ONE, traffic(user, per_group=n)).sums_QPM3[0, 0, SEPARATE] / n
        for ranker, positions in enumerate(([1, 2, 3, 4], [4, 3, 2, 1])):
            if isinstance(user, Cascade):
                expected = sum(reference.cascade(grades, positions, 4, 0.1))
            else:
                expected = sum(reference.pbm(grades, positions, 4, 0.7, 0.1))
            assert found[ranker] == pytest.approx(expected, abs=5 * (found[2] / n) ** 0.5)


@pytest.mark.parametrize("user", [PositionBased(eta=0.5), PositionBased(eta=1.0)])
def test_debiased_credit_predicts_the_clicks_on_separate_lists(user: PositionBased) -> None:
    lists = lists_of(3000, noise=(0.1, 0.6))
    sums_QM3 = simulate(lists, ONE, traffic(user, per_group=10, depth=None)).sums_QPM3[:, 0]
    for ranker in (0, 1):
        gap_Q = sums_QM3[:, METHODS.index("debiased"), ranker] - sums_QM3[:, SEPARATE, ranker]
        assert ttest_1samp(gap_Q, 0).pvalue > 1e-3


@pytest.mark.parametrize("user", [PositionBased(), Cascade()])
def test_equal_rankers_have_no_difference(user: User) -> None:
    scores_N = lists_of(400, noise=(0.3,)).scores_RN[0].round(1)  # with ties
    lists = lists_of(400, noise=(0.3,))._replace(scores_RN=np.stack([scores_N, 2 * scores_N + 1]))
    sums_QM3 = simulate(lists, ONE, traffic(user)).sums_QPM3[:, 0]
    for method in ("balanced", "debiased", "separate"):
        np.testing.assert_array_equal(sums_QM3[:, METHODS.index(method), 0], sums_QM3[:, METHODS.index(method), 1])
    team_QM = sums_QM3[:, METHODS.index("team_draft")]
    assert ttest_1samp(team_QM[:, 0] - team_QM[:, 1], 0).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("user", [PositionBased(), Cascade()])
def test_the_better_ranker_wins_the_surer_the_more_impressions_there_are(user: User) -> None:
    def wins(n: int) -> NDArray[np.float64]:
        """How often the first ranker has more credit, by method."""
        each = [simulate(lists_of(n, noise=(0.2, 0.5), seed=s), ONE, traffic(user, per_group=1)) for s in range(1, 21)]
        sums_SM3 = np.array([outcome.sums_QPM3[:, 0].sum(axis=0) for outcome in each])
        return np.asarray((sums_SM3[..., 0] > sums_SM3[..., 1]).mean(axis=0))

    wins_few_M, wins_many_M = wins(15), wins(2000)
    assert (wins_many_M == 1).all()
    assert (wins_few_M < 1).all()


def test_neither_order_nor_batches_nor_the_other_groups_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = lists_of(60, noise=(0.2, 0.5, 0.5))
    pairs = [Pair(0, 1), Pair(1, 2)]
    whole = simulate(lists, pairs, traffic(per_group=7.5))
    assert 7 * 60 <= whole.impressions_Q.sum() <= 8 * 60
    monkeypatch.setattr(impressions, "_DOCUMENTS_AT_ONCE", 100)
    order_Q = np.random.default_rng(0).permutation(60)[:40]
    rows_N = (order_Q[:, None] * 6 + np.arange(6)).ravel()
    shuffled = RankedGroups(
        lists.ids_Q[order_Q], lists.offsets_Q1[:41], lists.attraction_N[rows_N], lists.scores_RN[:, rows_N]
    )
    found = simulate(shuffled, pairs, traffic(per_group=7.5))
    np.testing.assert_array_equal(found.impressions_Q, whole.impressions_Q[order_Q])
    np.testing.assert_array_equal(found.sums_QPM3, whole.sums_QPM3[order_Q])


def test_exchanging_the_rankers_exchanges_credit() -> None:
    lists = lists_of(50, noise=(0.2, 0.5))
    here, there = (simulate(lists, [pair], traffic()).sums_QPM3 for pair in (Pair(0, 1), Pair(1, 0, flipped=True)))
    np.testing.assert_array_equal(here[..., [1, 0, 2]], there)


def test_lift_is_negated_by_exchange_and_does_not_depend_on_the_unit() -> None:
    credit_2Q = np.random.default_rng(0).poisson([[3.0], [2.0]], (2, 50)).astype(float)
    there, back, scaled = lift(credit_2Q), lift(credit_2Q[::-1]), lift(7 * credit_2Q)
    assert there.mean == pytest.approx(2 * (credit_2Q[0].sum() - credit_2Q[1].sum()) / credit_2Q.sum())
    assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low))  # type: ignore[operator]
    assert back.p == pytest.approx(there.p)
    assert scaled.model_dump() == pytest.approx(there.model_dump())
    assert lift(np.zeros((2, 9))).mean is None


def coverage(repetitions: int, groups: int, per_group: int) -> dict[str, float]:
    """How often the interval of each method contains the lift that all groups together have."""
    n = repetitions * groups
    # few of the lists are worth much, as in a log, so the credit is skewed
    lists = lists_of(n, noise=(0.2, 0.4), seed=1)
    sums_QM3 = simulate(lists, ONE, traffic(per_group=per_group)).sums_QPM3[:, 0]
    found = {}
    for m, method in enumerate(METHODS):
        credit_2Q = sums_QM3[:, m, :2].T
        truth = 2 * (credit_2Q[0] - credit_2Q[1]).sum() / credit_2Q.sum()
        parts = [lift(part_2Q) for part_2Q in np.split(credit_2Q, repetitions, axis=1)]
        found[method] = float(np.mean([part.low <= truth <= part.high for part in parts]))  # type: ignore[operator]
    return found


@pytest.mark.nightly
def test_intervals_cover_the_true_lift() -> None:
    assert all(0.9 <= share <= 0.985 for share in coverage(300, 60, 2).values())


@pytest.mark.nightly
def test_intervals_cover_the_true_lift_as_often_as_they_say() -> None:
    for groups, per_group in ((150, 3), (60, 6)):
        assert all(0.935 <= share <= 0.965 for share in coverage(2000, groups, per_group).values())


@pytest.mark.slow
def test_the_needed_impressions_find_the_difference_with_the_power() -> None:
    n = 60_000
    sums_QM3 = simulate(lists_of(n, noise=(0.2, 0.5), seed=2), ONE, traffic(per_group=1)).sums_QPM3[:, 0]
    for sums_Q3 in np.moveaxis(sums_QM3, 1, 0)[:SEPARATE]:
        mean, square = (sums_Q3[:, 0] - sums_Q3[:, 1]).mean(), sums_Q3[:, 2].mean()
        needed = round(samples_needed(mean, square - mean**2) or 0)
        tests = n // needed
        assert tests > 50
        p_values = [lift(part.T).p for part in np.split(sums_Q3[: tests * needed, :2], tests)]
        found = np.mean([p is not None and p < 0.05 for p in p_values])
        assert found == pytest.approx(0.8, abs=3 * (0.8 * 0.2 / tests) ** 0.5)


def test_needed_impressions_are_those_of_the_textbook() -> None:
    assert samples_needed(0.5, 1.0) == pytest.approx(31.4, abs=0.1)  # Cohen 1988, d = .5: 31 and the t's 3
    assert samples_needed(-0.5, 1.0) == samples_needed(0.5, 1.0)
    assert samples_needed(0.0, 1.0) is None


def test_agreement_does_not_depend_on_the_order_within_pairs() -> None:
    rng = np.random.default_rng(0)
    one, other = ([Difference(mean=m, low=m - 1, high=m + 1, p=0.5) for m in rng.normal(size=9)] for _ in "ab")
    flipped = [
        [Difference(mean=-d.mean, low=-d.high, high=-d.low, p=d.p) if i % 2 else d for i, d in enumerate(row)]  # type: ignore[operator]
        for row in (one, other)
    ]
    found = measure_agreement(one, other)
    assert measure_agreement(*flipped).model_dump() == pytest.approx(found.model_dump())
    assert found.same == sum(x.mean * y.mean > 0 for x, y in zip(one, other, strict=True))  # type: ignore[operator]
    assert measure_agreement(one, one).correlation == pytest.approx(1)
    none = Difference(mean=None, low=None, high=None, p=None)
    assert measure_agreement([none], [one[0]]).correlation is None


@pytest.fixture(scope="module")
def rankers(write_dataset: WriteDataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A data set whose grades follow the first feature, and rankers that see it more or less well."""
    rng = np.random.default_rng(0)

    def group() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        features_LF = rng.normal(size=(int(rng.integers(2, 9)), 2)).astype(np.float32)
        return features_LF, np.clip(np.round(features_LF[:, 0]), 0, 2).astype(np.float32)

    url = write_dataset(
        {period: [group() for _ in range(60)] for period in "abc"}, [Feature(name="x"), Feature(name="y")]
    )
    folder = tmp_path_factory.mktemp("rankers")
    weights = {"good": [1.0, 0.5], "fair": [1.0, 1.0], "poor": [1.0, 4.0]}
    urls = {name: linear_teacher(str(folder / name), url, w) for name, w in weights.items()}
    ScoreJob(bundle=urls["poor"], data=url, out=str(folder / "scores")).run()
    return {"data": url, **urls, "scores": str(folder / "scores")}


def job(
    rankers: Mapping[str, str], out: Path, names: tuple[str, ...] = ("good", "poor"), **settings: Any
) -> InterleaveJob:
    values = {"models": {name: rankers[name] for name in names}, "test": {"data": rankers["data"]}, "impressions": 2000}
    values["max_relevance"] = 2
    return InterleaveJob.model_validate({"out": str(out), **values, **settings})


@pytest.mark.slow
def test_the_job_reports_all_pairs_and_is_skipped_when_it_is_up_to_date(
    rankers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"again <b>": rankers["scores"]}
    every = job(rankers, tmp_path / "out", ("good", "fair", "poor"), scores=scores)
    assert every.run()
    assert not every.run()
    found = Interleaved.read(every.out)
    pairs = {(pair.one, pair.other): pair for pair in found.pairs}
    assert list(pairs) == list(itertools.combinations(["good", "fair", "poor", "again <b>"], 2))
    assert found.means["good"] > found.means["fair"] > found.means["poor"] == found.means["again <b>"]
    for compared in pairs["good", "poor"].methods.values():
        assert compared.lift.low is not None
        assert compared.lift.low > 0
        assert compared.needed is not None
    close, far = (pairs["good", name].methods["debiased"].needed for name in ("fair", "poor"))
    assert close > 2 * far  # type: ignore[operator]
    assert pairs["poor", "again <b>"].methods["debiased"].needed is None  # the same ranker
    assert pairs["poor", "again <b>"].metric.mean == 0
    assert found.agreement["debiased"].same == found.agreement["debiased"].pairs == 5
    rows = pq.read_table(tmp_path / "out" / "groups.parquet")
    assert rows.num_rows == 6 * found.groups == 6 * 180
    assert found.impressions == sum(rows["impressions"].to_pylist()) / 6
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<b>" not in text
    assert "because it stands at" not in text
    trusting = markdown(document(found.replace(user=PositionBased(trust=0.3))))
    assert "probability 0.3 / p, because it stands at position p" in trusting
    assert "users who trust the order are none of them" in trusting
    assert "| good - poor " in capsys.readouterr().out


@pytest.mark.slow
def test_names_and_batches_do_not_matter_and_order_negates(
    rankers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, back = job(rankers, tmp_path / "there"), job(rankers, tmp_path / "back", ("poor", "good"))
    assert there.run()
    monkeypatch.setattr(interleave, "_DOCS_PER_BATCH", 50)
    assert back.run()
    (one,), (other,) = (Interleaved.read(each.out).pairs for each in (there, back))
    assert one.metric.mean == pytest.approx(-other.metric.mean)  # type: ignore[operator]
    for method in METHODS:
        assert one.methods[method].credit == other.methods[method].credit[::-1]
        assert one.methods[method].needed == other.methods[method].needed
        assert one.methods[method].lift.mean == -other.methods[method].lift.mean  # type: ignore[operator]


@pytest.mark.slow
def test_rankers_that_have_seen_test_periods_are_refused(rankers: dict[str, str], tmp_path: Path) -> None:
    splits = {name: {"data": rankers["data"], "periods": p} for name, p in (("train", "a"), ("validation", "b"))}
    trees, scores = str(tmp_path / "trees"), str(tmp_path / "scores")
    GBDTJob.model_validate({"out": trees, "splits": splits, "gbdt": {"num_trees": 2, "num_threads": 1}}).run()
    ScoreJob(bundle=trees, data=rankers["data"], out=scores).run()
    models = {"good": rankers["good"]}
    for names in ({"models": {**models, "trees": trees}}, {"models": models, "scores": {"trees": scores}}):
        with pytest.raises(InputError, match=r"trees was made from other splits .* validation and test both take"):
            job(rankers, tmp_path / "seen", test={"data": rankers["data"], "periods": "b..c"}, **names).run()
        job(rankers, tmp_path / "new", test={"data": rankers["data"], "periods": "c"}, **names).check()


def test_bad_settings_are_named(rankers: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than two rankers"):
        job(rankers, tmp_path, ("good",))
    with pytest.raises(ValueError, match="models and scores both have a ranker 'good'"):
        job(rankers, tmp_path, scores={"good": rankers["scores"]})
    with pytest.raises(ValueError, match="users click by labels"):
        job(rankers, tmp_path, test={"data": rankers["data"], "scores": rankers["scores"]})
    with pytest.raises(InputError, match="label 2 is above max_relevance 1"):
        job(rankers, tmp_path / "low", max_relevance=1).run()
    with pytest.raises(InputError, match="does not state the highest label; give it as max_relevance"):
        job(rankers, tmp_path / "unknown", max_relevance=None).run()


Ranking = tuple[int, ...]
ABC, BCA = (0, 1, 2), (1, 2, 0)


def ranks(rankings: Sequence[Ranking]) -> NDArray[np.int64]:
    """The rank of each document, list after list."""
    return np.concatenate([np.argsort(ranking) for ranking in rankings])


def batched(pairs: Sequence[tuple[Ranking, Ranking]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranks by both rankers and offsets of several lists."""
    ranks_2N = np.stack([ranks([pair[r] for pair in pairs]) for r in (0, 1)])
    return ranks_2N, np.concatenate([[0], np.cumsum([len(a) for a, _ in pairs])])


def all_pairs(length: int) -> list[tuple[Ranking, Ranking]]:
    """All rankings against the identity, and against one other for lists of different lengths."""
    orders = list(itertools.permutations(range(length)))
    return [(orders[0], other) for other in orders] + [(orders[-1], orders[len(orders) // 2])]


PAIRS = [pair for length in (1, 2, 3, 5, 4) for pair in all_pairs(length)]


def shown_lists(positions_N: NDArray[np.generic], offsets_Q1: NDArray[np.int64]) -> list[list[int]]:
    return [np.argsort(positions_N[a:b]).tolist() for a, b in itertools.pairwise(offsets_Q1)]


def test_balanced_lists_are_those_of_the_algorithm() -> None:
    ranks_2N, offsets_Q1 = batched(PAIRS)
    for first, positions_N in enumerate(_balanced(ranks_2N, offsets_Q1)):
        expected = [slow.balanced(a, b, a_first=first == 0) for a, b in PAIRS]
        # the algorithm ends with one of the rankings, whose last documents the other has no turn for
        found = shown_lists(positions_N, offsets_Q1)
        assert [f[: len(e)] for f, e in zip(found, expected, strict=True)] == expected
        assert all(len(f) == len(a) for f, (a, _) in zip(found, PAIRS, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_team_drafts_are_those_of_the_algorithm_for_all_coins(depth: int | None) -> None:
    cases = [(a, b, coins) for a, b in PAIRS for coins in itertools.product((0, 1), repeat=(len(a) + 1) // 2)]
    ranks_2N, offsets_Q1 = batched([(a, b) for a, b, _ in cases])
    coins_N = np.concatenate([np.resize(coins, len(a)) for a, _, coins in cases])
    positions_N, teams_N = _team_draft(ranks_2N, offsets_Q1, coins_N, depth=depth)
    for (a, b, coins), start, end in zip(cases, offsets_Q1, offsets_Q1[1:], strict=False):
        expected, team_a, _ = slow.team_draft(a, b, coins)
        drafted = expected[:depth]
        positions = [drafted.index(d) + 1 if d in drafted else np.nan for d in range(len(a))]
        np.testing.assert_array_equal(positions_N[start:end], positions)
        teams = [-1 if d not in drafted else int(d not in team_a) for d in range(len(a))]
        assert teams_N[start:end].tolist() == teams


@pytest.mark.parametrize("depth", [None, 2])
def test_balanced_credit_is_that_of_the_definition_for_all_clicks(depth: int | None) -> None:
    for a, b in all_pairs(4):
        ranks_2N, offsets_Q1 = batched([(a, b)])
        for first in (0, 1):
            positions_N = _interleaved_positions(_balanced(ranks_2N, offsets_Q1)[first], depth)
            order = [int(d) for d in np.argsort(positions_N) if not np.isnan(positions_N[d])]
            for n in range(len(order) + 1):
                for clicked in itertools.combinations(order, n):
                    clicked_N = np.isin(np.arange(4), clicked)
                    credit_21 = _balanced_credit(clicked_N, ranks_2N, positions_N, offsets_Q1)
                    expected = slow.balanced_credit(a, b, order, set(clicked))
                    assert tuple(credit_21[:, 0]) == expected


def expected_credits(
    pair: tuple[Ranking, Ranking], clicks: NDArray[np.float64], *, depth: int | None = None, eta: float = 1
) -> dict[str, NDArray[np.float64]]:
    """Mean credit [2] by method over all coins, for a user who makes one click, on d at p with chance clicks[d, p - 1].

    A table of single clicks is enough where the credit is additive; for balanced interleaving it is the case of one.
    """
    (n, ranks_2N, offsets_Q1) = (len(pair[0]), *batched([pair]))
    weights_2N = _debiased_weights(ranks_2N, offsets_Q1, eta=eta, depth=depth)
    of_lists: dict[str, list[NDArray[np.float64]]] = {"balanced": [], "debiased": [], "team_draft": []}

    def over_clicks(positions_N: NDArray[np.float64]) -> list[tuple[NDArray[np.bool_], float]]:
        there = [d for d in range(n) if not np.isnan(positions_N[d])]
        return [(np.arange(n) == d, clicks[d, int(positions_N[d]) - 1]) for d in there]

    for positions_N in _balanced(ranks_2N, offsets_Q1):
        each = over_clicks(_interleaved_positions(positions_N, depth))
        of_lists["balanced"].append(
            sum(
                p * _balanced_credit(c, ranks_2N, _interleaved_positions(positions_N, depth), offsets_Q1)[:, 0]
                for c, p in each
            )
        )
        of_lists["debiased"].append(sum(p * weights_2N[:, c][:, 0] for c, p in each))
    for coins in itertools.product((0, 1), repeat=n):
        positions_N, teams_N = _team_draft(ranks_2N, offsets_Q1, np.array(coins), depth=depth)
        each = over_clicks(positions_N)
        of_lists["team_draft"].append(sum(p * _team_credit(c, teams_N, offsets_Q1)[:, 0] for c, p in each))
    return {method: np.mean(values, axis=0) for method, values in of_lists.items()}


def by_position(attraction: Sequence[float], eta: float) -> NDArray[np.float64]:
    """The chance of a click on each document at each position, by the position-based model."""
    return np.outer(attraction, np.arange(1.0, len(attraction) + 1) ** -eta)


def test_random_clicks_prefer_the_second_ranking_by_two_to_one_in_balanced_interleaving_alone() -> None:
    found = expected_credits((ABC, BCA), np.full((3, 3), 1 / 3), eta=0)
    np.testing.assert_allclose(found["balanced"], [1 / 3, 2 / 3])  # Radlinski, Kurup and Joachims 2008, section 3.3.1
    np.testing.assert_allclose(found["debiased"], found["debiased"][::-1])
    np.testing.assert_allclose(found["team_draft"], found["team_draft"][::-1])


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("depth", [None, 1, 2, 3])
def test_clicks_that_depend_on_the_position_alone_prefer_nobody(eta: float, depth: int | None) -> None:
    biased = 0
    for pair in all_pairs(4):
        found = expected_credits(pair, by_position([0.5] * 4, eta), depth=depth, eta=eta)
        for method in ("debiased", "team_draft"):
            assert found[method][0] == pytest.approx(found[method][1], abs=1e-12), (method, pair)
        biased += abs(found["balanced"][0] - found["balanced"][1]) > 1e-9
    assert (biased > 0) == (depth not in (1, 2))  # two positions are fair


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("depth", [None, 1, 2, 3, 4])
def test_debiased_credit_is_the_clicks_on_the_first_of_each_ranking(eta: float, depth: int | None) -> None:
    attraction = np.random.default_rng(0).random(5)
    for a, b in all_pairs(5)[::3]:
        found = expected_credits((a, b), by_position(attraction, eta), depth=depth, eta=eta)["debiased"]
        lists = [slow.balanced(a, b, a_first)[:depth] for a_first in (True, False)]
        both = set(lists[0]) | set(lists[1]) if depth else set(a)
        reach = max(k for k in range(6) if {*a[:k], *b[:k]} <= both)
        assert reach == 5 or (depth is not None and reach >= (depth + 1) // 2)
        expected = [slow.value(ranking, attraction, lambda p: p**-eta, reach) for ranking in (a, b)]
        np.testing.assert_allclose(found, expected)


def test_debiased_credit_finds_what_team_drafts_cannot() -> None:
    only_c = by_position([0, 0, 1], eta=1)  # bca has c at position 2, abc at 3
    found = expected_credits((ABC, BCA), only_c, eta=1)
    assert found["team_draft"][0] == pytest.approx(found["team_draft"][1])
    np.testing.assert_allclose(found["debiased"], [1 / 3, 1 / 2])


@pytest.mark.parametrize("eta", [0.0, 1.0, 2.0])
def test_debiased_weights_are_bounded(eta: float) -> None:
    ranks_2N, offsets_Q1 = batched(PAIRS)
    assert _debiased_weights(ranks_2N, offsets_Q1, eta=eta).max() <= 2**eta + 1e-12
    for depth in (1, 2, 3):
        assert _debiased_weights(ranks_2N, offsets_Q1, eta=eta, depth=depth).max() <= 2 * 2**eta + 1e-12


def test_equal_rankings_have_equal_credit_and_exchanged_ones_exchange_it() -> None:
    clicks = np.random.default_rng(1).random((4, 4))
    for a, b in all_pairs(4):
        one, other = (expected_credits(pair, clicks, depth=3) for pair in ((a, b), (b, a)))
        for method, credit_2 in one.items():
            np.testing.assert_allclose(credit_2, other[method][::-1])
            assert a != b or credit_2[0] == pytest.approx(credit_2[1])
