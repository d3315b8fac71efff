"""Fewer labels, binary feedback and implicit feedback: frequencies against exact probabilities."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from reference import clicks as reference
from scipy import stats

from ltrscale.derive.relabelling.feedback import (
    BinaryFeedback,
    ImplicitFeedback,
    LabelledFraction,
    binary_feedback,
    gumbel,
    implicit_feedback,
    intents,
    interactions,
    labelled_fraction,
    last_kept_rank,
    min_docs,
    relevant_only,
    sample_rank,
)
from ltrscale.derive.relabelling.step import Changes
from ltrscale.derive.rewrite import GroupBlock
from ltrscale.draws import open_uniforms
from ltrscale.errors import InputError
from ltrscale.simulate.users import highest_grade

Make = Callable[..., GroupBlock]


def fits(count: int, n: int, probability: float) -> bool:
    """Whether a count is within five standard deviations of a binomial's mean; exact where nothing is random."""
    if probability in (0, 1):
        return count == n * probability
    return abs(count - n * probability) <= 5 * np.sqrt(n * probability * (1 - probability)) + 1


@pytest.mark.parametrize("sample", ["random", "first"])
@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.3, 0.5, 1.0])
def test_exactly_the_fraction_keeps_labels(make_block: Make, sample: str, fraction: float) -> None:
    labels = [[1.0, 0.0] if q % 3 else None for q in range(90)]
    block = make_block(labels, lengths=[2] * 90)
    step = LabelledFraction(fraction=fraction, sample=sample)
    had_Q = block.present_Q("labels")
    last = last_kept_rank(sample_rank(step, block, 7)[had_Q], fraction)
    ((after, counted),) = labelled_fraction(step, 7, last)(block)
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
    ranks = sample_rank(step, block, 1)
    few, many = (set(np.flatnonzero(ranks <= last_kept_rank(ranks, f))) for f in (0.1, 0.5))
    assert few < many
    other = sample_rank(step, block, 2)
    assert set(np.flatnonzero(other <= last_kept_rank(other, 0.1))) != few


def test_only_labelled_groups_without_a_positive_label_are_dropped(make_block: Make) -> None:
    block = make_block([[0, 0], None, [0, 1], [0], [2]], lengths=[2, 3, 2, 1, 1])
    ((after, counted),) = relevant_only()(block)
    assert after.rows_Q.column("query_id").to_pylist() == ["q1", "q2", "q4"]
    assert (counted.groups_dropped, counted.documents_dropped) == (2, 3)
    np.testing.assert_array_equal(after.features_NF[:, 0], [2, 3, 4, 5, 6, 8])


def test_short_groups_are_dropped_with_labels_or_without(make_block: Make) -> None:
    block = make_block([[0, 0, 1], None, [0, 1], [3, 0, 0, 0], None], lengths=[3, 2, 2, 4, 3])
    ((after, counted),) = min_docs(3)(block)
    assert after.rows_Q.column("query_id").to_pylist() == ["q0", "q3", "q4"]
    assert after.lengths_Q.tolist() == [3, 4, 3]
    assert counted == Changes(groups_dropped=2, documents_dropped=4)
    np.testing.assert_array_equal(after.features_NF[:, 0], [0, 1, 2, *range(7, 14)])
    ((same, counted),) = min_docs(2)(block)
    assert (len(same), counted) == (5, Changes())


