"""The same laws on a local disk and on a real S3 server."""

import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from ltrscale import storage
from ltrscale.errors import InputError
from ltrscale.storage import writers
from ltrscale.storage.lease import exclusively


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory that does not exist yet."""
    if request.param == "local":
        return str(tmp_path / "new")
    return storage.join(request.getfixturevalue("s3"), tmp_path.name)


def commit(url: str, files: dict[str, str], **manifest: object) -> None:
    with storage.Commit(url) as writer:
        for name, text in files.items():
            with writer.file(name) as path:
                path.write_text(text)
        writer.finish(manifest)


def manifest_of(url: str) -> dict[str, Any]:
    manifest = storage.read_manifest(url)
    assert manifest is not None
    return manifest


def names(url: str) -> list[str]:
    return [found.removeprefix(url).lstrip("/") for found in storage.list_files(url)]


def test_what_is_written_is_read(url: str) -> None:
    path = storage.join(url, "deep", "file")
    assert not storage.exists(path)
    storage.write_bytes(path, b"old")
    before = storage.fingerprint(path)
    storage.write_bytes(path, b"newer")
    assert storage.read_bytes(path) == b"newer"
    assert storage.size(path) == 5
    assert storage.fingerprint(path) != before
    with storage.open_input(path) as stream:
        stream.seek(2)
        assert stream.read() == b"wer"
    storage.remove(path)
    storage.remove(path)
    assert not storage.exists(path)


@pytest.mark.slow
def test_only_one_of_two_writers_creates_a_file(url: str) -> None:
    path = storage.join(url, "file")
    for round_ in range(5):
        start, won = threading.Barrier(2), []

        def write(data: bytes, path: str = f"{path}-{round_}", start: threading.Barrier = start, won=won) -> None:
            start.wait()
            if storage.swap(path, None, data):
                won.append(data)

        writers = [threading.Thread(target=write, args=(data,)) for data in (b"a", b"b")]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert len(won) == 1
        assert storage.read_bytes(f"{path}-{round_}") == won[0]


@pytest.mark.slow
def test_list_files(url: str) -> None:
    for name in ("b.txt", "_b.txt", "a/x.csv", "a/_skip.csv", "a/.hidden/y.csv", "a/z.txt"):
        storage.write_bytes(storage.join(url, name), b".")
    assert names(url) == ["a/x.csv", "a/z.txt", "b.txt"]
    for pattern, name in {"*/*.csv": "x.csv", "**/*.csv": "x.csv", "*.txt": "b.txt", "_*.txt": "_b.txt"}.items():
        found = storage.list_files(storage.join(url, pattern))
        assert [one.rsplit("/", 1)[1] for one in found] == [name], pattern
    assert storage.read_bytes(storage.list_files(storage.join(url, "b.txt"))[0]) == b"."
    with pytest.raises(InputError, match="no file there"):
        storage.list_files(storage.join(url, "*.parquet"))


@pytest.mark.slow
def test_a_name_that_looks_like_a_pattern_stands_for_itself_where_it_exists(url: str) -> None:
    there = ("q?.csv", "qa.csv", "q[ab].csv", "qb.csv", "w[1]/x*.csv", "w[1]/_x.csv", "w[1]/xy.csv", "w1/xy.csv", "p[a")
    for name in there:
        storage.write_bytes(storage.join(url, name), name.encode())
    expected = {name: [name] for name in there if "w" not in name} | {
        "q[ac].csv": ["qa.csv"],
        "w[1]": ["w[1]/x*.csv", "w[1]/xy.csv"],
        "w[1]/x*.csv": ["w[1]/x*.csv"],
        "w[1]/_*.csv": ["w[1]/_x.csv"],
        "w[1]/*": ["w[1]/x*.csv", "w[1]/xy.csv"],
        "w[1-2]/*": ["w1/xy.csv"],
        "*/xy.csv": ["w1/xy.csv", "w[1]/xy.csv"],
    }
    for pattern, found in expected.items():
        listed = storage.list_files(storage.join(url, pattern))
        assert listed == [storage.join(url, name) for name in found], pattern
        assert [storage.read_bytes(file).decode() for file in listed] == found
    with pytest.raises(InputError, match="no file there"):
        storage.list_files(storage.join(url, "q[xy].csv"))


def test_a_commit_is_seen_whole_or_not_at_all(url: str) -> None:
    with storage.Commit(url) as writer:
        with writer.file("part-{hash}.txt") as path:
            path.write_text("hello")
        assert storage.read_manifest(url) is None
        writer.finish({"kind": "example"})
    manifest = manifest_of(url)
    assert manifest["kind"] == "example"
    (file,) = manifest["files"]
    assert re.fullmatch(r"part-2cf24dba-[0-9a-f]{8}\.txt", file["path"])
    assert file["bytes"] == 5
    assert storage.read_verified(url, file["path"], manifest) == b"hello"
    storage.write_bytes(storage.join(url, file["path"]), b"hallo")
    with pytest.raises(InputError, match=r"part-2cf24dba-.*\.txt.*hash differs"):
        storage.read_verified(url, file["path"], manifest)
    with pytest.raises(InputError, match=r"other\.txt: the manifest does not list it"):
        storage.read_verified(url, "other.txt", manifest)


@pytest.mark.parametrize("error", [True, False])
def test_leaving_before_finish_takes_everything_back(url: str, error: bool) -> None:
    storage.write_bytes(storage.join(url, "mine.txt"), b"not of a commit")

    def abandon() -> None:
        with storage.Commit(url) as writer:
            with writer.file("deep/part.txt") as path:
                path.write_text("x")
            if error:
                raise RuntimeError("crash")

    if error:
        with pytest.raises(RuntimeError, match="crash"):
            abandon()
    else:
        abandon()
    assert names(url) == ["mine.txt"]
    assert storage.read_manifest(url) is None


@pytest.mark.slow
def test_a_kept_file_stays_without_commit(url: str) -> None:
    with storage.Commit(url) as writer:
        for name in ("kept", "gone"):
            with writer.file(f"{name}-{{hash}}") as path:
                path.write_text(name)
        kept = writer.files[0].path
        writer.keep([kept])
    assert names(url) == [kept]
    commit(url, {"other": ""})
    assert names(url) == [storage.MANIFEST, "other"]


@pytest.mark.slow
def test_saved_work_outlives_a_failure_that_keeps_files(url: str) -> None:
    with storage.Commit(url) as writer:
        with writer.file("saved-{hash}") as path:
            path.write_text("saved")
        writer.save({"turn": 1})
        with writer.file("kept-{hash}") as path:
            path.write_text("kept")
        writer.keep([writer.files[1].path])
    assert [name.split("-")[0] for name in names(url)] == ["kept", "saved"]
    with storage.Commit(url) as writer:
        assert writer.saved["turn"] == 1
        assert [name.split("-")[0] for name in names(url)] == ["saved"]
        writer.adopt(storage.Placed(**file) for file in writer.saved["files"])
        writer.finish({})
    assert storage.below(url) == [storage.MANIFEST, writer.files[0].path]


def test_files_left_beside_a_damaged_part_go_when_it_is_mended(tmp_path: Path) -> None:
    url, lacks_path = str(tmp_path), pa.table({"path": pa.array([None], pa.string()), "bytes": [0]})
    with storage.Commit(url) as writer:
        with writer.file("part-{hash}") as path:
            pq.write_table(lacks_path, path)
        part = tmp_path / writer.files[0].path
        parts = [vars(writer.files.pop())]
        with writer.file("old-{hash}") as path:
            path.touch()
        writer.finish({"parts": parts})

    def found() -> set[str]:
        return {name.split("-")[0] for name in names(url)}

    with storage.Commit(url) as one, storage.Commit(url) as two:
        for name, writer in (("one", one), ("two", two)):
            with writer.file(f"{name}-{{hash}}") as path:
                path.touch()
            writer.keep([writer.files[0].path])
    whole = part.read_bytes()
    part.write_bytes(b"damaged")
    commit(url, {"new-{hash}": ""}, parts=parts)
    assert found() == {"manifest.json", "new", "part", "one", "two"}
    part.write_bytes(whole)
    with storage.Commit(url):
        pass
    assert found() == {"manifest.json", "new", "part"}


@pytest.mark.slow
@pytest.mark.parametrize(("act", "number"), [("swap", 0), ("remove", 0), ("remove", 1), ("remove", 2)])
@pytest.mark.parametrize("by", ["commit", "sweep"])
def test_what_a_killed_commit_was_about_to_delete_goes_later(tmp_path: Path, act: str, number: int, by: str) -> None:
    url = str(tmp_path / "out")
    commit(url, {"a-{hash}": "one", "b-{hash}": "one", "c": "one"}, version=1)
    (tmp_path / "out" / "users-own").touch()

    def run() -> None:
        module = storage.lease if act == "swap" else storage.files
        real, calls = getattr(module, act), itertools.count()
        setattr(module, act, lambda *values: os._exit(9) if next(calls) == number else real(*values))
        commit(url, {"c": "one"}, version=2)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 9
    manifest = manifest_of(url)
    assert manifest["version"] == (1 if act == "swap" else 2)
    if by == "commit":
        with storage.Commit(url):
            pass
    else:
        storage.sweep(url, [])
    assert storage.is_whole(url, manifest)
    left = [name for name in storage.below(url) if not name.startswith(".staging-")]
    assert left == sorted([storage.MANIFEST, "users-own", *(file["path"] for file in manifest["files"])])


@pytest.mark.parametrize("key", ["stale", "quarantine"])
def test_what_a_record_leaves_to_delete_goes_also_where_an_earlier_version_wrote_it(tmp_path: Path, key: str) -> None:
    commit(str(tmp_path), {"a": "one"})
    (tmp_path / "b").touch()
    (tmp_path / ".unfinished.json").write_text(json.dumps({key: ["b"]}))
    with storage.Commit(str(tmp_path)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", storage.MANIFEST]


@pytest.mark.slow
@pytest.mark.parametrize("finish", [True, False])
def test_files_belong_to_the_commit_that_adopts_them(url: str, finish: bool) -> None:
    commit(url, {"old": "1"}, version=1)
    with storage.Commit(url) as whole:
        for text in ("one", "two"):
            with storage.Commit(url, helping=True) as part:
                with part.file("{hash}.txt") as path:
                    path.write_text(text)
                placed = part.leave()
            assert storage.exists(storage.join(url, placed[0].path))
            whole.adopt(placed)
        with storage.Commit(url, helping=True) as failed:
            with failed.file("failed-{hash}") as path:
                path.write_text("")
            assert storage.exists(storage.join(url, failed.files[0].path))
        assert not storage.exists(storage.join(url, failed.files[0].path))
        if finish:
            whole.finish({"version": 2})
    assert len(names(url)) == (3 if finish else 2)
    manifest = manifest_of(url)
    assert {storage.MANIFEST, *(file["path"] for file in manifest["files"])} == set(names(url))


@pytest.mark.slow
def test_a_commit_replaces_the_one_before(url: str) -> None:
    commit(url, {"a-{hash}": "one", "same": "one"}, version=1)
    commit(url, {"a-{hash}": "two", "same": "two"}, version=2)
    manifest = manifest_of(url)
    assert manifest["version"] == 2
    assert sorted(names(url)) == sorted([storage.MANIFEST, *(file["path"] for file in manifest["files"])])
    assert storage.read_bytes(storage.join(url, "same")) == b"two"


def test_a_manifest_may_list_files_of_the_commit_before(url: str) -> None:
    commit(url, {"a": "one", "b": "one"})
    old = storage.read_manifest(url)
    assert old is not None
    with storage.Commit(url) as writer:
        with writer.file("c") as path:
            path.write_text("two")
        writer.finish({"files": [old["files"][0], *map(vars, writer.files)]})
    assert names(url) == ["a", "c", storage.MANIFEST]


def test_giving_up_a_replacement_leaves_the_commit_before(url: str) -> None:
    commit(url, {"a-{hash}": "one"}, version=1)
    with storage.Commit(url) as writer, writer.file("a-{hash}") as path:
        path.write_text("two")
    manifest = manifest_of(url)
    assert manifest["version"] == 1
    assert storage.read_verified(url, manifest["files"][0]["path"], manifest) == b"one"
    assert len(names(url)) == 2


def test_an_overwritten_commit_stays_whole_until_the_end(url: str) -> None:
    commit(url, {"same": "one", "gone": "one"}, version=1)
    old = storage.read_manifest(url)
    assert old is not None
    for finish in (False, True):
        with storage.Commit(url) as writer:
            with writer.file("same") as path:
                path.write_text("two")
            assert storage.read_manifest(url) == old
            assert storage.read_verified(url, "same", old) == b"one"
            if finish:
                writer.finish({"version": 2})
    manifest = manifest_of(url)
    assert manifest["version"] == 2
    assert storage.read_verified(url, "same", manifest) == b"two"
    assert names(url) == [storage.MANIFEST, "same"]


def test_a_file_of_equal_name_and_content_withdraws_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(url, {"a": "one"}, version=1)
    swapped: list[tuple[str, bytes | None]] = []
    swap = storage.lease.swap
    monkeypatch.setattr(storage.lease, "swap", lambda u, old, new: swapped.append((u, new)) or swap(u, old, new))
    commit(url, {"a": "one", "b": "two"}, version=2)
    ((_, manifest),) = [(u, new) for u, new in swapped if u.endswith(storage.MANIFEST)]
    assert manifest is not None
    assert len(names(url)) == 3


@pytest.mark.slow
def test_the_later_of_two_committers_gets_an_error(url: str) -> None:
    for again in (False, True):
        with storage.Commit(url) as late:
            with late.file("part-{hash}") as path:
                path.write_text(f"late {again}")
            commit(url, {"part-{hash}": f"early {again}"}, writer="early", again=again)
            with pytest.raises(InputError, match="another writer"):
                late.finish({"writer": "late"})
        manifest = manifest_of(url)
        assert (manifest["writer"], manifest["again"]) == ("early", again)
        assert storage.read_verified(url, manifest["files"][0]["path"], manifest) == f"early {again}".encode()
        assert len(names(url)) == 2


def test_a_committer_who_lost_leaves_equal_files_to_the_winner(url: str) -> None:
    with storage.Commit(url) as late:
        with late.file("part-{hash}") as path:
            path.write_text("equal")
        commit(url, {"part-{hash}": "equal"}, writer="early")
        with pytest.raises(InputError, match="another writer"):
            late.finish({"writer": "late"})
    manifest = manifest_of(url)
    assert storage.read_verified(url, manifest["files"][0]["path"], manifest) == b"equal"


def test_two_committers_of_the_same_files_both_succeed(url: str) -> None:
    with storage.Commit(url) as late:
        with late.file("part") as path:
            path.write_text("equal")
        commit(url, {"part": "equal"})
        manifest = storage.read_manifest(url)
        late.finish({})
    assert manifest is not None
    assert storage.read_manifest(url) == manifest
    assert storage.read_verified(url, "part", manifest) == b"equal"


@pytest.mark.parametrize("size", [3, 100])
def test_a_directory_whose_files_are_reached_by_links_is_whole(tmp_path: Path, size: int) -> None:
    out = tmp_path / "out"
    commit(str(out), {f"{i % 2}/{i}": "x" * (i + 1) for i in range(size)})
    manifest = storage.read_manifest(str(out))
    assert manifest is not None
    (out / "0").rename(tmp_path / "elsewhere")
    (out / "0").symlink_to(tmp_path / "elsewhere")
    (out / "1" / "1").rename(tmp_path / "file")
    (out / "1" / "1").symlink_to(tmp_path / "file")
    assert storage.is_whole(str(out), manifest)
    (tmp_path / "file").write_text("")
    assert not storage.is_whole(str(out), manifest)


def test_children(url: str) -> None:
    assert storage.children(url) == []
    for name in ("b.txt", "a/x.csv", "a/z/y.csv", ".hidden", "_skip/x"):
        storage.write_bytes(storage.join(url, name), b".")
    assert storage.children(url) == storage.children(url + "/") == [storage.join(url, name) for name in ("a", "b.txt")]
    assert storage.children(storage.join(url, "a")) == [storage.join(url, f"a/{name}") for name in ("x.csv", "z")]


def test_what_is_committed_is_flushed_to_the_disk_before_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, flushed, real = tmp_path / "new" / "set", [], os.fsync

    def flush(descriptor: int) -> None:
        real(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append((name, os.fstat(descriptor).st_ino, (root / storage.MANIFEST).exists()))

    monkeypatch.setattr(os, "fsync", flush)
    commit(str(root), {"deep/part": "x"})
    before = [name for name, _, committed in flushed if not committed]
    assert (root / "deep" / "part").stat().st_ino in [inode for _, inode, committed in flushed if not committed]
    assert {tmp_path, tmp_path / "new", root, root / "deep"} <= set(before)
    assert (root / storage.MANIFEST).stat().st_ino in [inode for _, inode, committed in flushed if not committed]
    assert flushed[-1][0] == root
    assert flushed[-1][2]


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_manifest_is_named(url: str, text: str) -> None:
    storage.write_bytes(storage.join(url, storage.MANIFEST), text.encode("latin-1"))
    with pytest.raises(InputError, match=r"manifest\.json: not .*make it again"):
        storage.read_manifest(url)


def test_a_missing_file_is_named(url: str) -> None:
    for action in (storage.read_bytes, storage.size, storage.fingerprint, lambda u: storage.open_input(u).__enter__()):
        with pytest.raises(InputError, match="nothing: no such file"):
            action(storage.join(url, "nothing"))


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(InputError, match="what://x: not a path or URL that is read"):
        storage.filesystem("what://x")


def test_a_file_where_a_directory_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/x: cannot write: "):
        storage.write_bytes(str(tmp_path / "file" / "x"), b"")
    with pytest.raises(InputError, match=r": cannot read: Is a directory"):
        storage.read_bytes(str(tmp_path))


def test_a_file_url_is_local(tmp_path: Path) -> None:
    commit(f"file://{tmp_path}/out", {"a": "x"})
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["files"][0]["path"] == "a"


def test_a_commit_while_another_is_flushed_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, real = str(tmp_path / "set"), os.fsync
    commit(url, {"old": "0"}, version=1)

    def flush(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        commit(url, {"theirs": "1"}, version=2)
        real(descriptor)

    def ours() -> None:
        with storage.Commit(url) as writer:
            with writer.file("ours") as path:
                path.write_text("2")
            monkeypatch.setattr(os, "fsync", flush)
            writer.finish({"version": 3})

    with pytest.raises(InputError, match="another writer has committed it"):
        ours()
    assert names(url) == [storage.MANIFEST, "theirs"]
    assert (storage.read_manifest(url) or {})["version"] == 2


@pytest.mark.slow
def test_one_of_several_writers_that_finish_at_once_commits(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a manifest to replace, with own files and with files of the same name."""
    refusals: list[str] = []
    real = writers.covering

    def slowly(url: str) -> writers.Lease | None:
        lease = real(url)
        time.sleep(random.uniform(0, 0.2))  # a lease that is gone by then was another thread's
        return lease

    monkeypatch.setattr(writers, "covering", slowly)
    for round_ in range(12):
        if round_ == 6:
            commit(url, {"shared": "first", "part-{hash}": "first"})
        elif round_ < 6:
            storage.withdraw(url)
        start, committed = threading.Barrier(3), []

        def write(text: str, start: threading.Barrier = start, committed: list[str] = committed) -> None:
            with storage.Commit(url) as writer:
                for name in ("shared", "part-{hash}"):
                    with writer.file(name) as path:
                        path.write_text(text)
                start.wait()
                try:
                    writer.finish({"writer": text})
                    committed.append(text)
                except InputError as error:
                    refusals.append(str(error))

        threads = [threading.Thread(target=write, args=(f"{round_}-{i}",)) for i in range(3)]
        for writer in threads:
            writer.start()
        for writer in threads:
            writer.join()
        manifest = manifest_of(url)
        assert committed == [manifest["writer"]]
        for file in manifest["files"]:
            assert storage.read_verified(url, file["path"], manifest) == committed[0].encode()
        assert len(names(url)) == 3
    assert len(refusals) == 24
    assert all("another writer has committed it meanwhile" in refusal for refusal in refusals)


