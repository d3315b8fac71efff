"""A job that is killed anywhere and run again leaves what an undisturbed one leaves, and the files of others."""

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from killing import found_in, job_killed_before, killed_before
from nightly import nightly

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.progress import Report
from ltrscale.stages.runs import holding
from ltrscale.stages.stage import Origin, Stage
from ltrscale.training.resumption import TrainingStage, finish


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is not to crash: a thousand commits need not wait for the disk."""
    monkeypatch.setattr(storage.files, "flush", lambda _: None)


def commit(url: str, text: str, *shared: str, save: bool = False) -> None:
    with storage.Commit(url) as writer:
        with writer.file("part-{hash}.txt") as path:
            path.write_text(text)
        if save:
            for turn in "12":
                with writer.file("unfinished/{hash}.npy") as path:
                    path.write_text(text + turn)
                writer.save({"turn": turn}, without=[file.path for file in writer.files[1:-1]])
        for name in shared:
            with writer.file(name) as path:
                path.write_text(text)
        writer.finish({"text": text, "files": [vars(file) for file in writer.files if "unfinished" not in file.path]})


def work(url: str) -> None:
    """Commit over an earlier commit, save and go on, commit below, withdraw, and hold a directory below."""
    with holding(url):
        commit(url, "new", "same", save=True)
        commit(f"{url}/period=a", "below", "same")
        commit(f"{url}/checkpoint", "checkpoint")
        storage.withdraw(f"{url}/checkpoint")
        with holding(f"{url}/stage"):
            commit(f"{url}/stage", "stage", "same")


def made(folder: Path, *, change: int | None) -> bool:
    """Work in a new directory over an earlier commit; with `change` after work that was killed. Whether it was."""
    commit(str(folder), "old", "same", "gone")
    killed = change is not None and killed_before(change, folder, lambda: work(str(folder)))
    work(str(folder))
    return killed


@pytest.mark.nightly
@pytest.mark.parametrize("every", [3, 1])
def test_work_that_was_killed_before_any_change_leaves_what_undisturbed_work_leaves(tmp_path: Path, every: int) -> None:
    made(tmp_path / "twin", change=None)
    change, killed = 0, True
    while killed:
        killed = made(tmp_path / str(change), change=change)
        assert found_in(tmp_path / str(change)) == found_in(tmp_path / "twin"), f"killed before change {change}"
        change += every
    assert change > 60


HEX = st.text("0123456789abcdef", min_size=8, max_size=8) | st.sampled_from(["20261127", "deadbeef"])
WORD = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda word: word not in (".", "..")
)
LAST = st.one_of(
    WORD,
    st.builds(".{}.{}".format, WORD, HEX),
    st.builds(".{}.{}-{}".format, WORD | st.just(".lease"), HEX, HEX),
    st.builds("part-{}-{}.txt".format, HEX, HEX),
    st.builds("{}-{}.safetensors".format, st.sampled_from(["model", "part"]), HEX),
    st.sampled_from(["..lease.new", ".manifest.json.new", "part.txt", "trial.json", "log.txt"]),
)
FOLDER = st.one_of(
    st.sampled_from(["period=a", "checkpoint", "stage", "unfinished", "notes"]),
    st.builds(".staging-{}-{}".format, HEX, HEX),
)
NAMES = st.builds(lambda folder, last: "/".join([*folder, last]), st.lists(FOLDER, max_size=2), LAST)
RESERVED = {"same", "gone", "period=a", "checkpoint", "stage", "unfinished", "notes"}


@pytest.mark.slow
@given(st.sets(NAMES, max_size=8), st.integers(0, 70))
def test_files_of_any_name_that_no_writer_of_ours_made_survive(names: set[str], change: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        others = {out / name: name for name in names if name.rpartition("/")[2] not in RESERVED}
        for path, text in others.items():
            if len(path.name.encode()) < 200 and not path.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        before = {path: path.read_text() for path in others if path.is_file()}
        made(out, change=change)
        assert {path: path.read_text() for path in before if path.is_file()} == before


class Words(Stage):
    """A stage with two files in a directory of its own below."""

    stage: ClassVar = "words"
    words: str

    def work(self, origin: Origin, report: Report) -> None:
        report({"words": 1})
        commit(f"{self.out}/below", self.words, "same")
        with storage.Commit(self.out) as writer:
            for name in ("same", "part-{hash}.txt"):
                with writer.file(name) as path:
                    path.write_text(self.words)
            writer.finish({"made_by": origin})


class Training(TrainingStage):
    """A stage that leaves a checkpoint and a transform until its output is committed."""

    stage: ClassVar = "training"
    words: str

    def work(self, origin: Origin, report: Report) -> None:
        report({"words": 1})
        for name in ("transform", "checkpoints/step-1", ""):
            with storage.Commit(storage.join(self.out, name)) as writer:
                with writer.file("part-{hash}.safetensors") as path:
                    path.write_text(name + self.words)
                writer.finish({"made_by": origin})
        finish(self.out)


OTHERS = [
    *(".labels-backup.20261127", "notes/.draft.20260101", ".crc.deadbeef", "period=b/.crc.deadbeef", ".staging-1/a"),
    *("..lease.20261127", ".manifest.json.deadbeef", "query-ids/part-20261127-deadbeef.npy"),
]


@dataclass(frozen=True)
class Killed:
    """A job in a directory, which is killed before one of its changes and given again."""

    start: Callable[[Path], object]
    """Makes what is there before, beside the files of others."""
    run: Callable[[Path], object]
    killed_before: Callable[[int, Path], bool]
    every: int = 1

    def made(self, folder: Path, change: int | None = None) -> bool:
        """Start, kill where a change is given, and run; returns whether it was killed."""
        folder.mkdir()
        self.start(folder)
        for name in OTHERS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        killed = change is not None and self.killed_before(change, folder)
        self.run(folder)
        assert [(folder / name).read_text() for name in OTHERS] == OTHERS
        return killed

    def check(self, tmp_path: Path) -> int:
        """Check that what it leaves is what an undisturbed run leaves; returns the number of changes."""
        self.made(tmp_path / "twin")
        twin = found_in(tmp_path / "twin")
        change, killed = 0, True
        while killed:
            killed = self.made(tmp_path / str(change), change)
            assert found_in(tmp_path / str(change)) == twin, f"killed before change {change}"
            change += self.every
        return change


def helped(out: str) -> None:
    """What a helper does whose result never arrives: its file is in place, and nobody takes it over."""
    with storage.Commit(out, helping=True) as helper:
        with helper.file("part-{hash}.txt") as path:
            path.write_text("help")
        helper.leave()


@pytest.mark.parametrize("ends", ["well", "by an error"])
def test_what_helpers_have_left_goes_with_the_work(tmp_path: Path, ends: str) -> None:
    """Also where the lease was given back in order, so that no later holder looks for leftovers."""
    out = str(tmp_path / "out")
    kept: list[str] = []
    with suppress(ZeroDivisionError), holding(out):
        leases = storage.share_leases()
        assert len(leases) == 1
        for period in "ab":  # directories that the lease covers
            helped(f"{out}/period={period}")
        with holding(out):
            pass
        assert len(found_in(tmp_path / "out")) > 2, "the end of a block within another is not the end of the work"
        commit(f"{out}/period=a", "committed")
        with storage.Commit(out) as unfinished:
            with unfinished.file("unfinished/{hash}.npy") as path:
                path.write_text("half")
            unfinished.save({"turn": 1})
        with suppress(KeyError), storage.Commit(f"{out}/refused") as refused:
            with refused.file("part-{hash}.txt") as path:
                path.write_text("in quarantine")
            kept.append(refused.files[0].path)
            refused.keep(kept)
            raise KeyError
        if ends == "by an error":
            raise ZeroDivisionError
    left = {path.relative_to(out).as_posix() for path in Path(out).rglob("*") if path.suffix in (".txt", ".npy")}
    of_a = {name for name in left if name.startswith("period=a/")}
    assert len(of_a) == 1
    assert left == of_a | {unfinished.files[0].path, *(f"refused/{name}" for name in kept)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every"), [nightly(Words, 2), (Training, 3), *(nightly(kind, 1) for kind in (Words, Training))]
)
def test_a_stage_leaves_what_an_undisturbed_one_leaves(
    tmp_path: Path, kind: type[Words | Training], every: int
) -> None:
    """Also where its output was committed before the kill, so that it is up to date."""

    def run(folder: Path) -> None:
        kind(out=str(folder), words="two words").run()

    job = Killed(lambda _: None, run, lambda change, folder: killed_before(change, folder, lambda: run(folder)), every)
    assert job.check(tmp_path) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("every", [9, 2])
def test_an_addition_leaves_what_an_undisturbed_one_leaves(tmp_path: Path, every: int) -> None:
    for period in ("a", "b"):
        rows = [f"{period}{i // 3},{i % 2 - (i == 4)},{i}\n" for i in range(30)]
        (tmp_path / f"{period}.csv").write_text("q,y,f\n" + "".join(rows))
    columns = {"query": "q", "label": "y", "features": ["f"]}

    def job(folder: Path, period: str) -> dict[str, Any]:
        inputs = [{"path": str(tmp_path / f"{period}.csv"), "period": period}]
        source = {"kind": "items", "columns": columns}
        settings = {"inputs": inputs, "source": source, "max_rejected": 0.5, "add": period == "b"}
        return {"out": str(folder), "prepare": settings}

    def prepare(folder: Path, period: str) -> None:
        validate(PrepareJob, job(folder, period), "test").run()

    def killed(change: int, folder: Path) -> bool:
        (tmp_path / "job.json").write_text(json.dumps(job(folder, "b")))
        return job_killed_before(change, folder, "jobs.prepare", "--config", str(tmp_path / "job.json"))

    addition = Killed(lambda folder: prepare(folder, "a"), lambda folder: prepare(folder, "b"), killed, every)
    assert addition.check(tmp_path) > 20
