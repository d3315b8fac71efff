"""A manifest names only files below its directory, or is refused in one line when it is read."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltrscale import storage
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.preflight import PreflightConfig, preflight
from ltrscale.data.dataset.scores import read_period
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError

HASH = "0" * 64
OUTSIDE = ["../precious", "/etc/passwd", "a/../../b", "", "a//b", "./a", "a/.", "a/"]
UNFIT = [
    "a\x00b", "a\nb", "a\u202eb", "\ud800", "a\\b", "*", "a/[x]?", "é" * 128, "a/" * 600 + "a", "manifest.json",
    "b/manifest.json", "run/config.yaml", ".staging-0/a",
]  # fmt: skip


def test_parts_are_joined_by_one_slash() -> None:
    assert storage.join("/", "x") == "/x"
    assert storage.join("/", "x/", "/y") == "/x/y"
    assert storage.join("/") == "/"


def write_manifest(folder: Path, name: str = storage.MANIFEST, **manifest: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(manifest))
    return str(folder)


@pytest.fixture
def data(write_dataset: Any) -> Path:
    """A data set of two periods."""
    group = np.zeros((2, 1), np.float32), np.ones(2, np.float32)
    return Path(write_dataset({"p1": [group], "p2": [group]}, [Feature(name="a")]))


def change(folder: Path, **changes: Any) -> None:
    """Change the manifest's entry of its first file."""
    path = folder / storage.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][0] |= changes
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", OUTSIDE + UNFIT)
def test_a_path_outside_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    url = write_manifest(tmp_path / "out", files=[{"path": name, "sha256": HASH, "bytes": 1}])
    with pytest.raises(InputError, match=r"out/manifest\.json: files\.0: .* cannot be the path of a listed file"):
        storage.read_manifest(url)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"path": "a"}, "files is no list"),
        (["a"], "no path"),
        ([{"path": 3}], "no path"),
        ([{"path": "a", "sha256": "0" * 63}], "no content hash"),
        ([{"path": "a", "sha256": None}], "no content hash"),
        ([{"path": "a", "sha256": HASH, "bytes": -1}], "no size"),
        ([{"path": "a", "sha256": HASH, "bytes": True}], "no size"),
        ([{"path": "a", "sha256": HASH, "bytes": 2**63}], "no size"),
        ([{"path": "a", "sha256": HASH}] * 2, "'a' is listed twice"),
    ],
)
def test_an_entry_that_lists_no_file_is_refused(tmp_path: Path, files: Any, reason: str) -> None:
    url = write_manifest(tmp_path / "out", files=files)
    with pytest.raises(InputError, match=reason):
        storage.read_manifest(url)


@pytest.mark.parametrize("key", ["parts.1", "query_ids.1", "vocabulary", "statistics"])
def test_a_bad_entry_is_named_by_its_own_key(tmp_path: Path, key: str) -> None:
    good = [{"path": f"{key}-{name}", "sha256": HASH} for name in "abc"]
    name, _, index = key.partition(".")
    lists = {"files": good[:2], name: [good[2], {"path": "bad"}] if index else {"path": "bad"}}
    with pytest.raises(InputError, match=rf"manifest\.json: {re.escape(key)}: sha256 of 'bad'"):
        storage.read_manifest(write_manifest(tmp_path / "out", **lists))


@pytest.mark.parametrize("key", ["quarantine", "stale"])
@pytest.mark.parametrize("paths", [None, "a", {"a": 1}, [3], [["a"]]])
def test_a_quarantine_that_is_no_list_of_paths_is_refused(tmp_path: Path, key: str, paths: Any) -> None:
    url = write_manifest(tmp_path / "out", **{"files": [], key: paths})
    with pytest.raises(InputError, match=f"{key} is no list of paths"):
        storage.read_manifest(url)


def test_a_sibling_that_a_manifest_names_survives_the_next_commit(tmp_path: Path) -> None:
    precious = tmp_path / "precious" / "work"
    precious.parent.mkdir()
    precious.write_text("of years")
    url = write_manifest(tmp_path / "out", files=[{"path": "../precious", "sha256": HASH, "bytes": 1}])
    with pytest.raises(InputError, match=r"'\.\./precious'"), storage.Commit(url) as commit:
        commit.finish({})
    assert precious.read_text() == "of years"