@pytest.mark.slow
def test_files_are_listed_while_others_come_and_go(tmp_path: Path) -> None:
    url, over = str(tmp_path / "data"), threading.Event()
    commit(url, {f"part-{i}": "x" for i in range(50)})

    def renew() -> None:
        while not over.is_set():
            storage.write_bytes(f"{url}/.lease", b"mine")  # by a temporary file that is renamed

    writer = threading.Thread(target=renew)
    writer.start()
    try:
        for _ in range(400):
            assert {name for name in storage.below(url) if name.startswith("part-")} == {f"part-{i}" for i in range(50)}
    finally:
        over.set()
        writer.join()


def test_an_ending_writer_leaves_the_files_of_another_one_alone(url: str) -> None:
    with storage.Commit(url) as ours:
        with ours.file("part-{hash}") as path:
            path.write_text("equal")
        with storage.Commit(url) as theirs, theirs.file("part-{hash}") as path:
            path.write_text("equal")
        ours.finish({})
    manifest = manifest_of(url)
    assert storage.is_whole(url, manifest)


@pytest.mark.parametrize("change", ["deleted", "changed", "replaced"])
def test_a_manifest_is_written_only_when_its_files_are_there(url: str, change: str) -> None:
    with storage.Commit(url) as writer:
        with writer.file("part-{hash}") as path:
            path.write_text("one")
        path = storage.join(url, writer.files[0].path)
        if change == "deleted":
            storage.remove(path)
        else:
            storage.write_bytes(path, b"two" if change == "replaced" else b"one more")
        with pytest.raises(InputError, match="deleted or changed by others before it was committed"):
            writer.finish({})
    assert storage.read_manifest(url) is None


