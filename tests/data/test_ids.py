import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltrscale.data.ids import QueryIds, SeenHashes, hash_ids


def slow_add(seen: set[int], hashes: list[int]) -> list[bool]:
    answers = []
    for value in hashes:
        answers.append(value in seen)
        seen.add(value)
    return answers


@given(
    st.lists(st.lists(st.integers(0, 60) | st.sampled_from([2**64 - 1, 2**63]), max_size=30), max_size=20),
    st.integers(1, 64),
)
def test_agrees_with_a_set_whatever_is_in_memory_and_on_disk(
    tmp_path_factory: pytest.TempPathFactory, calls: list[list[int]], memory: int
) -> None:
    folder = tmp_path_factory.mktemp("seen")
    seen, oracle = SeenHashes(folder, memory_hashes=memory), set[int]()
    for call in calls:
        assert seen.add(np.array(call, dtype=np.uint64)).tolist() == slow_add(oracle, call)
    assert len(seen) == len(oracle)


@pytest.mark.slow
def test_merges_runs_larger_than_a_merge_block_and_deletes_the_old_files(tmp_path: Path) -> None:
    seen = SeenHashes(tmp_path, memory_hashes=1000)
    hashes = np.random.default_rng(0).permutation(np.arange(400_000, dtype=np.uint64))
    for part in np.array_split(hashes, 37):
        assert not seen.add(part).any()
    assert seen.add(hashes).all()
    assert not seen.add(hashes + np.uint64(400_000)).any()
    assert len(seen) == 800_000
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk <= 8 * 800_000
    assert len(list(tmp_path.iterdir())) <= 12


def test_hashes_are_blake2b_of_scope_and_id() -> None:
    expected = [hashlib.blake2b(b"train\0" + text.encode(), digest_size=8).digest() for text in ("", "q", "ü")]
    assert hash_ids(["", "q", "ü"], scope="train").tobytes() == b"".join(expected)
    assert len(hash_ids([])) == 0


def test_scopes_keep_equal_ids_apart() -> None:
    ids = [str(i) for i in range(1000)]
    both = np.concatenate([hash_ids(ids, scope="a"), hash_ids(ids, scope="b")])
    assert len(np.unique(both)) == 2000


def test_ids_that_only_rejected_rows_have_are_lost(tmp_path: Path) -> None:
    ids = QueryIds(tmp_path)
    ids.unread.add(np.array([5, 3, 9], np.uint64))
    ids.groups.add(np.array([3, 1], np.uint64))
    assert ids.lost().tolist() == [5, 9]
    assert ids.groups.has(np.array([1, 2, 3, 2], np.uint64)).tolist() == [True, False, True, False]
    assert len(ids.groups) == 2
    ids.groups.add(np.array([5, 9], np.uint64))
    assert ids.lost().tolist() == []


@pytest.mark.parametrize("memory", [10, 1000, 1 << 20])
def test_saved_hashes_rise_and_can_be_pushed_into_another_set(tmp_path: Path, memory: int) -> None:
    hashes = np.random.default_rng(0).permutation(np.arange(0, 200_000, 2, dtype=np.uint64))
    seen = SeenHashes(tmp_path, memory_hashes=memory)
    for part in np.array_split(hashes, 7):
        seen.push(np.sort(part))
    seen.push(np.empty(0, np.uint64))
    assert len(seen) == len(hashes)
    seen.save(tmp_path / "all.npy")
    assert np.array_equal(np.load(tmp_path / "all.npy"), np.sort(hashes))
    other = SeenHashes(tmp_path, memory_hashes=memory)
    other.push(np.load(tmp_path / "all.npy", mmap_mode="r"))
    assert other.add(np.array([4, 5, 199_998], np.uint64)).tolist() == [True, False, True]
    SeenHashes(tmp_path).save(tmp_path / "none.npy")
    assert len(np.load(tmp_path / "none.npy")) == 0
