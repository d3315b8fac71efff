"""The metrics of a run have each step, epoch and tree once, whatever was done again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.stages.metrics_file import CurvePoint, MetricsFile

Records = list[dict[str, Any]]
_PER_EPOCH = 3
STEPS = 4 * _PER_EPOCH


def undisturbed(after: int = 0) -> Iterator[dict[str, Any]]:
    """What a training reports after the checkpoint of a step: two phases, and epochs of which two records come."""
    for step in range(after, STEPS + 1):
        phase = "head" if step <= STEPS // 2 else "full"
        if step > after:
            yield {"phase": phase, "step": step, "loss": 1 / step}
        elif step == 0:
            continue
        if step % _PER_EPOCH == 0:
            epoch = (step - 1) // _PER_EPOCH % 2 + 1
            yield {"phase": phase, "epoch": epoch, "loss": 2 / step, "validation_ndcg@5": step / 100}
            yield {"phase": phase, "epoch": epoch, "bundle": f"epochs/{epoch}"}


def no_warning(problem: str) -> None:
    raise AssertionError(problem)


def opened(folder: Path) -> MetricsFile:
    return MetricsFile(folder / "metrics.jsonl", "finetune", no_warning)


def read(folder: Path) -> Records:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


attempts = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), st.booleans(), st.booleans()), max_size=6)


@given(attempts=attempts)
def test_attempts_leave_what_an_undisturbed_run_leaves(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[float, int, bool, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    done, counts = 0, 0
    file = opened(folder)
    for share, length, dies, torn in [*attempts, (1.0, 10 * STEPS, False, False)]:
        counts += 1
        file.append({"running_workers": counts})
        done = int(share * done)  # the checkpoint from which it goes on
        records = list(undisturbed(after=done))[:length]
        for record in records:
            file.append(record)
            done = record.get("step", done)
        if dies:  # the others are workers of Ray that start again, while this process goes on
            file.__exit__()
            if torn:
                with (folder / "metrics.jsonl").open("a") as half:
                    half.write('{"time": 3, "ste')
            file = opened(folder)
    file.__exit__()
    found = read(folder)
    assert [record for record in found if "running_workers" not in record] == list(undisturbed())
    assert [record["running_workers"] for record in found if "running_workers" in record] == list(range(1, counts + 1))


def test_a_run_that_begins_anew_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert not file.goes_on
        for record in undisturbed():
            file.append(record)
    with opened(tmp_path) as file:
        assert file.goes_on
        point = file.append({"phase": "full", "step": 1, "loss": 9.0})
    assert read(tmp_path) == [{"phase": "full", "step": 1, "loss": 9.0}]
    assert point == CurvePoint(
        "full/step", 1, True, {"head/step": 6, "head/epoch": 2, "full/step": 12, "full/epoch": 2}
    )


def test_trees_are_counted_by_model(tmp_path: Path) -> None:
    first: Records = [{"model": "first", "tree": tree} for tree in (1, 2, 3)]
    second: Records = [{"tree": tree, "validation_ndcg@5": 0.5} for tree in (1, 2)]
    with opened(tmp_path) as file:
        steps = [file.append(record).step for record in [*first, *second]]
        assert steps == [1, 2, 3, 1, 2]
    assert read(tmp_path) == [*first, *second]
    with opened(tmp_path) as file:
        assert file.append(second[0]).prefix == "finetune"
    assert read(tmp_path) == [*first, second[0]]


def test_records_without_a_number_are_counted_on_over_attempts(tmp_path: Path) -> None:
    steps = []
    for _ in range(3):
        with opened(tmp_path) as file:
            steps += [file.append({"groups": 7}).step]
    assert steps == [1, 2, 3]
