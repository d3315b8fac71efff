"""Evaluation of committed scores instead of a bundle: the right score for each document, or an error."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from linear_teacher import linear_teacher
from numpy.typing import NDArray

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.data.stream.scored import committed
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate import evaluate
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.scoring.score import ScoreJob

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
WEIGHTS = [1.0, -2.0]


@pytest.fixture(scope="module")
def scored(write_dataset: WriteDataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A data set in which every third group is unlabelled, a teacher, and its scores."""
    rng = np.random.default_rng(0)

    def groups(count: int) -> Groups:
        lengths = rng.integers(1, 9, count)
        labels = [rng.integers(0, 3, n).astype(np.float32) if i % 3 else None for i, n in enumerate(lengths)]
        return [(rng.normal(size=(n, 2)).astype(np.float32), y) for n, y in zip(lengths, labels, strict=True)]

    url = write_dataset({period: groups(30) for period in "abc"}, [Feature(name="x"), Feature(name="y")])
    folder = tmp_path_factory.mktemp("scored")
    teacher = linear_teacher(str(folder / "teacher"), url, WEIGHTS)
    ScoreJob(bundle=teacher, data=url, out=str(folder / "scores")).run()
    return url, teacher, str(folder / "scores")


@pytest.mark.parametrize("labelled", [False, True])
def test_documents_get_their_scores_in_any_order_and_batch(scored: tuple[str, str, str], labelled: bool) -> None:
    url, _, scores = scored
    split = Split(data=(url,), periods=("b..c",), labelled_fraction=0.5 if labelled else 1.0)
    look_up = committed(scores, split)
    shuffled = GroupStream(select(split, labelled=labelled), StreamConfig(docs_per_batch=20), rank=0)
    batches = [batch for step in shuffled.epoch(1) for batch in step.micro_batches.values() if batch is not None]
    assert len(batches) > 3
    for groups in batches:
        expected_N = groups.features_NF.double() @ torch.tensor(WEIGHTS, dtype=torch.float64)
        torch.testing.assert_close(look_up(groups), expected_N, atol=1e-5, rtol=1e-5)


def test_groups_without_scores_are_not_found(scored: tuple[str, str, str], tmp_path: Path) -> None:
    url, _, scores = scored
    known = committed(scores, Split(data=(url,), periods=("b",)))
    other = next(iterate(select(Split(data=(url,), periods=("c",)), labelled=False), docs_per_batch=50))
    assert known.find(other) is None
    own = next(iterate(select(Split(data=(url,), periods=("b",)), labelled=False), docs_per_batch=50))
    assert own.ids_Q is not None
    shorter = QueryGroups(own.features_NF[:1], torch.tensor([0, 1]), ids_Q=own.ids_Q[own.lengths_Q > 1][:1])
    assert known.find(shorter) is None
    with pytest.raises(InputError, match="period 'b' is not scored there"):
        committed(str(tmp_path), Split(data=(url,), periods=("b",)))


def test_scores_are_evaluated_as_the_bundle_that_gave_them(scored: tuple[str, str, str], tmp_path: Path) -> None:
    url, teacher, scores = scored
    named = {"train": "a", "validation": "b", "test": "c"}
    values = {
        "models": {"bundle": teacher},
        "scores": {"scores": scores},
        "splits": {name: {"data": url, "periods": period} for name, period in named.items()},
        "baseline": "scores",
        "resamples": 100,
    }
    config = EvaluateConfig.model_validate(values)
    first, second = evaluate(config, str(tmp_path / "out"), made_by={}, report=lambda _: None).methods
    assert (first.name, second.name) == ("scores", "bundle")
    assert first.slices["all"].summaries == second.slices["all"].summaries
    assert second.slices["all"].comparisons["ndcg@5"].difference == 0
    with pytest.raises(ValueError, match="models and scores both have a method 'bundle'"):
        EvaluateConfig.model_validate({**values, "scores": {"bundle": scores}, "baseline": None})
