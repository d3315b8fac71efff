"""A manifest in parts: whatever is added, it is read as one list, and the directory holds what it lists."""

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from ltrscale import storage
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.files import Counts, DataFile, DataFiles
from ltrscale.data.dataset.manifest import Dataset, Feature, Manifest, open_dataset
from ltrscale.data.dataset.origin import commands
from ltrscale.data.dataset.writer import commit_dataset
from ltrscale.errors import InputError
from ltrscale.ingest.additions import with_addition
from ltrscale.origin import as_text

FEATURES = (Feature(name="a"),)
FEW = 5


@pytest.fixture(autouse=True)
def _small_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_FEW_FILES", FEW)


def add(url: str, number: int, files: int) -> list[DataFile]:
    """Add files of a period, with one in quarantine, as `prepare` does; returns the files."""
    before = open_dataset(url) if storage.read_manifest(url) else None
    with storage.Commit(url) as commit:
        entries = []
        for i in range(files):
            with commit.file(f"period=p{number:03}/part-{number:05}-{i:05}-{{hash}}.parquet") as path:
                path.write_text(f"{number} {i}")
            counts = {"longest": 3, "row_groups": (Counts(2, 4, 1), Counts(1, 2, number % 2))}
            entries.append(DataFile(**vars(commit.files[-1]), period=f"p{number:03}", **counts))
        with commit.file(f"quarantine/part-{number:05}-{{hash}}.parquet") as path:
            path.write_text(f"bad {number}")
        quarantine = (commit.files[-1].path,)
        made_by = {"stage": "prepare", "config": {"inputs": [{"path": f"in/{number}", "period": None}]}, "inputs": {}}
        new = Manifest(
            features=FEATURES, files=DataFiles.from_iterable(entries), quarantine=quarantine, made_by=made_by
        )
        commit_dataset(commit, new if before is None else with_addition(before.manifest, new))
    return entries


def check(url: str, expected: list[DataFile], additions: int) -> Dataset:
    """Check what is read against all that was added, and the directory against what the manifest lists."""
    dataset = open_dataset(url)
    assert list(dataset.manifest.files) == sorted(expected, key=lambda file: (file.period, file.path))
    whole = Manifest(features=FEATURES, files=dataset.manifest.files)
    assert dataset.manifest.hash == whole.hash
    assert dataset.manifest.hashes == {period: whole.hash_of([period]) for period in whole.periods}
    assert [json.loads(text)["config"]["inputs"][0]["path"] for text in commands(dataset)] == [
        f"in/{i}" for i in range(additions)
    ]
    document = storage.read_manifest(url)
    assert document is not None
    assert storage.is_whole(url, document)
    assert {storage.MANIFEST, *storage.sizes_in(url, document)} == set(storage.below(url))
    n = len(expected)
    assert len(document["files"]) <= FEW
    assert len(document["parts"]) <= max(1, np.log2(n) + 1)
    return dataset


@pytest.mark.slow
def test_whatever_is_added_is_listed_once(tmp_path: Path) -> None:
    url, expected = str(tmp_path / "data"), list[DataFile]()
    rng = np.random.default_rng(0)
    for number in range(40):
        expected += add(url, number, files=int(rng.integers(1, 8)))
        check(url, expected, number + 1)
    written_again = Manifest(features=FEATURES, files=DataFiles.from_iterable(expected[:2]))
    with storage.Commit(url) as commit:
        commit_dataset(commit, written_again)  # replaces the data set: all that only the parts list goes too
    assert set(storage.below(url)) == {storage.MANIFEST, *(file.path for file in expected[:2])}
    storage.withdraw(url)
    assert not Path(url).exists()