@pytest.mark.slow
@pytest.mark.parametrize("period", [*OUTSIDE, *UNFIT[:8], "a/b", "x" * 250, ".hidden"])
def test_a_period_that_names_no_directory_is_refused(data: Path, tmp_path: Path, period: str) -> None:
    change(data, period=period)
    with pytest.raises(
        InputError, match=r"manifest\.json: files: .* (cannot be the name of a period|that does not fit)"
    ):
        open_dataset(str(data))
    scores = {"format": "ltrscale-scores", "period": period, "files": [], "groups": 0, "documents": 0}
    write_manifest(tmp_path / "period=p", storage.HIDDEN_MANIFEST, **scores, bundle_hash="", made_by={})
    with pytest.raises(InputError, match=r"period=p/_manifest\.json: period: .* cannot be the name of a period"):
        read_period(str(tmp_path), "p")


@pytest.mark.parametrize("counts", [[-1, 1, 0], [1 << 60, 1, 0], [1, 1, 2], [1, 1, -1], [1, -1, 1], [1, 1 << 60, 1]])
def test_counts_that_no_row_group_has_are_refused(data: Path, counts: list[int]) -> None:
    change(data, row_groups=[counts])
    with pytest.raises(InputError, match=r"manifest\.json: files: .*no row group has "):
        open_dataset(str(data))


@pytest.mark.parametrize(
    ("entry", "key"), [({"longest": 1.5}, "longest"), ({"row_groups": [[1, 1.5, 0]]}, r"row_groups\.0\.1")]
)
def test_a_count_with_a_fraction_is_refused(data: Path, entry: dict[str, object], key: str) -> None:
    change(data, **entry)
    with pytest.raises(InputError, match=rf"manifest\.json: files\.0\.{key}: .*valid integer"):
        open_dataset(str(data))


def test_what_is_not_listed_is_not_looked_for(tmp_path: Path) -> None:
    url = write_manifest(tmp_path / "out", files=[])
    for name in ("\0", "\ud800", "../precious"):
        with pytest.raises(InputError, match="the manifest does not list it"):
            storage.read_verified(url, name, storage.read_manifest(url) or {})


def test_other_lists_of_files_are_checked_too(data: Path, tmp_path: Path) -> None:
    manifest = json.loads((data / storage.MANIFEST).read_text())
    write_manifest(data, **manifest | {"quarantine": ["../../precious"]})
    with pytest.raises(InputError, match=r"quarantine: '\.\./\.\./precious' cannot be"):
        open_dataset(str(data))
    file = {"path": "a", "bytes": 1, "sha256": HASH, "data": "../a", "data_sha256": HASH}
    scores = {"format": "ltrscale-scores", "period": "p", "files": [file], "groups": 0, "documents": 0}
    write_manifest(tmp_path / "period=p", storage.HIDDEN_MANIFEST, **scores, bundle_hash="", made_by={})
    with pytest.raises(InputError, match=r"files\.0\.data: '\.\./a' cannot be"):
        read_period(str(tmp_path), "p")


def test_a_symlink_out_of_the_directory_is_not_followed(data: Path, tmp_path: Path) -> None:
    split = Split(data=(str(data),))
    (data / "period=p1").rename(tmp_path / "elsewhere")
    (data / "period=p1").symlink_to(tmp_path / "elsewhere")
    for read in (
        lambda: select(split, labelled=False),
        lambda: preflight({"train": split}, PreflightConfig(check="content")),
    ):
        with pytest.raises(InputError, match=r"period=p1/part-.*: a symlink leads out of .*/set; put the file"):
            read()


def test_a_data_set_may_be_reached_through_a_symlink_and_have_symlinks_inside(data: Path, tmp_path: Path) -> None:
    (data / "period=p1").rename(data / "inside")
    (data / "period=p1").symlink_to("inside")
    (tmp_path / "link").symlink_to(data)
    split = Split(data=(str(tmp_path / "link"),))
    assert select(split, labelled=False).n_groups == 2
    assert not preflight({"train": split}, PreflightConfig(check="content")).bad


def test_what_a_symlink_leads_to_is_neither_deleted_by_a_commit_nor_read(tmp_path: Path) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious" / "a"
    with storage.Commit(str(out)) as commit:
        with commit.file("folder/a") as path:
            path.write_text("x")
        commit.finish({})
    (out / "folder").rename(precious.parent)
    (out / "folder").symlink_to(precious.parent)
    with pytest.raises(InputError, match=r"out/folder/a: a symlink leads out of"), storage.Commit(str(out)) as commit:
        commit.finish({})
    with pytest.raises(InputError, match=r"out/folder/a: a symlink leads out of"):
        storage.read_verified(str(out), "folder/a", storage.read_manifest(str(out)) or {})
    assert precious.read_text() == "x"
