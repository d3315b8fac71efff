"""Workers that die or are slow: global batches stay the same, each group is read once, weights are the same."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_changes import add_period, with_renamed_files
from faulty_pretraining import (
    FaultyPretraining,
    attempts,
    bundle_weights,
    check_exactly_once,
    check_restarts,
    last_executions,
    process_launcher,
    run_pretraining,
    small_config,
)
from nightly import nightly

from ltrscale.data.dataset.manifest import Feature

STEPS = 20
"""At least so many steps has a run over the synthetic data set."""


@pytest.fixture(scope="module")
def undisturbed(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The directory of a run with this number of workers and no faults; `steps` holds the records of its steps."""
    made: dict[int, Path] = {}

    def directory(world: int) -> Path:
        if world not in made:
            out = tmp_path_factory.mktemp("undisturbed")
            run_pretraining(
                FaultyPretraining(str(out / "steps")),
                synthetic_dataset,
                str(out),
                launch=process_launcher(world, restarts=0),
            )
            made[world] = out
        return made[world]

    return directory


def random_kills(seed: int, world: int, count: int) -> tuple[tuple[int, int], ...]:
    drawn = random.Random(seed)
    return tuple((step, drawn.randrange(world)) for step in sorted(drawn.sample(range(1, STEPS), count)))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "count"), [(2, 2), nightly(2, 5), nightly(3, 3)])
def test_killed_again_and_again_the_weights_are_bit_equal(
    undisturbed: Callable[[int], Path], synthetic_dataset: str, tmp_path: Path, world: int, count: int
) -> None:
    expected, steps = undisturbed(world), str(tmp_path / "steps")
    assert len(last_executions(str(expected / "steps"))) >= STEPS
    watched = FaultyPretraining(steps, kills=random_kills(seed=world, world=world, count=count))
    run_pretraining(watched, synthetic_dataset, str(tmp_path), launch=process_launcher(world))
    check_restarts(steps, kills=count)
    check_exactly_once(steps)
    assert last_executions(steps) == last_executions(str(expected / "steps"))
    assert bundle_weights(str(tmp_path)) == bundle_weights(str(expected))


@pytest.mark.nightly
def test_a_period_that_is_added_before_workers_start_again_is_not_read(
    undisturbed: Callable[[int], Path], synthetic_dataset: str, tmp_path: Path
) -> None:
    expected, steps = undisturbed(2), str(tmp_path / "steps")
    data = with_renamed_files(synthetic_dataset, tmp_path / "data")

    def launch(*arguments: Any, **named: Any) -> None:
        with pytest.raises(AssertionError, match="die again"):
            process_launcher(2, restarts=0)(*arguments, **named)
        add_period(data, "2026-W00", like="2026-W02")
        process_launcher(2, restarts=0)(*arguments, **named)

    run_pretraining(FaultyPretraining(steps, kills=((7, 1),)), data, str(tmp_path / "out"), launch=launch)
    check_restarts(steps, kills=1)
    check_exactly_once(steps)
    assert last_executions(steps) == last_executions(str(expected / "steps"))
    assert bundle_weights(str(tmp_path / "out")) == bundle_weights(str(expected))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, nightly(3), nightly(4)])
def test_any_number_of_workers_reads_the_same_global_batches(undisturbed: Callable[[int], Path], world: int) -> None:
    steps = str(undisturbed(world) / "steps")
    check_exactly_once(steps)
    assert last_executions(steps) == last_executions(str(undisturbed(1) / "steps"))


@pytest.mark.nightly
def test_resumed_by_other_numbers_of_workers_the_order_is_the_same(
    undisturbed: Callable[[int], Path], synthetic_dataset: str, tmp_path: Path
) -> None:
    steps, worlds = str(tmp_path / "steps"), (2, 1, 3)
    kills = ((6, 1), (11, 0))
    for world in worlds[:-1]:
        with pytest.raises(AssertionError, match="die again"):
            run_pretraining(
                FaultyPretraining(steps, kills),
                synthetic_dataset,
                str(tmp_path),
                launch=process_launcher(world, restarts=0),
            )
    run_pretraining(
        FaultyPretraining(steps, kills),
        synthetic_dataset,
        str(tmp_path),
        launch=process_launcher(worlds[-1], restarts=0),
    )
    assert tuple(attempt.world for attempt in attempts(steps)) == worlds
    check_restarts(steps, kills=2)
    check_exactly_once(steps)
    assert last_executions(steps) == last_executions(str(undisturbed(1) / "steps"))


@pytest.fixture(scope="module")
def uneven_dataset(write_dataset: Callable[..., str]) -> str:
    """Groups of 1 to 2000 documents in row groups of very different sizes; streams run out at different times."""
    drawn = np.random.default_rng(0)

    def group(documents: int) -> tuple[np.ndarray, None]:
        return drawn.normal(size=(documents, 3)).astype(np.float32), None

    periods = {f"2026-W{week:02}": [group(1) for _ in range(week)] for week in range(1, 9)}
    periods["2026-W09"] = [group(documents) for documents in (2000, 1, 700, 2, 2, 1500, 3)]
    periods["2026-W10"] = [group(int(documents)) for documents in drawn.geometric(0.02, size=60)]
    return write_dataset(periods, [Feature(name=f"f{i}") for i in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, nightly(4)])
def test_slow_workers_and_uneven_groups_take_equally_many_steps(
    uneven_dataset: str, tmp_path: Path, world: int
) -> None:
    steps = str(tmp_path / "steps")
    watched = FaultyPretraining(steps, slow=(world - 1, 0.03))
    by_groups = {"docs_per_batch": 8000, "groups_per_batch": 16, "streams": 4, "window": 2}
    config = small_config(stream=by_groups)
    run_pretraining(watched, uneven_dataset, str(tmp_path), launch=process_launcher(world, restarts=0), config=config)
    (attempt,) = attempts(steps)
    of_ranks = list(attempt.steps_of_ranks.values())
    assert len(of_ranks) == world
    assert all(executed == of_ranks[0] for executed in of_ranks)
    assert min(map(len, last_executions(steps).values())) <= 2  # streams run out while others go on
    check_exactly_once(steps, groups=36 + 7 + 60)