def test_a_data_set_with_parts_is_withdrawn_whole(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    for number in range(8):
        add(url, number, files=3)
    storage.withdraw(url)
    assert not Path(url).exists()


@pytest.mark.slow
def test_an_addition_writes_in_proportion_to_itself(tmp_path: Path) -> None:
    url, written = str(tmp_path / "data"), list[int]()
    for number in range(64):
        add(url, number, files=2)
        document = storage.read_manifest(url) or {}
        written.append(sum(part["files"] for part in document["parts"] if part["path"] not in _seen))
        _seen.update(part["path"] for part in document["parts"])
    assert sum(written) <= 2 * 64 * np.log2(2 * 64)  # as a log-structured merge tree
    assert len((tmp_path / "data" / "manifest.json").read_bytes()) < 8000


_seen = set[str]()


def test_a_failed_addition_leaves_the_data_set_as_it_was(tmp_path: Path) -> None:
    url, expected = str(tmp_path / "data"), list[DataFile]()
    for number in range(6):
        expected += add(url, number, files=2)
    before = set(storage.below(url))
    with storage.Commit(url) as commit, commit.file("period=p9/part-9-{hash}.parquet") as path:
        path.write_text("lost")  # and no finish
    assert set(storage.below(url)) == before
    check(url, expected, 6)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_part_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    url = str(tmp_path / "data")
    for number in range(6):
        add(url, number, files=2)
    (part, *_) = (storage.read_manifest(url) or {})["parts"]
    place = tmp_path / "data" / part["path"]
    if damage == "missing":
        place.unlink()
    else:
        place.write_bytes(b"x" + place.read_bytes()[1:])
    with pytest.raises(InputError, match=f"{place}: ({'missing' if damage == 'missing' else 'its content is not'})"):
        open_dataset(url)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "by"), [("files", 1), ("files", -1), ("additions", 1)])
def test_a_count_of_a_part_that_is_wrong_is_an_error_that_names_the_manifest(
    tmp_path: Path, count: str, by: int
) -> None:
    url = str(tmp_path / "data")
    for number in range(6):
        add(url, number, files=2)
    manifest = storage.read_manifest(url) or {}
    manifest["parts"][0][count] += by
    (tmp_path / "data" / storage.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=rf"manifest\.json: parts/part-\S+ has .*'{count}'.*; restore the manifest"):
        add(url, 6, files=2)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_of_a_data_set_with_a_damaged_part_what_is_known_is_withdrawn(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "data")
    for number, files in enumerate((20, FEW + 1, 1)):
        add(url, number, files)
    lost, _ = (storage.read_manifest(url) or {})["parts"]
    unknown = set(storage.sizes_in(url, {"parts": [lost]})) - {lost["path"]}
    place = tmp_path / "data" / lost["path"]
    if damage == "missing":
        place.unlink()
    else:
        place.write_bytes(b"x" + place.read_bytes()[1:])
    storage.withdraw(url)
    assert set(storage.below(url)) == unknown
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"{place}: ")
    assert line.endswith("files that only this part lists stay there")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_data_set_with_a_damaged_part_can_be_made_again(tmp_path: Path, damage: str) -> None:
    url = str(tmp_path / "data")
    for number in range(6):
        add(url, number, files=2)
    document = storage.read_manifest(url) or {}
    place = tmp_path / "data" / document["parts"][0]["path"]
    if damage == "missing":
        place.unlink()
    else:
        place.write_bytes(b"x" + place.read_bytes()[1:])
    assert not storage.is_whole(url, document)
    before = storage.below(url)
    storage.sweep(url, [re.findall(r"-([0-9a-f]{8})\b", document["parts"][-1]["path"])[-1]])
    assert storage.below(url) == before  # the lost part may list what looks left over
    with storage.Commit(url) as commit:
        with commit.file("part-{hash}.parquet") as path:
            path.write_text("anew")
        file = DataFile(**vars(commit.files[-1]), period="p", longest=1, row_groups=(Counts(1, 1, 0),))
        commit_dataset(commit, Manifest(features=FEATURES, files=DataFiles.from_iterable([file])))
    assert list(open_dataset(url).manifest.files) == [file]
    assert not place.exists()


def test_a_file_that_a_part_and_the_manifest_list_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    (file, *_) = add(url, 0, files=FEW + 1)
    document = storage.read_manifest(url) or {}
    storage.write_bytes(f"{url}/{storage.MANIFEST}", json.dumps({**document, "files": [file._asdict()]}).encode())
    with pytest.raises(InputError, match="lists a file twice"):
        open_dataset(url)


@pytest.mark.slow
def test_a_reader_beside_additions_sees_one_of_their_states(tmp_path: Path) -> None:
    url, sizes, over = str(tmp_path / "data"), list[int](), threading.Event()
    add(url, 0, files=1)

    def read() -> None:
        while not over.is_set():
            sizes.append(len(open_dataset(url).manifest.files))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, 40):
            add(url, number, files=1)
    finally:
        over.set()
        reader.join()
    assert sizes == sorted(sizes)
    assert len(open_dataset(url).manifest.files) == 40


def test_small_data_sets_have_no_parts(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    add(url, 0, files=FEW)
    document = storage.read_manifest(url)
    assert document is not None
    assert document["parts"] == []
    assert as_text(document["made_by"]) == next(commands(open_dataset(url)))
