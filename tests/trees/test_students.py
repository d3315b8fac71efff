"""Students: trees that learn a teacher's scores of all groups, labelled or not."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from linear_teacher import linear_teacher
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.agreement import kendall_tau
from ltrscale.scoring.score import ScoreJob
from ltrscale.trees.gbdt import TreesStudent, train_gbdt

Groups = list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]
WriteDataset = Callable[[Mapping[str, Groups], list[Feature]], str]
WEIGHTS = [1.0, -0.7, 100.0]
"""The last feature is the same for all documents of a list: the teacher moves lists as a whole, and far."""
KINDS = ("regression", "lambdarank", "softmax")


def student(kind: str, **trees: object) -> TreesStudent:
    found: TreesStudent = TypeAdapter(TreesStudent).validate_python({"kind": kind, "trees": trees})
    return found


def groups(rng: np.random.Generator, count: int, *, labelled: bool) -> Groups:
    found: Groups = []
    for _ in range(count):
        n = int(rng.integers(2, 14))
        x_LF = np.column_stack([rng.normal(size=(n, 2)), np.full(n, rng.normal())]).astype(np.float32)
        found.append((x_LF, rng.integers(0, 3, n).astype(np.float32) if labelled else None))
    return found


@pytest.fixture(scope="module")
def splits(write_dataset: WriteDataset, tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """Unlabelled training groups and the teacher's scores; all other labels are noise."""
    rng = np.random.default_rng(0)
    sizes = {"train": 300, "validation": 30, "test": 100}
    of_periods = {name: groups(rng, size, labelled=name != "train") for name, size in sizes.items()}
    url = write_dataset(of_periods, [Feature(name=name) for name in "abc"])
    folder = tmp_path_factory.mktemp("teacher")
    teacher = linear_teacher(str(folder / "teacher"), url, WEIGHTS)
    ScoreJob(bundle=teacher, data=url, out=str(folder / "scores")).run()
    named = {name: {"data": url, "periods": name} for name in sizes}
    named["train"]["scores"] = str(folder / "scores")
    return Splits.model_validate(named)


def test_students_of_the_paper_have_two_thousand_trees() -> None:
    for kind in KINDS:
        found = student(kind)
        assert (found.trees.num_trees, found.trees.early_stopping_rounds) == (2_000, None)
        assert student(kind, num_trees=7).trees.objective == kind
        with pytest.raises(ValueError, match=f"leave it out, kind says that it is {kind}"):
            student(kind, objective="rank_xendcg")


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_of_a_linear_teacher_ranks_as_it_does(kind: str, splits: Splits, tmp_path: Path) -> None:
    config = student(kind, num_trees=150, num_threads=1).trees
    bundle = train_gbdt(config, splits, str(tmp_path / "out"), made_by={}, report=lambda _: None)
    assert bundle.metrics["labelled_groups"] == 300
    assert bundle.metrics["trees"] == 150
    test = QueryGroups.concat(list(iterate(select(splits.test, labelled=False), docs_per_batch=512)))
    teacher_N = test.features_NF @ torch.tensor(WEIGHTS)
    tau_Q = kendall_tau(bundle.scorer()(test), teacher_N, test.offsets_Q1)
    assert float(tau_Q.nanmean()) > 0.9


def test_missing_scores_and_scores_without_grades_are_errors(splits: Splits, tmp_path: Path) -> None:
    def train(split: Split, **trees: object) -> None:
        config = student("lambdarank", num_trees=2, **trees).trees
        settings = splits.replace(train=split.model_dump())
        train_gbdt(config, settings, str(tmp_path / "out"), made_by={}, report=lambda _: None)

    with pytest.raises(InputError, match=r"period 'train' is not scored there; score .* with jobs.score"):
        train(splits.train.replace(scores=str(tmp_path)))
    with pytest.raises(InputError, match=r"gains are for integers .* set gbdt.targets.kind=quantised"):
        train(splits.train, targets=None)
