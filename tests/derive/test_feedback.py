"""Fewer labels, binary feedback and implicit feedback: frequencies against exact probabilities."""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from reference import clicks as reference
from scipy import stats

from ltrscale.config import load
from ltrscale.data.dataset.manifest import Dataset, Feature, Manifest
from ltrscale.derive.feedback import (
    BinaryFeedback,
    Clicks,
    ImplicitFeedback,
    LabelledFraction,
    MinDocs,
    RelevantOnly,
    _gumbel,
    _intents,
    _last_kept_rank,
)
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.derive.step import Changes, StepStart
from ltrscale.draws import open_uniforms
from ltrscale.errors import InputError
from ltrscale.simulate.users import Cascade, PositionBased, attraction, examination, highest_grade

Make = Callable[..., GroupBlock]
Run = Callable[..., list[tuple[GroupBlock, Changes]]]


def fits(count: int, n: int, probability: float) -> bool:
    """Whether a count is within five standard deviations of a binomial's mean; exact where nothing is random."""
    if probability in (0, 1):
        return count == n * probability
    return abs(count - n * probability) <= 5 * np.sqrt(n * probability * (1 - probability)) + 1


@pytest.mark.parametrize("sample", ["random", "first"])
@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.3, 0.5, 1.0])
def test_exactly_the_fraction_keeps_labels(make_block: Make, run_step: Run, sample: str, fraction: float) -> None:
    labels = [[1.0, 0.0] if q % 3 else None for q in range(90)]
    block = make_block(labels, lengths=[2] * 90)
    step = LabelledFraction(fraction=fraction, sample=sample)
    had_Q = block.present_Q("labels")
    ((after, counted),) = run_step(step, block, 7)
    kept_Q = after.present_Q("labels")
    assert kept_Q.sum() == max(1, round(fraction * 60))
    assert counted.groups_changed == 60 - kept_Q.sum()
    assert not (kept_Q & ~had_Q).any()
    np.testing.assert_array_equal(after.columns_N["labels"][after.on_documents(kept_Q)], [1, 0] * int(kept_Q.sum()))
    if sample == "first":
        assert np.flatnonzero(kept_Q).tolist() == np.flatnonzero(had_Q)[: kept_Q.sum()].tolist()


def test_a_smaller_sample_is_part_of_a_larger_one_and_seeds_differ(make_block: Make) -> None:
    block = make_block([[0.0]] * 200)
    step = LabelledFraction(fraction=0.5)
    ranks = step.ranks(block, 1)
    few, many = (set(np.flatnonzero(ranks <= _last_kept_rank(ranks, f))) for f in (0.1, 0.5))
    assert few < many
    other = step.ranks(block, 2)
    assert set(np.flatnonzero(other <= _last_kept_rank(other, 0.1))) != few


def test_only_labelled_groups_without_a_positive_label_are_dropped(make_block: Make, run_step: Run) -> None:
    block = make_block([[0, 0], None, [0, 1], [0], [2]], lengths=[2, 3, 2, 1, 1])
    ((after, counted),) = run_step(RelevantOnly(), block)
    assert after.rows_Q.column("query_id").to_pylist() == ["q1", "q2", "q4"]
    assert (counted.groups_dropped, counted.documents_dropped) == (2, 3)
    np.testing.assert_array_equal(after.features_NF[:, 0], [2, 3, 4, 5, 6, 8])


def test_short_groups_are_dropped_with_labels_or_without(make_block: Make, run_step: Run) -> None:
    block = make_block([[0, 0, 1], None, [0, 1], [3, 0, 0, 0], None], lengths=[3, 2, 2, 4, 3])
    ((after, counted),) = run_step(MinDocs(documents=3), block)
    assert after.rows_Q.column("query_id").to_pylist() == ["q0", "q3", "q4"]
    assert after.lengths_Q.tolist() == [3, 4, 3]
    assert counted == Changes(groups_dropped=2, documents_dropped=4)
    np.testing.assert_array_equal(after.features_NF[:, 0], [0, 1, 2, *range(7, 14)])
    ((same, counted),) = run_step(MinDocs(documents=2), block)
    assert (len(same), counted) == (5, Changes())


