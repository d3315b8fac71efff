"""The sizes of the first pipeline and study of a log: they end in time, and what the configs say of them is so."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shopping_log import shopping_log

from ltrscale.config import load
from ltrscale.experiments.first.configs import (
    BOOSTED,
    PRETRAINED,
    SMALL,
    STUDIED,
    FirstRuns,
    LogSize,
    divided,
    first_sizes,
)
from ltrscale.experiments.first.counted import informative_lists
from ltrscale.experiments.methods.composed import StackMethod
from ltrscale.experiments.methods.single import GBDTMethod, NeuralMethod
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.experiments.study import StudyJob

MINUTES = 15
WEEKS = [f"2026-W{i:02}" for i in range(1, 12)]
DOCUMENTS = (0, 900, 40_000, 99_999, 100_000, 680_000, 3_000_000, 50_000_000, 900_000_000)
SIZES = [
    LogSize(n, round(share * n), features)
    for n, share, features in itertools.product(DOCUMENTS, (0.01, 0.35, 1.0), (1, 20, 700))
]


def written(folder: Path, size: LogSize, score: str | None = None) -> tuple[PipelineJob, str, str]:
    """The config of a first pipeline, its text, and the sentence on its time."""
    texts, notes = FirstRuns("shop", "week", WEEKS, size, score=score).written()
    (folder / "pipeline.yaml").write_text(texts["pipeline"])
    return (
        load(PipelineJob, str(folder / "pipeline.yaml")),
        texts["pipeline"],
        notes[0].removeprefix("pipeline.yaml: "),
    )


@pytest.mark.parametrize(("networks", "boosted"), [(2, 1), (6, 6)])
def test_every_log_that_the_fewest_epochs_can_serve_ends_in_time(networks: int, boosted: int) -> None:
    for size in SIZES:
        sizes = first_sizes(size, networks=networks, boosted=boosted)
        assert (sizes.total <= MINUTES) or sizes.share < 1, size
        assert 1 <= sizes.pretraining_epochs <= STUDIED["pretraining"]
        assert 1 <= sizes.patience <= sizes.epochs <= STUDIED["finetuning"]
        assert sizes.docs_per_batch == (256 if size.informative < SMALL else 1024)
        assert sizes.pretraining_docs_per_batch == (1024 if size.documents < SMALL else 4096)
        epoch_s = size.documents / PRETRAINED[sizes.pretraining_docs_per_batch]
        assert sizes.minutes["pretraining"] == pytest.approx(sizes.pretraining_epochs * epoch_s / 60, rel=0.9)
        fits = size.part(sizes.share)
        assert first_sizes(fits, networks=networks, boosted=boosted).total <= MINUTES + 0.1, (
            "so large a part does end in time"
        )


def test_more_to_learn_from_never_takes_more_epochs_and_is_never_cut_without_need() -> None:
    for one, other in itertools.pairwise(DOCUMENTS[3:]):
        few, many = (first_sizes(LogSize(n, n, 20)) for n in (one, other))
        assert many.epochs <= few.epochs or many.docs_per_batch > few.docs_per_batch
        assert many.pretraining_epochs <= few.pretraining_epochs or few.pretraining_docs_per_batch == 1024
        assert many.trees <= few.trees
    for size in SIZES:
        sizes = first_sizes(size)
        for stage, count in (("pretraining", sizes.pretraining_epochs), ("finetuning", sizes.epochs)):
            one_more = sizes.minutes[stage] * (count + 1) / count
            assert count == STUDIED[stage] or one_more > 4.9, "another epoch would have fitted"


def test_other_cores_grow_trees_and_wider_data_take_longer() -> None:
    size = LogSize(5_000_000, 5_000_000, 100)
    assert first_sizes(size, cores=16).trees > first_sizes(size, cores=2).trees
    assert (
        first_sizes(size._replace(features=700)).minutes["finetuning"] > 1.5 * first_sizes(size).minutes["finetuning"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("score", [None, "bm25"])
@pytest.mark.parametrize("size", [s for s in SIZES if s.features == 20], ids=str)
def test_the_pipeline_that_is_written_has_these_sizes_and_says_so(
    tmp_path: Path, size: LogSize, score: str | None
) -> None:
    config, text, said = written(tmp_path, size, score)
    train = config.splits.train.periods
    first, last = (int(end[-2:]) for end in (train[0].split("..")[0], train[0].split("..")[-1]))
    networks, boosted = (2, 1) if score is None else (6, 6)
    part = size.part((last - first + 1) / len(WEEKS))
    sizes = first_sizes(part, networks=networks, boosted=boosted)
    trees, scratch, pretrained = (config.methods[name] for name in ("trees", "scratch", "pretrained"))
    assert config.evaluate.baseline == ("trees" if score is None else "engine")
    assert isinstance(trees, GBDTMethod)
    assert isinstance(scratch, NeuralMethod)
    assert isinstance(pretrained, NeuralMethod)
    assert pretrained.pretrain is not None
    assert trees.gbdt.num_trees * trees.gbdt.learning_rate == pytest.approx(20)
    assert (trees.gbdt.num_trees, scratch.finetune.epochs) == (sizes.trees, sizes.epochs)
    assert (scratch.finetune.patience, scratch.finetune.stream.docs_per_batch) == (sizes.patience, sizes.docs_per_batch)
    of_pretraining = (sizes.pretraining_epochs, sizes.pretraining_docs_per_batch)
    assert (pretrained.pretrain.epochs, pretrained.pretrain.stream.docs_per_batch) == of_pretraining
    stacks = [method.stack.folds for method in config.methods.values() if isinstance(method, StackMethod)]
    grown = 1 + sum(0.8 * folds for folds in stacks)  # of the lists; a fold leaves out a fifth
    tree = part.informative * part.features / (2 * BOOSTED) / 60
    assert grown * trees.gbdt.num_trees * tree <= sizes.minutes["trees"] * (1 + 1e-9)
    plural = "s" * (round(sizes.total) > 1)
    trees_took = f"(trees {sizes.minutes['trees']:.1f}, "
    assert said.startswith(f"About {sizes.total:.0f} minute{plural} on two cores {trees_took}")
    assert f"\n# {said}\n" in text
    assert last == 9
    assert (first == 1) or f"{train[0]}}} # of 2026-W01..2026-W09, so that it ends in time" in text
    assert sizes.total <= MINUTES or first == last == 9, "only a single period may take longer"


@pytest.mark.parametrize(
    ("lists", "numbers"), [(20_000, (100, 300, 1000, 3000)), (3000, (100, 300, 1000)), (245, (100,)), (244, ())]
)
def test_a_study_draws_numbers_of_lists_twice_at_most(tmp_path: Path, lists: int, numbers: tuple[int, ...]) -> None:
    size = LogSize(680_000, 230_000, 20)
    texts, notes = FirstRuns("shop", "week", WEEKS, size, lists=lists).written()
    assert ("study" in texts) == bool(numbers)
    if not numbers:
        assert notes[1] == "no study.yaml: 244 queries whose labels differ are too few to draw"
        return
    (tmp_path / "study.yaml").write_text(texts["study"])
    config = load(StudyJob, str(tmp_path / "study.yaml"))
    assert (config.grid[0].labelled, config.grid[0].draws) == (numbers, 5)
    assert config.trained == ("trees_tuned", "scratch", "pretrained")
    assert config.controls == {"pretrained": "scratch"}
    assert config.splits.validation.relevant_groups is None


@pytest.mark.slow
def test_queries_whose_labels_differ_are_those_that_a_slow_count_finds() -> None:
    log = shopping_log()
    codes: dict[str, Any] = {
        name: log[name].astype("category").cat.codes.to_numpy(np.int64) for name in ("search_id", "event")
    }
    n = log["search_id"].nunique()
    expected = log.groupby("search_id", sort=True)["event"].nunique().to_numpy() > 1
    assert 0 < expected.sum() < n
    assert np.array_equal(informative_lists(codes["search_id"], codes["event"].astype(float)), expected)


def test_the_table_in_the_docs_is_computed() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "own-data.md").read_text()
    rows = re.findall(r"^\| (\d[\d,]*) \| ([\d,]+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for documents, labelled, figures in rows:
        z = first_sizes(LogSize(int(documents.replace(",", "")), int(labelled.replace(",", "")), 20))
        batches = (f"{z.docs_per_batch:,}", f"{z.pretraining_docs_per_batch:,}")
        expected = [
            f"{z.epochs}",
            batches[0],
            f"{z.pretraining_epochs}",
            batches[1],
            f"{z.total:.0f}",
        ]
        assert figures.split(" | ") == expected


def test_the_last_periods_are_held_out() -> None:
    train, validation, test = divided(WEEKS)
    assert [*train, *validation, *test] == [*WEEKS]
    assert (len(validation), len(test)) == (1, 1)
    assert [len(part) for part in divided(list("abcdefghijkl"))] == [8, 2, 2]
