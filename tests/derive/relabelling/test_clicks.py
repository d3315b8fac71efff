"""Click simulators: frequencies against exact probabilities, and positions of documents."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from reference import clicks as reference

from ltrscale.config import load
from ltrscale.data.dataset.manifest import Dataset, Feature, Manifest
from ltrscale.derive.relabelling.clicks import Clicks, clicks
from ltrscale.derive.relabelling.step import StepStart
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.errors import InputError
from ltrscale.simulate.users import Cascade, PositionBased, attraction, examination, first_attracted

Make = Callable[..., GroupBlock]
GRADES, POSITIONS = [0, 4, 1, 3, 2], [2, 5, 1, 3, 4]


def clicked(step: Clicks, block: GroupBlock, *, seed: int = 0, feature: int | None = None) -> GroupBlock:
    missing_N = np.full(block.n_documents, np.nan, np.float32)
    complete = block.with_columns(**{"positions": missing_N, "clicks": missing_N, **block.columns_N})
    ((after, _),) = clicks(step, seed, top=4, feature=feature, span=1_000_000)(complete)
    return after


def near(shares: np.ndarray, probabilities: list[float], n: int) -> bool:
    exact = np.array(probabilities)
    return bool((np.abs(shares - exact) <= 5 * np.sqrt(exact * (1 - exact) / n) + 1e-9).all())


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 2.0])
def test_position_based_clicks_have_their_probabilities(make_block: Make, eta: float) -> None:
    n = 6000
    block = make_block([GRADES] * n, positions=[POSITIONS] * n)
    after = clicked(Clicks(user=PositionBased(eta=eta), noise=0.15), block)
    labels = after.columns_N["labels"].reshape(n, 5)
    assert near(labels.mean(0), reference.pbm(GRADES, POSITIONS, 4, eta, 0.15), n)
    covariance = np.cov(labels.T)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 5 * 0.25 / np.sqrt(n)  # clicks are independent


def test_cascade_clicks_have_their_probabilities_and_at_most_one_is_there(make_block: Make) -> None:
    n = 6000
    block = make_block([GRADES] * n, positions=[POSITIONS] * n)
    after = clicked(Clicks(user=Cascade(), noise=0.15), block)
    labels = after.columns_N["labels"].reshape(n, 5)
    assert near(labels.mean(0), reference.cascade(GRADES, POSITIONS, 4, 0.15), n)
    assert labels.sum(1).max() == 1


def test_the_first_attracted_document_is_a_loop_over_positions() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 7, 200)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    attracted = rng.random(bounds[-1]) < 0.4
    positions = np.where(rng.random(bounds[-1]) < 0.2, np.nan, rng.permuted(np.arange(bounds[-1])) + 1.0)
    found = first_attracted(attracted, positions, bounds)
    for a, b in itertools.pairwise(bounds):
        candidates = [i for i in range(a, b) if attracted[i] and not np.isnan(positions[i])]
        expected = [min(candidates, key=lambda i: positions[i])] if candidates else []
        assert [i for i in range(a, b) if found[i]] == expected


def test_probabilities_agree_with_the_loops() -> None:
    exact = reference.pbm(GRADES, POSITIONS, 4, 0.7, 0.1)
    rho_N = np.array([reference.rho(grade, 4) for grade in GRADES])
    ours = examination(np.array(POSITIONS, float), eta=0.7) * attraction(rho_N, noise=0.1)
    np.testing.assert_allclose(ours, exact, rtol=1e-12)


def test_a_feature_ranks_with_missing_values_last_and_ties_at_random(make_block: Make) -> None:
    n = 300
    features = np.zeros((6 * n, 3))
    features[:, 1] = np.tile([1, 5, np.nan, 3, 3, 9], n)
    after = clicked(Clicks(ranking="feature", feature="age"), make_block([[0] * 6] * n, features=features), feature=1)
    positions = after.columns_N["positions"].reshape(n, 6)
    np.testing.assert_array_equal(positions[:, [5, 1, 0, 2]], np.tile([1, 2, 5, 6], (n, 1)))
    ties = positions[:, [3, 4]]
    assert {tuple(row) for row in ties.tolist()} == {(3, 4), (4, 3)}
    assert 0.35 < (ties[:, 0] == 3).mean() < 0.65


def test_a_random_ranking_is_a_uniform_permutation(make_block: Make) -> None:
    n = 3000
    after = clicked(Clicks(ranking="random"), make_block([[4, 0, 0]] * n))
    positions = after.columns_N["positions"].reshape(n, 3)
    assert (np.sort(positions) == [1, 2, 3]).all()
    assert near(np.array([(positions[:, 0] == place).mean() for place in (1, 2, 3)]), [1 / 3] * 3, n)


def test_below_the_depth_nothing_is_shown_or_clicked(make_block: Make) -> None:
    block = make_block([[4] * 5] * 50, positions=[[3, 1, 5, 2, 4]] * 50)
    after = clicked(Clicks(depth=2, user=PositionBased(eta=0)), block)
    np.testing.assert_array_equal(after.columns_N["positions"][:5], [np.nan, 1, np.nan, 2, np.nan])
    np.testing.assert_array_equal(after.columns_N["labels"].reshape(50, 5), np.tile([0, 1, 0, 1, 0], (50, 1)))


def test_labels_and_clicks_agree_and_unlabelled_groups_are_left(make_block: Make) -> None:
    block = make_block(
        [[4, 0], None, [1, 2]], lengths=[2, 2, 2], positions=[[1, 2], [2, 1], [2, 1]], clicks=[None, [1, 0], None]
    )
    after = clicked(Clicks(user=PositionBased(eta=0), noise=1), block)
    np.testing.assert_array_equal(after.columns_N["labels"], [1, 1, np.nan, np.nan, 1, 1])
    np.testing.assert_array_equal(after.columns_N["clicks"], [1, 1, np.nan, np.nan, 1, 1])
    np.testing.assert_array_equal(after.columns_N["positions"], [1, 2, 2, 1, 2, 1])


def test_what_cannot_be_shown_is_an_error(make_block: Make) -> None:
    with pytest.raises(InputError, match="query q1 of period all has no positions; prepare it with positions"):
        clicked(Clicks(), make_block([[1], [2]], positions=[[1], None]))
    with pytest.raises(InputError, match="query q1 of period all has a position below 1; count positions from 1"):
        clicked(Clicks(), make_block([[1], [2, 1]], positions=[[1], [1, 0]]))
    features = (Feature(name="bm25_title"), Feature(name="pagerank"))
    start = StepStart(Dataset("data", Manifest(features=features, files=())), 0, lambda: iter(()), 1)
    assert start.feature("pagerank") == 1
    with pytest.raises(InputError, match="no feature 'bm25'; the nearest name is 'bm25_title'"):
        start.feature("bm25")
    for overrides in (["ranking=feature"], ["feature=bm25"]):
        with pytest.raises(InputError, match="give both or neither"):
            load(Clicks, overrides=overrides)


def test_trust_adds_clicks_by_position_whatever_is_shown(make_block: Make) -> None:
    n, trust = 6000, 0.6
    block = make_block([GRADES] * n, positions=[POSITIONS] * n)
    after = clicked(Clicks(user=PositionBased(eta=0.5, trust=trust), noise=0.15), block)
    expected = []
    for examined, place in zip(reference.pbm([4] * 5, POSITIONS, 4, 0.5, 0.15), POSITIONS, strict=True):
        grade = GRADES[POSITIONS.index(place)]
        attractive = reference.pbm([grade], [1], 4, 0.5, 0.15)[0]
        expected.append(examined * (trust / place + (1 - trust / place) * attractive))
    assert near(after.columns_N["labels"].reshape(n, 5).mean(0), expected, n)


def test_jitter_moves_documents_by_normal_noise(make_block: Make) -> None:
    n = 3000
    block = make_block([[1] * 5] * n, positions=[[3, 1, 5, np.nan, 2]] * n)
    after = clicked(Clicks(jitter=1.0), block).columns_N["positions"].reshape(n, 5)
    assert np.isnan(after[:, 3]).all()
    assert (np.sort(after[:, [0, 1, 2, 4]], axis=1) == [1, 2, 3, 4]).all()
    swapped = 1 - 0.7602  # P(1 + e < 2 + f) with deviation sqrt(2)
    assert near(np.array([(after[:, 1] > after[:, 4]).mean()]), [swapped], n)
    still = clicked(Clicks(), block).columns_N["positions"].reshape(n, 5)
    np.testing.assert_array_equal(still, np.tile([3, 1, 5, np.nan, 2], (n, 1)))


def test_copies_replace_labelled_groups_with_clicks_and_places_of_their_own(make_block: Make) -> None:
    block = make_block([[4, 0, 1], None, [1, 2]], lengths=[3, 2, 2])
    missing_N = np.full(block.n_documents, np.nan, np.float32)
    block = block.with_columns(positions=missing_N, clicks=missing_N)
    parts = list(clicks(Clicks(ranking="random", copies=50), 0, top=4, feature=None, span=100)(block))
    groups = [after for after, _ in parts if len(after)]
    assert [len(after) for after in groups] == [1] + [2] * 50
    assert sum(changed.groups_added for _, changed in parts) == 100
    assert sum(changed.groups_dropped for _, changed in parts) == 2
    ids = [after.rows_Q.column("query_id").to_pylist() for after in groups]
    assert ids[:3] == [["q1"], ["q0#1", "q2#1"], ["q0#2", "q2#2"]]
    keys = np.concatenate([after.keys_Q for after in groups])
    assert len(np.unique(keys)) == 101
    shown = np.array([after.columns_N["positions"][:3] for after in groups[1:]])
    assert len(np.unique(shown, axis=0)) == 6
    once = clicked(Clicks(ranking="random"), block)
    np.testing.assert_array_equal(groups[1].columns_N["positions"][:3], once.columns_N["positions"][:3])