def test_gumbel_numbers_follow_their_distribution() -> None:
    numbers = _gumbel(open_uniforms((0, "one"), np.arange(20_000)))
    assert stats.kstest(numbers, "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize(("sharpness", "tau"), [(4.0, 4.5), (4.0, 2.5), (1.0, 1.0)])
def test_binary_labels_have_the_probability_of_a_sigmoid(
    make_block: Make, sharpness: float, tau: float, run_step: Run
) -> None:
    n = 8000
    block = make_block([[0, 1, 2, 3, 4]] * n)
    step = BinaryFeedback(sharpness=sharpness, tau=tau, unlabel_empty=False)
    ((after, _),) = run_step(step, block, 3)
    labels = after.columns_N["labels"].reshape(n, 5)
    assert set(np.unique(labels)) <= {0, 1}
    for grade in range(5):
        assert fits(labels[:, grade].sum(), n, reference.binary(grade, sharpness, tau))
    first, second = labels[:, 3], labels[:, 4]  # drawn independently
    both = reference.binary(3, sharpness, tau) * reference.binary(4, sharpness, tau)
    assert fits((first * second).sum(), n, both)


def test_a_group_without_a_positive_label_is_unlabelled_unless_asked_to_stay(make_block: Make, run_step: Run) -> None:
    block = make_block([[0, 4], [0, 0], None], lengths=[2, 2, 2])
    ((after, _),) = run_step(BinaryFeedback(sharpness=100, tau=2), block)
    np.testing.assert_array_equal(after.columns_N["labels"], [0, 1, *[np.nan] * 4])
    ((after, _),) = run_step(BinaryFeedback(sharpness=100, tau=2, unlabel_empty=False), block)
    np.testing.assert_array_equal(after.columns_N["labels"], [0, 1, 0, 0, np.nan, np.nan])


@pytest.mark.parametrize("best", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kappa", [0.0, 0.1, 0.9, 1.0])
def test_intents_have_the_shares_of_equation_11(best: int, kappa: float) -> None:
    n = 100_000
    grid = (np.arange(n) + 0.5) / n  # every quantile once
    rho = reference.rho(best, 4)
    found = Counter(_intents(grid, np.full(n, rho), conversion=kappa).tolist())
    for intent, share in enumerate(reference.intents([0, best], 4, kappa)):
        assert found[intent] == pytest.approx(n * share, abs=1.01)


def test_implicit_labels_have_the_probabilities_of_equations_11_and_12(make_block: Make, run_step: Run) -> None:
    grades, n, copies = [0, 1, 3, 2], 1500, 4
    step = ImplicitFeedback(copies=copies, conversion=0.3, noise=0.2, max_relevance=4)
    blocks = [b for b, _ in run_step(step, make_block([grades] * n), 5, n) if len(b)]
    labels = np.concatenate([b.columns_N["labels"] for b in blocks]).reshape(-1, 4)
    assert len(labels) == n * copies
    for document, probabilities in enumerate(reference.implicit(grades, 4, 0.3, 0.2)):
        for label, probability in enumerate(probabilities):
            assert fits((labels[:, document] == label).sum(), len(labels), probability)
    all_zero = (labels == 0).all(1).mean()
    assert all_zero > 1 - reference.rho(3, 4)  # lists without any interaction are there: intent 0 gives nothing else


def test_a_conversion_may_have_a_higher_label(make_block: Make, run_step: Run) -> None:
    block = make_block([[0, 1, 3, 2]] * 200)
    step = ImplicitFeedback(copies=2, conversion=0.8, max_relevance=4)
    usual, high = (
        np.concatenate([b.columns_N["labels"] for b, _ in run_step(s, block, 5, 200) if len(b)])
        for s in (step, step.replace(conversion_label=4))
    )
    assert set(usual) == {0, 1, 2}
    np.testing.assert_array_equal(high, np.where(usual == 2, 4, usual))


def test_selection_is_uniform_without_replacement_and_keeps_order(make_block: Make, run_step: Run) -> None:
    block = make_block([[1.0] * 40, [2.0] * 3, None], lengths=[40, 3, 2])
    step = ImplicitFeedback(documents=16, copies=300, max_relevance=4)
    untouched, *samples = (b for b, _ in run_step(step, block, 0, 3))
    assert untouched.rows_Q.column("query_id").to_pylist() == ["q2"]
    drawn: Counter[float] = Counter()
    for copy, sample in enumerate(samples):
        assert sample.rows_Q.column("query_id").to_pylist() == [f"q0#{copy + 1}", f"q1#{copy + 1}"]
        assert sample.lengths_Q.tolist() == [16, 3]
        documents = sample.features_NF[:16, 0].tolist()
        assert documents == sorted(set(documents))
        assert documents[-1] < 40
        assert sample.features_NF[16:, 0].tolist() == [40, 41, 42]
        drawn.update(documents)
    assert len({tuple(sample.features_NF[:16, 0]) for sample in samples}) == 300
    assert all(fits(drawn[n], 300, 16 / 40) for n in range(40))
    keys = np.concatenate([untouched.keys_Q, *(sample.keys_Q for sample in samples)])
    assert len(np.unique(keys)) == len(keys)


def test_implicit_feedback_counts_what_it_takes_and_gives(make_block: Make, run_step: Run) -> None:
    block = make_block([[1.0] * 5, None, [2.0] * 3], lengths=[5, 2, 3])
    counted = [c for _, c in run_step(ImplicitFeedback(documents=4, copies=2, max_relevance=4), block, 0, 9)]
    assert sum(c.groups_dropped for c in counted) == 2
    assert sum(c.documents_dropped for c in counted) == 8
    assert sum(c.groups_added for c in counted) == 4
    assert sum(c.documents_added for c in counted) == 2 * (4 + 3)


def test_the_highest_grade_is_given_or_counted() -> None:
    assert highest_grade(None, {"0": 3, "10": 1, "9": 2}) == 10
    for counts in ({}, {"0": 5}):
        with pytest.raises(InputError, match="give it as max_relevance"):
            highest_grade(None, counts)


GRADES, POSITIONS = [0, 4, 1, 3, 2], [2, 5, 1, 3, 4]


@pytest.fixture
def clicked(run_step: Run) -> Callable[..., GroupBlock]:
    def run(step: Clicks, block: GroupBlock, seed: int = 0) -> GroupBlock:
        missing_N = np.full(block.n_documents, np.nan, np.float32)
        complete = block.with_columns(**{"positions": missing_N, "clicks": missing_N, **block.columns_N})
        ((after, _),) = run_step(step.replace(max_relevance=4), complete, seed)
        return after

    return run


def near(shares: np.ndarray, probabilities: list[float], n: int) -> bool:
    exact = np.array(probabilities)
    return bool((np.abs(shares - exact) <= 5 * np.sqrt(exact * (1 - exact) / n) + 1e-9).all())


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 2.0])
def test_position_based_clicks_have_their_probabilities(make_block: Make, eta: float, clicked: Make) -> None:
    n = 6000
    block = make_block([GRADES] * n, positions=[POSITIONS] * n)
    after = clicked(Clicks(user=PositionBased(eta=eta), noise=0.15), block)
    labels = after.columns_N["labels"].reshape(n, 5)
    assert near(labels.mean(0), reference.pbm(GRADES, POSITIONS, 4, eta, 0.15), n)
    covariance = np.cov(labels.T)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 5 * 0.25 / np.sqrt(n)  # clicks are independent