@pytest.mark.slow
def test_a_withdrawal_deletes_the_manifest_first_in_any_order_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = storage.files.remove
    for files in itertools.permutations(["a", "m", "z/b"]):
        for allowed in range(6):
            url, left = str(tmp_path / f"{'-'.join(files).replace('/', '')}-{allowed}"), [allowed]
            commit(url, dict.fromkeys(files, "x"))

            def some(path: str, left: list[int] = left) -> None:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                remove(path)

            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(storage.files, "remove", some)
                storage.withdraw(url)
            manifest = storage.read_manifest(url)
            assert manifest is None or storage.is_whole(url, manifest)
            storage.sweep(url, [])
            assert manifest or not storage.below(url), "what it was about to delete goes later"
            assert allowed < 5 or not Path(url).exists()


def test_only_what_a_manifest_lists_is_withdrawn(tmp_path: Path) -> None:
    url = str(tmp_path / "out")
    commit(url, {"a": "x", "deep/b": "x"})
    for name in ("out/deep/users-own", "precious/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    storage.withdraw(url)
    assert storage.files.below(str(tmp_path)) == ["out/deep/users-own", "precious/file"]


def test_a_lock_that_is_not_had_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    monkeypatch.setattr(storage.lease, "_LOCK_S", 0.0)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - one descriptor of its own each time
    with pytest.raises(InputError, match="another process has been committing there"), exclusively(str(tmp_path)):
        pass
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    os.close(holder)


def test_a_directory_that_is_removed_while_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_removal(descriptor: int, fstat: Callable[[int], os.stat_result] = os.fstat) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", fstat)
        (tmp_path / "out").rmdir()
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", after_removal)
    with exclusively(str(tmp_path / "out")):
        assert (tmp_path / "out").is_dir()


@pytest.mark.s3
def test_what_a_killed_probe_leaves_is_found_again(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = storage.join(s3, "probed")

    def killed(_: object) -> bool:
        raise KeyboardInterrupt

    def probe_killed() -> list[str]:
        monkeypatch.setattr(storage.stores, "_probed", {})
        with monkeypatch.context() as patch:
            patch.setattr(storage.stores, "_accepted", killed)
            with pytest.raises(KeyboardInterrupt):
                storage.swap(f"{url}/file", None, b"x")
        return [name for name in storage.files.below(url) if "probe" in name]

    assert len(probe_killed()) == 1
    with storage.hold(url):  # probes in the same place, and takes its probe away
        assert storage.files.below(url) == [storage.lease.LEASE]
        (left,) = probe_killed()
        (lease,) = storage.share_leases()
        assert storage.writers.left_by([lease.token]).search(left), "the next holder finds it"


@pytest.mark.s3
def test_a_store_that_ignores_conditions_is_detected(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Conditions are removed from the requests, as if the store ignored them."""
    call = s3fs.S3FileSystem._call_s3

    async def deaf(self: object, method: str, *args: object, **kwargs: object) -> object:
        return await call(
            self, method, *args, **{k: v for k, v in kwargs.items() if k not in ("IfMatch", "IfNoneMatch")}
        )

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", deaf)
    monkeypatch.setattr(storage.stores, "_probed", {})
    url = storage.join(s3, tmp_path.name)
    for text in ("one", "two"):
        commit(url, {"a": text, "part-{hash}": text})
    manifest = manifest_of(url)
    assert storage.read_verified(url, "a", manifest) == b"two"
    warnings = [message for message in caplog.messages if "without heeding the condition" in message]
    assert len(warnings) == 1
    assert names(url) == ["a", storage.MANIFEST, manifest["files"][1]["path"]]
