"""A `prepare` that is interrupted goes on after the units that it has saved, to the same data set."""

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nightly import nightly
from preparing import prepare
from writer_tokens import manifest_without_writer

from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset
from ltrscale.errors import InputError
from ltrscale.ingest import additions, assembly
from ltrscale.ingest.additions import Unfinished
from ltrscale.ingest.assembly import Written
from ltrscale.ingest.inputs import PrepareConfig, Unit, UnitSettings

UNITS = 5
TINY = 1e-6
"""Megabytes of a unit so that each file is one."""


@pytest.fixture(autouse=True)
def _saving_after_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additions, "_SAVE_S", 0.0)


class Interrupted(Exception):  # noqa: N818 - a stop is no error
    """What a signal does."""


def write_logs(folder: Path) -> str:
    """Files whose query ids return, also those of rejected groups, and with rows that break the rules."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    for k in range(UNITS):
        lines = []
        for _ in range(40):
            query, broken = f"q{rng.integers(120)}", rng.random() < 0.2
            for i in range(rng.integers(1, 5)):
                value = "inf" if rng.random() < 0.05 else f"{rng.lognormal():.3f}"
                label = "-1" if rng.random() < 0.05 else str(rng.integers(3))
                lines.append(f"{label} qid:{query} 1:{'x' if broken else value} 2:{rng.random():.4f} #docid = d{i}\n")
        (folder / f"{k}.txt").write_text("".join(lines))
    return str(folder)


def config(inputs: object, **settings: Any) -> PrepareConfig:
    values = {"inputs": inputs, "source": {"kind": "letor"}, "max_rejected": 0.9, "unit_mb": TINY}
    return PrepareConfig.model_validate({**values, **settings})


def interrupt_after(monkeypatch: pytest.MonkeyPatch, saves: int, act: Callable[[], None]) -> None:
    """Interrupt a `prepare` when it has saved this often."""
    save, left = Unfinished.save, [saves]

    def save_and_stop(self: Unfinished, *arguments: Any) -> None:
        save(self, *arguments)
        left[0] -= 1
        if left[0] == 0:
            act()

    monkeypatch.setattr(Unfinished, "save", save_and_stop)


def prepare_interrupted(
    patching: pytest.MonkeyPatch, saves: int, config: PrepareConfig, out: str, *, ray: bool = False
) -> None:
    """Interrupt a `prepare` of this process when it has saved this often."""

    def stop() -> None:
        raise Interrupted

    with patching.context() as patch:
        interrupt_after(patch, saves, stop)
        with pytest.raises(Interrupted):
            prepare(config, out, ray=ray)


def same(one: Dataset, other: Dataset) -> None:
    """Check that two data sets are equal, summaries to the last digits, and that the second is all in its directory."""
    ours, theirs = (manifest_without_writer(dataset.manifest) for dataset in (one, other))
    for a, b in zip(ours.summaries, theirs.summaries, strict=True):
        parts = {"unique_in_group"}  # None where there is nothing to count
        assert a.model_dump(exclude=parts) == pytest.approx(b.model_dump(exclude=parts), rel=1e-9)
        assert a.unique_in_group == b.unique_in_group
    assert ours.model_copy(update={"summaries": ()}) == theirs.model_copy(update={"summaries": ()})
    quarantined = [[storage.read_bytes(storage.join(d.url, n)) for n in d.manifest.quarantine] for d in (one, other)]
    assert quarantined[0] == quarantined[1]
    listed = storage.sizes_in(other.url, storage.read_manifest(other.url) or {})
    assert set(storage.below(other.url)) == {storage.MANIFEST, *listed}


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 2, 4])
def test_what_was_saved_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    inputs = write_logs(tmp_path / "log")
    whole = prepare(config(inputs), str(tmp_path / "whole"))
    prepare_interrupted(monkeypatch, saves, config(inputs), str(tmp_path / "out"))
    assert storage.read_manifest(str(tmp_path / "out")) is None
    read, write = list[Unit](), assembly.write_unit

    def count(work: UnitSettings, unit: Unit, *arguments: Any, **named: Any) -> Written:
        read.append(unit)
        return write(work, unit, *arguments, **named)

    monkeypatch.setattr(assembly, "write_unit", count)
    same(whole, prepare(config(inputs), str(tmp_path / "out")))
    assert len(read) == UNITS - saves


def test_ids_that_the_data_set_has_recorded_are_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = sorted(map(str, Path(write_logs(tmp_path / "log")).iterdir()))
    out = tmp_path / "out"
    (file,) = prepare(config(first), str(out)).manifest.query_ids
    prepare_interrupted(monkeypatch, 3, config(others, add=True, period="late", max_group=3), str(out))
    saved = json.loads((out / ".unfinished.json").read_text())["hashes"]
    recorded, *added = (
        np.load(out / path) for path in (file.path, *(saved[name]["path"] for name in ("kept", "others")))
    )
    assert all(map(len, (recorded, *added)))
    assert not np.isin(np.concatenate(added), recorded).any()


def killed(inputs: str, out: str) -> None:
    """A `prepare` that dies when it has saved twice."""
    patch = pytest.MonkeyPatch()
    patch.setattr(additions, "_SAVE_S", 0.0)
    interrupt_after(patch, 2, lambda: os._exit(9))
    prepare(config(inputs), out)


@pytest.mark.slow
def test_it_may_be_killed_again_and_again(tmp_path: Path) -> None:
    inputs, out = write_logs(tmp_path / "log"), str(tmp_path / "out")
    whole = prepare(config(inputs), str(tmp_path / "whole"))
    spawn, statuses = multiprocessing.get_context("spawn"), list[int | None]()
    while not statuses or statuses[-1]:
        process = spawn.Process(target=killed, args=(inputs, out))
        process.start()
        process.join()
        statuses.append(process.exitcode)
    assert statuses == [9, 9, 0]
    for leftover in [name for name in storage.below(out) if name.startswith(".staging")]:
        storage.remove(storage.join(out, leftover))
    same(whole, prepare(config(inputs), out))


def test_an_addition_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_logs(tmp_path / "log")
    first = [f"{inputs}/{k}.txt" for k in range(2)]
    rest = [f"{inputs}/{k}.txt" for k in range(2, UNITS)]
    outs = [str(tmp_path / name) for name in ("whole", "out")]
    for out in outs:
        prepare(config(first), out)
    whole = prepare(config(rest, add=True, period="late"), outs[0])
    prepare_interrupted(monkeypatch, 2, config(rest, add=True, period="late"), outs[1])
    same(whole, prepare(config(rest, add=True, period="late"), outs[1]))


def test_collisions_of_categories_are_those_of_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    # the codes of Berlin, Paris and of the integers are equal two by two, within the halves and across them
    for k, city in enumerate(["berlin", "6113811", "paris", "oslo", "2319768", "berlin"]):
        (folder / f"{k}.csv").write_text(f"query,label,city\nq{k},1,{city}\nq{k},0,rome\n")
    columns = {"query": "query", "label": "label", "categorical": ["city"]}
    settings = {"source": {"kind": "items", "columns": columns}}
    whole = prepare(config(str(folder), **settings), str(tmp_path / "whole"))
    assert whole.manifest.accounting.hash_collisions == 2
    for saves in (1, 2, 4):
        out = str(tmp_path / f"out-{saves}")
        prepare_interrupted(monkeypatch, saves, config(str(folder), **settings), out)
        same(whole, prepare(config(str(folder), **settings), out))


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 2, 3])
@pytest.mark.parametrize("max_rejected", [0.9, 0.01])
def test_warnings_and_errors_are_those_of_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, saves: int, max_rejected: float
) -> None:
    """The first file refutes that a feature follows the place, and has the rows to which remedies belong."""
    folder = tmp_path / "log"
    folder.mkdir()
    for k in range(4):
        rows = [f"q{k}-{q},{place},{9 - place if k == 0 and q == 0 else place},1" for q in range(9) for place in (1, 2)]
        rows += ["q,3,1,inf", "q,4,2,"] if k == 0 else []
        (folder / f"{k}.csv").write_text("\n".join(["q,place,f,label", *rows]) + "\n")
    columns = {"query": "q", "label": "label", "positions": "place", "features": ["f"]}
    settings = config(str(folder), source={"kind": "items", "columns": columns}, max_rejected=max_rejected)
    outs = [str(tmp_path / name) for name in ("whole", "broken")]
    prepare_interrupted(monkeypatch, saves, settings, outs[1])
    said = []
    for out in outs:
        caplog.clear()
        with caplog.at_level("INFO", "ltrscale"):
            error = ""
            try:
                prepare(settings, out)
            except InputError as found:
                error = str(found)
        lines = [line for line in caplog.messages if not line.startswith("prepare: resumes after")]
        said.append([each.replace(out, "out") for each in (*lines, error)])
    assert said[0] == said[1]
    assert ("the first: " in said[0][-1]) == (max_rejected < 0.1)


def test_units_with_other_columns_than_the_finished_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    for k, user in enumerate([[1, 2], [3, 4], ["u", "v"]]):
        pq.write_table(pa.table({"q": [f"q{k}"] * 2, "f": [1.0, 2.0], "user": user}), folder / f"{k}.parquet")
    columns = {"query": "q", "features": ["f"], "meta": ["user"]}
    settings = config(str(folder), source={"kind": "items", "columns": columns})
    prepare_interrupted(monkeypatch, 1, settings, str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"2.parquet: column 'meta_user' .* is string where it is int64 in \S*/0.parq"):
        prepare(settings, str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["settings", "inputs"])
def test_other_work_starts_from_the_beginning_and_removes_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    inputs, out = write_logs(tmp_path / "log"), str(tmp_path / "out")
    prepare_interrupted(monkeypatch, 3, config(inputs), out)
    settings: dict[str, Any] = {"max_group": 3} if changed == "settings" else {}
    if changed == "inputs":
        (tmp_path / "log" / "0.txt").write_text("1 qid:new 1:1 2:2\n0 qid:new 1:3 2:4\n")
    whole = prepare(config(inputs, **settings), str(tmp_path / "whole"))
    same(whole, prepare(config(inputs, **settings), out))


@pytest.mark.s3
@pytest.mark.ray
@pytest.mark.usefixtures("s3", "ray_cluster")
@pytest.mark.parametrize(("saves", "period"), [nightly(1, None), nightly(3, None), (3, "fixed")])
def test_tasks_of_ray_go_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int, period: str | None
) -> None:
    inputs = [{"path": write_logs(tmp_path / "log"), "period": period}]
    whole = prepare(config(inputs), str(tmp_path / "whole"))
    prepare_interrupted(monkeypatch, saves, config(inputs), str(tmp_path / "out"), ray=True)
    same(whole, prepare(config(inputs), str(tmp_path / "out"), ray=True))