def test_cascade_clicks_have_their_probabilities_and_at_most_one_is_there(make_block: Make, clicked: Make) -> None:
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
    found = Cascade().clicks(np.where(attracted, 0.2, 0.8), np.full(len(attracted), 0.5), positions, bounds)
    for a, b in itertools.pairwise(bounds):
        candidates = [i for i in range(a, b) if attracted[i] and not np.isnan(positions[i])]
        expected = [min(candidates, key=lambda i: positions[i])] if candidates else []
        assert [i for i in range(a, b) if found[i]] == expected


def test_probabilities_agree_with_the_loops() -> None:
    exact = reference.pbm(GRADES, POSITIONS, 4, 0.7, 0.1)
    rho_N = np.array([reference.rho(grade, 4) for grade in GRADES])
    ours = examination(np.array(POSITIONS, float), eta=0.7) * attraction(rho_N, noise=0.1)
    np.testing.assert_allclose(ours, exact, rtol=1e-12)


def test_a_feature_ranks_with_missing_values_last_and_ties_at_random(make_block: Make, clicked: Make) -> None:
    n = 300
    features = np.zeros((6 * n, 3))
    features[:, 1] = np.tile([1, 5, np.nan, 3, 3, 9], n)
    after = clicked(Clicks(ranking="feature", feature="age"), make_block([[0] * 6] * n, features=features))
    positions = after.columns_N["positions"].reshape(n, 6)
    np.testing.assert_array_equal(positions[:, [5, 1, 0, 2]], np.tile([1, 2, 5, 6], (n, 1)))
    ties = positions[:, [3, 4]]
    assert {tuple(row) for row in ties.tolist()} == {(3, 4), (4, 3)}
    assert 0.35 < (ties[:, 0] == 3).mean() < 0.65


