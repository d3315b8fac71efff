"""The geometry of the projections: against slow loops, and what it says of good, solved and collapsed contrasts."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.config import kind_of, members
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import Contrastive
from ltrscale.pretext.objective import Siamese, negatives
from ltrscale.pretext.watch import ANCHORS, NEGATIVES, CollapseWatch, Geometry, Sums, collapse_measures, warning_of

CONTRASTIVE = [cls for cls in members(MethodConfig) if issubclass(cls, Contrastive)]


def vectors(n: int, width: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow(z0_ND: Tensor, z1_ND: Tensor, offsets: list[int], *, among: int) -> list[float]:
    """The sums, document by document; only the first `among` documents exist."""
    sums = [0.0] * 6
    for start, stop in pairwise(offsets):
        members_of = range(start, min(stop, among))
        for i in members_of:
            if i >= ANCHORS:
                continue
            unit = z0_ND[i] / z0_ND[i].norm()
            others = [z[j] / z[j].norm() for z in (z0_ND, z1_ND) for j in members_of if j != i]
            mate = z1_ND[i] / z1_ND[i].norm()
            sums[0] += 1
            sums[1] += float((unit - mate).square().sum())
            sums[2] += len(others)
            sums[3] += sum(math.exp(-2 * float((unit - other).square().sum())) for other in others)
            sums[4] += bool(others)
            sums[5] += bool(others) and all(float(unit @ mate) > float(unit @ other) for other in others)
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[3, 1, 0, 5, 2], [1, 1], [40], [300, 1, 200, 200], [20] * 30])
def test_measured_as_by_a_slow_loop(lengths: list[int]) -> None:
    offsets_Q1 = to_offsets(torch.tensor(lengths))
    z0_ND = vectors(sum(lengths))
    z1_ND = z0_ND + 0.4 * vectors(sum(lengths), seed=1)
    found = collapse_measures(z0_ND, z1_ND, offsets_Q1)
    assert found.tolist() == pytest.approx(slow(z0_ND, z1_ND, offsets_Q1.tolist(), among=NEGATIVES), rel=1e-9)


def test_half_precision_and_no_document_are_measured_too() -> None:
    offsets_Q1 = torch.tensor([0, 20, 50])
    z0_ND, z1_ND = vectors(50).bfloat16(), vectors(50, seed=1).bfloat16()
    found = collapse_measures(z0_ND, z1_ND, offsets_Q1)
    expected = collapse_measures(z0_ND.double(), z1_ND.double(), offsets_Q1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not collapse_measures(z0_ND[:0], z1_ND[:0], torch.tensor([0])).any()


def test_negatives_are_the_other_documents_of_the_group() -> None:
    assert negatives(torch.tensor([0, 3, 3, 4, 6]), 6).tolist() == [2, 2, 2, 0, 1, 1]


@pytest.mark.parametrize("cls", CONTRASTIVE, ids=kind_of)
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_the_loss_of_an_uninformed_encoder_is_the_loss_at_equal_similarities(
    cls: type[Siamese], temperature: float
) -> None:
    config = cls.model_validate({"temperature": temperature})
    offsets_Q1 = torch.tensor([0, 1, 4, 12])
    zeros_NP = torch.zeros(12, 4)  # a zero vector has cosine 0 to everything
    among_Q1 = config.among(offsets_Q1)
    losses_N = config.compare(None, zeros_NP, zeros_NP, among_Q1)  # type: ignore[arg-type]
    torch.testing.assert_close(config.uninformed(negatives(among_Q1, 12)), losses_N)
    assert len(among_Q1) == (2 if cls.contrasts_batch else 4)


def geometry(z0_ND: Tensor, z1_ND: Tensor, offsets_Q1: Tensor) -> Geometry:
    watch = CollapseWatch()
    for _ in range(2):
        watch.add(collapse_measures(z0_ND, z1_ND, offsets_Q1), torch.ones(4), torch.full((4,), 2.0))
    found = Geometry.from_sums(Sums(*watch.take().tolist()))
    assert not watch.take().any()
    return found


def test_solved_and_collapsed_contrasts_are_warned_of_and_others_are_not() -> None:
    offsets_Q1, z_ND = torch.arange(0, 201, 20), vectors(200, 32)
    good = geometry(z_ND, z_ND + 1.5 * vectors(200, 32, seed=1), offsets_Q1)
    assert warning_of(good, "") is None
    assert good.accuracy is not None
    assert 0.3 < good.accuracy < 0.9
    assert good.loss_left == 0.5
    solved = warning_of(geometry(z_ND, z_ND + 0.1 * vectors(200, 32, seed=1), offsets_Q1), Siamese.if_solved)
    assert solved is not None
    assert "found for 100% of documents, 50% of the loss is left" in solved
    assert "jobs.explain" in solved
    point_ND = torch.ones(200, 32) + 0.01 * vectors(200, 32)
    collapsed = warning_of(geometry(point_ND, point_ND + 0.001 * vectors(200, 32, seed=1), offsets_Q1), "")
    assert collapsed is not None
    assert "collapsed" in collapsed


def test_every_eighth_micro_batch_is_measured_and_the_first_of_each_epoch() -> None:
    watch = CollapseWatch()
    for epoch in (20, 3):
        assert [step for step in range(epoch) if watch.is_due()] == [*range(0, epoch, 8)]
        watch.take()


def test_what_cannot_be_measured_is_none() -> None:
    alone = collapse_measures(vectors(3), vectors(3), torch.arange(4))
    found = Geometry.from_sums(Sums(*alone.tolist(), 0.0, 0.0))
    assert found.alignment == pytest.approx(0, abs=1e-12)
    assert found[1:] == (None, None, None)
    assert warning_of(found, "") is None
