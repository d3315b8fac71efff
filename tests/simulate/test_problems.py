"""Synthetic ranking problems: laws of their lists and labels, and that examples teach how to rank."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.linear_model import Ridge

from ltrscale.batch import standardise_groups
from ltrscale.ranking.metrics import ndcg
from ltrscale.simulate.problems import Problems, ProblemsConfig, problems

SMALL = ProblemsConfig(examples=(8, 20), questions=12, features=(8, 16), documents=(200, 500), values=30_000)


def drawn(number: int, seed: int = 0) -> Problems:
    return problems(SMALL, seed=seed, number=number)


def test_the_settings_the_seed_and_the_number_decide() -> None:
    one, same = drawn(3), drawn(3)
    torch.testing.assert_close((one.features_BNF, one.labels_BN), (same.features_BNF, same.labels_BN), rtol=0, atol=0)
    for other in (drawn(4), drawn(3, seed=1)):
        assert one.features_BNF.shape != other.features_BNF.shape or not one.features_BNF.equal(other.features_BNF)


@pytest.mark.slow
def test_lists_are_as_many_and_as_long_as_the_settings_say() -> None:
    seen = set()
    for number in range(60):
        made = drawn(number)
        lengths_Q = made.offsets_Q1.diff()
        assert len(lengths_Q) == made.n_examples + 12
        assert 8 <= made.n_examples <= 20
        assert 4 <= lengths_Q.min() <= lengths_Q.max() <= 40
        assert made.n_read == lengths_Q[: made.n_examples].sum() < made.labels_BN.shape[1] <= 500
        assert 2 <= len(made.features_BNF) <= 12
        assert 8 <= made.features_BNF.shape[2] <= 16
        seen.add((made.n_examples, made.features_BNF.shape[2]))
    assert len(seen) > 30


@pytest.mark.slow
def test_values_are_finite_and_labels_are_grades_of_a_few_documents() -> None:
    shares, highest = [], set()
    for number in range(60):
        made = drawn(number)
        assert made.features_BNF.isfinite().all()
        assert set(made.labels_BN.flatten().tolist()) == set(range(int(made.labels_BN.max()) + 1))
        shares += (made.labels_BN > 0).float().mean(1).tolist()
        highest |= set(made.labels_BN.amax(1).int().tolist())
    assert highest == {1, 2, 4}
    assert 0.1 < np.median(shares) < 0.3
    assert min(shares) > 0.005
    assert max(shares) < 0.8


@pytest.mark.slow
def test_each_problem_has_a_law_of_its_own_which_a_linear_fit_of_its_examples_partly_finds() -> None:
    own: list[float] = []
    foreign: list[float] = []
    for number in range(12):
        made = drawn(number)
        read, offsets_Q1 = made.n_read, made.offsets_Q1[made.n_examples :] - made.n_read
        z_BNF = torch.stack([standardise_groups(x_NF, made.offsets_Q1) for x_NF in made.features_BNF])
        pairs = list(zip(z_BNF, made.labels_BN, strict=True))
        fits = [Ridge(alpha=30).fit(z_NF[:read].numpy(), labels_N[:read].numpy()) for z_NF, labels_N in pairs]
        for i, (z_NF, labels_N) in enumerate(pairs):
            chance = ndcg(torch.zeros(len(z_NF) - read), labels_N[read:], offsets_Q1, k=5).nanmean()
            for gains, fit in ((own, fits[i]), (foreign, fits[i - 1])):
                scores_N = torch.from_numpy(fit.predict(z_NF[read:].numpy()))
                gains.append(float(ndcg(scores_N, labels_N[read:], offsets_Q1, k=5).nanmean() - chance))
    assert np.mean(own) > 0.1
    assert np.mean(foreign) < np.mean(own) / 2


def test_settings_that_no_problem_can_meet_are_refused() -> None:
    with pytest.raises(ValidationError, match="rising"):
        ProblemsConfig(examples=(9, 8))
    with pytest.raises(ValidationError, match="at least 616"):
        ProblemsConfig(documents=(600, 900))