def test_a_random_ranking_is_a_uniform_permutation(make_block: Make, clicked: Make) -> None:
    n = 3000
    after = clicked(Clicks(ranking="random"), make_block([[4, 0, 0]] * n))
    positions = after.columns_N["positions"].reshape(n, 3)
    assert (np.sort(positions) == [1, 2, 3]).all()
    assert near(np.array([(positions[:, 0] == place).mean() for place in (1, 2, 3)]), [1 / 3] * 3, n)


def test_below_the_depth_nothing_is_shown_or_clicked(make_block: Make, clicked: Make) -> None:
    block = make_block([[4] * 5] * 50, positions=[[3, 1, 5, 2, 4]] * 50)
    after = clicked(Clicks(depth=2, user=PositionBased(eta=0)), block)
    np.testing.assert_array_equal(after.columns_N["positions"][:5], [np.nan, 1, np.nan, 2, np.nan])
    np.testing.assert_array_equal(after.columns_N["labels"].reshape(50, 5), np.tile([0, 1, 0, 1, 0], (50, 1)))


def test_labels_and_clicks_agree_and_unlabelled_groups_are_left(make_block: Make, clicked: Make) -> None:
    block = make_block(
        [[4, 0], None, [1, 2]], lengths=[2, 2, 2], positions=[[1, 2], [2, 1], [2, 1]], clicks=[None, [1, 0], None]
    )
    after = clicked(Clicks(user=PositionBased(eta=0), noise=1), block)
    np.testing.assert_array_equal(after.columns_N["labels"], [1, 1, np.nan, np.nan, 1, 1])
    np.testing.assert_array_equal(after.columns_N["clicks"], [1, 1, np.nan, np.nan, 1, 1])
    np.testing.assert_array_equal(after.columns_N["positions"], [1, 2, 2, 1, 2, 1])


def test_what_cannot_be_shown_is_an_error(make_block: Make, clicked: Make) -> None:
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


def test_trust_adds_clicks_by_position_whatever_is_shown(make_block: Make, clicked: Make) -> None:
    n, trust = 6000, 0.6
    block = make_block([GRADES] * n, positions=[POSITIONS] * n)
    after = clicked(Clicks(user=PositionBased(eta=0.5, trust=trust), noise=0.15), block)
    expected = []
    for examined, place in zip(reference.pbm([4] * 5, POSITIONS, 4, 0.5, 0.15), POSITIONS, strict=True):
        grade = GRADES[POSITIONS.index(place)]
        attractive = reference.pbm([grade], [1], 4, 0.5, 0.15)[0]
        expected.append(examined * (trust / place + (1 - trust / place) * attractive))
    assert near(after.columns_N["labels"].reshape(n, 5).mean(0), expected, n)


def test_jitter_moves_documents_by_normal_noise(make_block: Make, clicked: Make) -> None:
    n = 3000
    block = make_block([[1] * 5] * n, positions=[[3, 1, 5, np.nan, 2]] * n)
    after = clicked(Clicks(jitter=1.0), block).columns_N["positions"].reshape(n, 5)
    assert np.isnan(after[:, 3]).all()
    assert (np.sort(after[:, [0, 1, 2, 4]], axis=1) == [1, 2, 3, 4]).all()
    swapped = 1 - 0.7602  # P(1 + e < 2 + f) with deviation sqrt(2)
    assert near(np.array([(after[:, 1] > after[:, 4]).mean()]), [swapped], n)
    still = clicked(Clicks(), block).columns_N["positions"].reshape(n, 5)
    np.testing.assert_array_equal(still, np.tile([3, 1, 5, np.nan, 2], (n, 1)))


def test_copies_replace_labelled_groups_with_clicks_and_places_of_their_own(
    make_block: Make, run_step: Run, clicked: Make
) -> None:
    block = make_block([[4, 0, 1], None, [1, 2]], lengths=[3, 2, 2])
    missing_N = np.full(block.n_documents, np.nan, np.float32)
    block = block.with_columns(positions=missing_N, clicks=missing_N)
    parts = list(run_step(Clicks(ranking="random", copies=50, max_relevance=4), block, 0, 100))
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