def test_gumbel_numbers_follow_their_distribution() -> None:
    numbers = gumbel(open_uniforms((0, "one"), np.arange(20_000)))
    assert stats.kstest(numbers, "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize(("sharpness", "tau"), [(4.0, 4.5), (4.0, 2.5), (1.0, 1.0)])
def test_binary_labels_have_the_probability_of_a_sigmoid(make_block: Make, sharpness: float, tau: float) -> None:
    n = 8000
    block = make_block([[0, 1, 2, 3, 4]] * n)
    step = BinaryFeedback(sharpness=sharpness, tau=tau, unlabel_empty=False)
    ((after, _),) = binary_feedback(step, 3)(block)
    labels = after.columns_N["labels"].reshape(n, 5)
    assert set(np.unique(labels)) <= {0, 1}
    for grade in range(5):
        assert fits(labels[:, grade].sum(), n, reference.binary(grade, sharpness, tau))
    first, second = labels[:, 3], labels[:, 4]  # drawn independently
    both = reference.binary(3, sharpness, tau) * reference.binary(4, sharpness, tau)
    assert fits((first * second).sum(), n, both)


def test_a_group_without_a_positive_label_is_unlabelled_unless_asked_to_stay(make_block: Make) -> None:
    block = make_block([[0, 4], [0, 0], None], lengths=[2, 2, 2])
    ((after, _),) = binary_feedback(BinaryFeedback(sharpness=100, tau=2), 0)(block)
    np.testing.assert_array_equal(after.columns_N["labels"], [0, 1, *[np.nan] * 4])
    ((after, _),) = binary_feedback(BinaryFeedback(sharpness=100, tau=2, unlabel_empty=False), 0)(block)
    np.testing.assert_array_equal(after.columns_N["labels"], [0, 1, 0, 0, np.nan, np.nan])


@pytest.mark.parametrize("best", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kappa", [0.0, 0.1, 0.9, 1.0])
def test_intents_have_the_shares_of_equation_11(best: int, kappa: float) -> None:
    n = 100_000
    grid = (np.arange(n) + 0.5) / n  # every quantile once
    rho = reference.rho(best, 4)
    found = Counter(intents(grid, np.full(n, rho), conversion=kappa).tolist())
    for intent, share in enumerate(reference.intents([0, best], 4, kappa)):
        assert found[intent] == pytest.approx(n * share, abs=1.01)


def test_interactions_never_exceed_the_intent() -> None:
    zero, one = np.zeros(4), np.ones(4)
    intent = np.array([0, 1, 2, 2])
    willing = interactions(intent, one, noise=0.1, buy_N=zero, click_N=zero)
    assert willing.tolist() == [0, 1, 2, 2]
    unmoved = interactions(intent, zero, noise=0.0, buy_N=zero, click_N=zero)
    assert unmoved.tolist() == [0, 0, 0, 0]


def test_implicit_labels_have_the_probabilities_of_equations_11_and_12(make_block: Make) -> None:
    grades, n, copies = [0, 1, 3, 2], 1500, 4
    step = ImplicitFeedback(copies=copies, conversion=0.3, noise=0.2)
    blocks = [b for b, _ in implicit_feedback(step, 5, top=4, span=n)(make_block([grades] * n)) if len(b)]
    labels = np.concatenate([b.columns_N["labels"] for b in blocks]).reshape(-1, 4)
    assert len(labels) == n * copies
    for document, probabilities in enumerate(reference.implicit(grades, 4, 0.3, 0.2)):
        for label, probability in enumerate(probabilities):
            assert fits((labels[:, document] == label).sum(), len(labels), probability)
    all_zero = (labels == 0).all(1).mean()
    assert all_zero > 1 - reference.rho(3, 4)  # lists without any interaction are there: intent 0 gives nothing else


def test_a_conversion_may_have_a_higher_label(make_block: Make) -> None:
    block = make_block([[0, 1, 3, 2]] * 200)
    step = ImplicitFeedback(copies=2, conversion=0.8)
    usual, high = (
        np.concatenate([b.columns_N["labels"] for b, _ in implicit_feedback(s, 5, top=4, span=200)(block) if len(b)])
        for s in (step, step.replace(conversion_label=4))
    )
    assert set(usual) == {0, 1, 2}
    np.testing.assert_array_equal(high, np.where(usual == 2, 4, usual))


def test_selection_is_uniform_without_replacement_and_keeps_order(make_block: Make) -> None:
    block = make_block([[1.0] * 40, [2.0] * 3, None], lengths=[40, 3, 2])
    step = ImplicitFeedback(documents=16, copies=300)
    untouched, *samples = (b for b, _ in implicit_feedback(step, 0, top=4, span=3)(block))
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


def test_implicit_feedback_counts_what_it_takes_and_gives(make_block: Make) -> None:
    block = make_block([[1.0] * 5, None, [2.0] * 3], lengths=[5, 2, 3])
    counted = [c for _, c in implicit_feedback(ImplicitFeedback(documents=4, copies=2), 0, top=4, span=9)(block)]
    assert sum(c.groups_dropped for c in counted) == 2
    assert sum(c.documents_dropped for c in counted) == 8
    assert sum(c.groups_added for c in counted) == 4
    assert sum(c.documents_added for c in counted) == 2 * (4 + 3)


def test_the_highest_grade_is_given_or_counted() -> None:
    assert highest_grade(None, {"0": 3, "10": 1, "9": 2}) == 10
    for counts in ({}, {"0": 5}):
        with pytest.raises(InputError, match="give it as max_relevance"):
            highest_grade(None, counts)
