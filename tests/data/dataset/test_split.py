from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dataset_changes import add_period, with_renamed_files
from preparing import prepare

from ltrscale import config, storage
from ltrscale.data.dataset import disjoint
from ltrscale.data.dataset.disjoint import check_disjoint, equal_periods, joined_splits
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.row_groups import RowGroup
from ltrscale.data.dataset.selection import GID_SPAN, select
from ltrscale.data.dataset.split import Split, Splits, SplitsWithTest, resolve_periods, with_periods_named
from ltrscale.data.stream.batches import iterate
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.stages.inputs import dataset_hashes
from ltrscale.trees.gbdt import GBDTJob

WEEKS = [f"2026-W{week:02}" for week in range(1, 7)]
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def weeks(make_dataset: Make) -> Any:
    """Six weeks of three row groups of four groups; the second row group of each week has no labels."""
    lengths = {week: [[2, 3, 4, 1]] * 3 for week in WEEKS}
    return make_dataset(lengths, is_labelled=lambda gid: gid // 4 % 3 != 1)


def splits(url: str, train: str, validation: str, test: str, gap: int = 0) -> Splits:
    train_, validation_, test_ = (Split(data=(url,), periods=(p,)) for p in (train, validation, test))
    return Splits(train=train_, validation=validation_, test=test_, gap=gap)


class Unsearched(tuple[str, ...]):
    """Periods that nobody looks through for each period of a data set."""

    def __contains__(self, period: object) -> bool:
        raise AssertionError(period)


def test_looking_for_equal_periods_takes_time_by_their_number_and_not_by_its_square(weeks: Any) -> None:
    dataset = open_dataset(weeks.url)
    assert [*equal_periods([(dataset, Unsearched(WEEKS))])] == [*equal_periods([(dataset, WEEKS)])]


def test_a_split_reads_plain_text_dates_and_numbers() -> None:
    split = config.validate(Split, {"data": "set", "periods": "2026-W01..2026-W03"}, "test")
    assert split == Split(data=("set",), periods=("2026-W01..2026-W03",))
    days = config.validate(Split, yaml.safe_load("{data: [a, b], periods: [2026-01-05, 17]}"), "test")
    assert days.periods == ("2026-01-05", "17")
    with pytest.raises(InputError, match="labelled_fraction"):
        config.validate(Split, {"data": "set", "labelled_fraction": 0}, "test")
    with pytest.raises(InputError, match="names no data set"):
        select(Split(), labelled=False)


def test_periods_and_ranges_choose_row_groups_in_file_order(weeks: Any) -> None:
    split = Split(data=(weeks.url,), periods=("2026-W05", "2026-W01..2026-W02"))
    selection = select(split, labelled=False)
    assert [(r.file.period, r.index) for r in selection.row_groups] == [
        (week, index) for week in ("2026-W01", "2026-W02", "2026-W05") for index in range(3)
    ]
    assert (selection.n_groups, selection.n_documents) == (36, 90)
    assert select(Split(data=(weeks.url,)), labelled=False).n_groups == len(weeks.groups)


def test_labelled_selection_leaves_out_row_groups_without_labels(weeks: Any) -> None:
    selection = select(Split(data=(weeks.url,)), labelled=True)
    assert [r.index for r in selection.row_groups] == [0, 2] * len(WEEKS)
    assert selection.n_groups == len(weeks.labelled)
    assert selection.n_documents == sum(len(weeks.groups[gid].features) for gid in weeks.labelled)
    assert [r.first_labelled for r in selection.row_groups[:4]] == [0, 4, 8, 12]


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_labelled_fraction_is_exact(weeks: Any, fraction: float, seed: int) -> None:
    split = Split(data=(weeks.url,), labelled_fraction=fraction, labelled_seed=seed)
    selection = select(split, labelled=True)
    assert selection.n_groups == max(1, round(fraction * len(weeks.labelled)))
    assert selection.served_groups_R.all()


def test_labelled_fractions_are_nested_and_differ_by_seed(weeks: Any) -> None:
    def kept(fraction: float, seed: int) -> set[int]:
        split = Split(data=(weeks.url,), labelled_fraction=fraction, labelled_seed=seed)
        kept_labelled = select(split, labelled=True).kept_labelled
        assert kept_labelled is not None
        return set(np.flatnonzero(kept_labelled).tolist())

    for seed in range(3):
        assert kept(0.1, seed) < kept(0.3, seed) < kept(0.9, seed)
    assert kept(0.3, 0) != kept(0.3, 1)


@pytest.mark.slow
def test_the_labelled_sample_is_uniform_over_groups(weeks: Any) -> None:
    hits = np.zeros(len(weeks.labelled))
    for seed in range(400):
        split = Split(data=(weeks.url,), labelled_fraction=0.25, labelled_seed=seed)
        hits += select(split, labelled=True).kept_labelled
    assert abs(hits / 400 - 0.25).max() < 0.1  # 4.6 standard deviations


def test_the_first_labelled_groups_are_those_of_the_first_row_groups(weeks: Any) -> None:
    split = Split(data=(weeks.url,), periods=("2026-W02..2026-W03",), labelled_fraction=0.4, labelled_sample="first")
    selection = select(split, labelled=True)
    assert selection.n_groups == 6
    assert [
        (r.file.period, r.index, n)
        for r, n in zip(selection.row_groups, selection.served_groups_R.tolist(), strict=True)
    ] == [
        ("2026-W02", 0, 4),
        ("2026-W02", 2, 2),
    ]
    assert selection.hash == select(split.replace(labelled_seed=3), labelled=True).hash  # a seed of nothing
    with pytest.raises(InputError, match="labelled_sample"):
        config.validate(Split, {"data": "set", "labelled_sample": "last"}, "test")


def test_the_hash_covers_what_is_served_and_not_where_it_lies(weeks: Any, make_dataset: Make, tmp_path: Path) -> None:
    split = Split(data=(weeks.url,), labelled_fraction=0.5)
    hashes = {
        select(split, labelled=True).hash,
        select(split, labelled=False).hash,
        select(split.replace(labelled_fraction=0.4), labelled=True).hash,
        select(split.replace(labelled_seed=1), labelled=True).hash,
        select(split.replace(labelled_sample="first"), labelled=True).hash,
        select(split.replace(labels="relevance"), labelled=True).hash,
        select(split.replace(periods=("2026-W01..2026-W05",)), labelled=True).hash,
        select(Split(data=(make_dataset({"a": [[1]]}).url,)), labelled=False).hash,
    }
    assert len(hashes) == 8
    moved = tmp_path / "moved"
    moved.symlink_to(weeks.url)
    assert select(split.replace(data=(str(moved),)), labelled=True).hash == select(split, labelled=True).hash


def unplaced(row_group: RowGroup) -> RowGroup:
    """A row group without the URL of its file."""
    return replace(row_group, file=replace(row_group.file, url="", dataset=""))


def test_names_of_files_and_unread_data_do_not_change_hash_ids_and_order(
    weeks: Any, make_dataset: Make, tmp_path: Path
) -> None:
    data = with_renamed_files(weeks.url, tmp_path / "data")
    first, last = (make_dataset({period: [[5, 5], [3]]}, seed=9).url for period in ("2025-W52", "2026-W30"))
    one, other = (Split(data=(first, url, last), periods=("2026-W02..2026-W30",)) for url in (weeks.url, data))
    for grown in (False, True):
        if grown:
            add_period(data, "2026-W00", like="2026-W03")
        for labelled in (False, True):
            expected, read = (select(split, labelled=labelled) for split in (one, other))
            assert read.hash == expected.hash
            assert list(map(unplaced, read.row_groups)) == list(map(unplaced, expected.row_groups))
        assert list(dataset_hashes([one]).values()) == list(dataset_hashes([other]).values())
    everything = other.replace(periods=("2026-W00..2026-W30",))
    assert select(everything, labelled=True).hash != expected.hash
    assert open_dataset(data).manifest.hash != open_dataset(weeks.url).manifest.hash


def test_the_hash_of_a_manifest_is_of_content_alone(weeks: Any, tmp_path: Path) -> None:
    data = with_renamed_files(weeks.url, tmp_path / "data")
    made, again = (open_dataset(url).manifest for url in (weeks.url, data))
    assert made.hash == again.hash
    files = made.files
    changed = [
        made.replace(files=files[::-1]),
        made.replace(files=files[1:]),
        made.replace(features=made.features[::-1]),
        made.replace(files=(files[0]._replace(period="2025-W01"), *files[1:])),
        made.replace(files=(files[0]._replace(sha256="0"), *files[1:])),
        made.replace(files=(files[0]._replace(row_groups=files[0].row_groups[:1]), *files[1:])),
    ]
    assert len({made.hash, *(manifest.hash for manifest in changed)}) == 1 + len(changed)


def test_the_label_column_changes_nothing_where_no_labels_are_served(weeks: Any) -> None:
    one, other = (Split(data=(weeks.url,), labels=column) for column in ("labels", "relevance"))
    assert select(one, labelled=False).hash == select(other, labelled=False).hash
    assert select(one, labelled=True).n_groups == select(other, labelled=True).n_groups
    assert select(other, labelled=True).label_weights == (("relevance", 1.0),)
    with pytest.raises(InputError, match="labels"):
        select(one.replace(labels="clicks"), labelled=True)
    assert select(one.replace(labels="clicks"), labelled=False).hash == select(one, labelled=False).hash


def test_a_relative_path_becomes_absolute(weeks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(weeks.url)
    monkeypatch.chdir(folder.parent)
    row_group = select(Split(data=(folder.name,)), labelled=False).row_groups[0]
    assert Path(row_group.file.url).is_absolute()
    assert Path(row_group.file.url).is_file()


def test_several_data_sets_get_ids_that_do_not_meet(weeks: Any, make_dataset: Make) -> None:
    more = make_dataset({"2026-W07": [[5, 5]]}, seed=1)
    selection = select(Split(data=(weeks.url, more.url)), labelled=True)
    last = selection.row_groups[-1]
    assert last.file.gid_base == GID_SPAN
    assert last.first_labelled == len(weeks.labelled)
    assert selection.n_groups == len(weeks.labelled) + 2
    one = select(Split(data=(weeks.url, more.url), periods=("2026-W07",)), labelled=False)
    assert [r.file.gid_base for r in one.row_groups] == [0]  # of the other data set nothing is read


@pytest.mark.parametrize(
    ("features", "named"),
    [(("a", "x", "c"), r"1 of its 3 .*: 'b' \(numeric, there missing\)"), (("b",), "2 of its 3 .* 'a' .* 'c'")],
)
def test_data_sets_must_agree_on_features(
    weeks: Any, make_dataset: Make, features: tuple[str, ...], named: str
) -> None:
    other = make_dataset({"2026-W09": [[1]]}, features=features)
    with pytest.raises(InputError, match=named):
        select(Split(data=(weeks.url, other.url)), labelled=False)


def test_a_data_set_named_twice_is_refused(weeks: Any, tmp_path: Path) -> None:
    for other in (weeks.url, with_renamed_files(weeks.url, tmp_path / "copy")):
        with pytest.raises(InputError, match="have the same documents"):
            select(Split(data=(weeks.url, other)), labelled=False)
    add_period(other, "2026-W09", like="2026-W03")
    with pytest.raises(InputError, match="have the same documents"):
        select(Split(data=(weeks.url, other), periods=("2026-W01",)), labelled=False)


@pytest.mark.parametrize(
    ("period", "message"),
    [
        ("2026-W9", "no period '2026-W9'; the nearest is '2026-W0"),
        ("2026-w03", "the nearest is '2026-W03'"),
        ("2026-W20", r"no period '2026-W20'; it has 2026-W01\S* "),
        ("2026-W01..2026-W3", "no period '2026-W3'"),
        ("2026-W04..2026-W02", "write 2026-W02..2026-W04"),
    ],
)
def test_an_unknown_period_names_the_nearest(weeks: Any, period: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        select(Split(data=(weeks.url,), periods=(period,)), labelled=False)


def test_no_labels_and_no_groups_are_errors(make_dataset: Make, tmp_path: Path) -> None:
    bare = make_dataset({"a": [[1, 2]]}, is_labelled=lambda _: False)
    with pytest.raises(InputError, match="no group has labels"):
        select(Split(data=(bare.url,)), labelled=True)
    empty = make_dataset({})
    with pytest.raises(InputError, match="no query group"):
        select(Split(data=(empty.url,)), labelled=False)
    with pytest.raises(InputError, match="it is empty"):
        select(Split(data=(empty.url,), periods=("a",)), labelled=False)
    with pytest.raises(InputError, match="no data set is committed"):
        select(Split(data=(str(tmp_path / "nowhere"),)), labelled=False)


def test_files_left_out_leave_the_ids_of_the_others_as_they_were(weeks: Any, make_dataset: Make) -> None:
    more = make_dataset({"2026-W07": [[5, 5]]}, seed=1)
    split = Split(data=(weeks.url, more.url))
    everything = select(split, labelled=False).row_groups
    without = {everything[0].file.url, everything[7].file.url}
    left = select(split, labelled=False, without=without).row_groups
    assert len(left) == len(everything) - 2 * 3
    assert [replace(r, first_labelled=0) for r in left] == [
        replace(r, first_labelled=0) for r in everything if r.file.url not in without
    ]


@pytest.mark.parametrize("sample", ["random", "first"])
def test_a_labelled_sample_is_drawn_from_what_is_left(weeks: Any, sample: str) -> None:
    split = Split(data=(weeks.url,), labelled_fraction=0.5, labelled_sample=sample)
    everything = select(split, labelled=False).row_groups
    kept = {everything[i].file.url for i in (1, 4, 10)}
    left = select(split, labelled=True, without={r.file.url for r in everything} - kept)
    assert left.n_groups == sum(r.labelled for r in everything if r.file.url in kept) / 2
    assert {r.file.url for r in left.row_groups} <= kept
    assert left.kept_labelled is not None
    assert left.kept_labelled.sum() == left.served_groups_R.sum()


def test_the_hash_covers_the_files_left_out(weeks: Any, tmp_path: Path) -> None:
    split = Split(data=(weeks.url,), periods=("2026-W01..2026-W03",))
    urls = list(dict.fromkeys(r.file.url for r in select(Split(data=(weeks.url,)), labelled=False).row_groups))
    whole = select(split, labelled=False)
    hashes = {select(split, labelled=False, without=urls[i : i + n]).hash for i, n in [(0, 0), (0, 1), (1, 1), (0, 2)]}
    assert len(hashes) == 4
    assert select(split, labelled=False, without=urls[3:]).hash == whole.hash  # none of this split's
    assert select(split, labelled=False, without=urls[:2][::-1]).hash in hashes
    moved = tmp_path / "moved"
    moved.symlink_to(weeks.url)
    there = select(split.replace(data=(str(moved),)), labelled=False, without=[urls[0].replace(weeks.url, str(moved))])
    assert there.hash == select(split, labelled=False, without=urls[:1]).hash != whole.hash


def test_nothing_left_is_an_error(weeks: Any) -> None:
    split = Split(data=(weeks.url,), periods=("2026-W01..2026-W02",))
    urls = {row_group.file.url for row_group in select(split, labelled=False).row_groups}
    with pytest.raises(InputError, match="without 2 bad files: no query group"):
        select(split, labelled=False, without=urls)
    with pytest.raises(InputError, match="without 2 bad files: no group has labels"):
        select(split, labelled=True, without=urls)


def test_features_left_out_are_not_served_and_count_in_the_hash(weeks: Any) -> None:
    names = [feature.name for feature in open_dataset(weeks.url).manifest.features]
    whole = select(Split(data=(weeks.url,)), labelled=True)
    fewer = select(Split(data=(weeks.url,), leave_out=(names[1],)), labelled=True)
    assert [feature.name for feature in fewer.features] == [names[0], *names[2:]]
    assert (fewer.row_groups, fewer.n_groups) == (whole.row_groups, whole.n_groups)
    assert fewer.hash != whole.hash
    for groups, all_of_them in zip(iterate(fewer), iterate(whole), strict=True):
        kept_NF = np.delete(all_of_them.features_NF.numpy(), 1, axis=1)
        np.testing.assert_array_equal(groups.features_NF.numpy(), kept_NF)
    with pytest.raises(InputError, match=f"^leave_out: no feature matches 'x{names[1]}'; the nearest is '{names[1]}'$"):
        select(Split(data=(weeks.url,), leave_out=(f"x{names[1]}",)), labelled=True)
    with pytest.raises(InputError, match=f"leave_out: [*] leave out all {len(names)} features; keep some"):
        select(Split(data=(weeks.url,), leave_out=("*",)), labelled=True)


def test_only_the_training_split_leaves_features_out(weeks: Any) -> None:
    known = splits(weeks.url, *WEEKS[:3])
    assert known.leaving_out(["a"]).leaving_out(["b*"]).train.leave_out == ("a", "b*")
    with pytest.raises(ValueError, match=r"test.leave_out has no effect: models read the features of train; set it"):
        known.replace(test={**known.test.model_dump(), "leave_out": ["a"]})


def test_no_data_file_is_opened(make_dataset: Make) -> None:
    made = make_dataset({"a": [[1, 2], [3]]})
    for file in open_dataset(made.url).manifest.files:
        storage.remove(storage.join(made.url, file.path))
    assert select(Split(data=(made.url,), labelled_fraction=0.5), labelled=True).n_groups == 2


def test_splits_that_share_a_period_are_refused(weeks: Any) -> None:
    check_disjoint(splits(weeks.url, "2026-W01..2026-W04", "2026-W05", "2026-W06"))
    with pytest.raises(InputError, match=r"train and test both take period '2026-W04'.*only"):
        check_disjoint(splits(weeks.url, "2026-W01..2026-W04", "2026-W05", "2026-W04..2026-W06"))
    with pytest.raises(InputError, match=r"validation and test both take period '2026-W06'"):
        check_disjoint(splits(weeks.url, "2026-W01", "2026-W05..2026-W06", "2026-W06"))


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_a_file_that_was_shipped_under_two_names_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, same: bool
) -> None:
    """Groups are numbered on, and rows fall into other row groups: content hashes do not reveal this."""
    lines = {}
    for name, seed, queries in (("train", 0, 31), ("vali", 1, 17), ("test", 1 if same else 2, 17)):
        rng = np.random.default_rng(seed)
        rows = [f"{y} qid:{q} 1:{x:.4f} 2:{x:.1f}" for q in range(queries) for y, x in enumerate(rng.random(3))]
        lines[name] = "\n".join(rows)
        (tmp_path / f"{name}.txt").write_text(lines[name])
    inputs = [{"path": str(tmp_path / f"{name}.txt"), "period": name} for name in lines]
    prepared = PrepareConfig.model_validate({"inputs": inputs, "source": {"kind": "letor"}})
    data = prepare(prepared, str(tmp_path / "data"))
    assert len({*data.manifest.files.sha256}) == 3
    check_disjoint(splits(data.url, "train", "vali", "test"))
    twice = f"period 'vali' of {data.url} and test takes period 'test' of {data.url}, whose lists are the same"
    named = [message for message in caplog.messages if "one file under two names" in message]
    assert len(named) == 2 * same
    if same:
        assert named[0].startswith(f"prepare: {data.url}: periods 'test' and 'vali' have the same lists")
        assert named[1].startswith(f"validation takes {twice}")
    storage.remove(storage.join(data.url, data.manifest.files.paths[0]))
    check_disjoint(splits(data.url, "train", "vali", "test"))  # pre-flight names what is missing


def test_a_fold_and_the_rest_may_share_their_periods(weeks: Any) -> None:
    rest = Split(data=(weeks.url,), periods=("2026-W01..2026-W04",), fold={"number": 1, "of": 5})
    part = rest.replace(fold={"number": 1, "of": 5, "held_out": True})
    check_disjoint(Splits(train=rest, validation=part))
    every = select(rest.replace(fold=None), labelled=True)
    kept = [select(split, labelled=True).kept_labelled for split in (rest, part)]
    assert sum(np.where(k, 1, 0) for k in kept if k is not None).tolist() == [1] * every.n_groups
    assert joined_splits(rest, part) == rest.replace(fold=None)
    for other in (
        part.replace(fold={"number": 2, "of": 5, "held_out": True}),
        part.replace(fold={"number": 1, "of": 5, "held_out": True, "seed": 1}),
        part.replace(periods=("2026-W01..2026-W03",)),
        part.replace(labelled_fraction=0.5),
        rest,
        part.replace(fold=None),
    ):
        with pytest.raises(InputError, match="train and validation both take period '2026-W01'"):
            check_disjoint(Splits(train=rest, validation=other))


def relabelled(url: str, folder: Path) -> str:
    """A copy of a data set as relabelling makes it: the same groups in other files."""
    manifest = open_dataset(url).manifest
    origin = {"stage": "relabel", "config": {}, "inputs": {url: manifest.hash}}
    files = [file._replace(sha256=file.sha256[::-1]) for file in manifest.files]
    written = manifest.replace(files=files, made_by=origin).model_dump_json().encode()
    storage.write_bytes(f"{folder}/{storage.MANIFEST}", written)
    return str(folder)


@pytest.mark.parametrize("since", ["nothing", "a period more", "moved", "a copy with a period more"])
def test_a_relabelled_data_set_overlaps_with_what_it_was_made_from(weeks: Any, tmp_path: Path, since: str) -> None:
    data = with_renamed_files(weeks.url, tmp_path / "data")
    train = Split(data=(relabelled(relabelled(data, tmp_path / "one"), tmp_path / "two"),), periods=("2026-W01",))
    match since:
        case "a period more":
            add_period(data, "2026-W09", like="2026-W03")
        case "moved":
            data = str(Path(data).rename(tmp_path / "moved"))
        case "a copy with a period more":
            data = with_renamed_files(data, tmp_path / "copy")
            add_period(data, "2026-W09", like="2026-W03")
    with pytest.raises(InputError, match="train and test both take period '2026-W01'"):
        check_disjoint(
            Splits(
                train=train,
                validation=Split(data=(data,), periods=("2026-W02",)),
                test=Split(data=(data,), periods=("2026-W01",)),
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "apart"),
    [
        ({"kind": "min_docs", "documents": 2, "periods": ["2026-W02"]}, True),  # W01 stays as it is
        ({"kind": "min_docs", "documents": 2, "periods": ["2026-W01"]}, False),  # fewer groups are dealt otherwise
        # a copy in each part
        ({"kind": "clicks", "ranking": "random", "copies": 2, "max_relevance": 9, "periods": ["2026-W01"]}, False),
    ],
)
def test_folds_of_a_data_set_and_of_one_made_from_it_are_distinguished_by_their_queries(
    weeks: Any, tmp_path: Path, step: dict[str, Any], apart: bool
) -> None:
    made_by = {"stage": "relabel", "config": {}, "inputs": {weeks.url: open_dataset(weeks.url).manifest.hash}}
    settings, out = config.validate(RelabelConfig, {"steps": [step]}, "test"), str(tmp_path / "out")
    RelabelJob(relabel=settings, data=weeks.url, out=out).work(made_by, lambda _: None)
    rest = Split(data=(weeks.url,), periods=("2026-W01",), fold={"number": 1, "of": 2, "seed": 1})
    part = rest.replace(data=(out,), fold={"number": 1, "of": 2, "seed": 1, "held_out": True})
    if apart:
        check_disjoint(Splits(train=rest, validation=part))
    for other in (rest.replace(data=(out,)), part.replace(fold=None), *([] if apart else [part])):
        with pytest.raises(InputError, match="train and validation both take period '2026-W01'"):
            check_disjoint(Splits(train=rest, validation=other))


def test_the_same_period_of_different_data_sets_is_no_overlap(make_dataset: Make) -> None:
    urls = [make_dataset({"all": [[1]]}, seed=seed).url for seed in range(3)]
    train, validation, test = (Split(data=(url,)) for url in urls)
    check_disjoint(Splits(train=train, validation=validation, test=test))
    with pytest.raises(InputError, match="gap = 1"):
        check_disjoint(Splits(train=train, validation=validation, test=test, gap=1))


@pytest.mark.parametrize(
    ("gap", "train", "validation", "test", "allowed"),
    [
        (1, "2026-W01..2026-W02", "2026-W04", "2026-W05", True),
        (1, "2026-W01..2026-W03", "2026-W04", "2026-W05", False),
        (2, "2026-W01..2026-W02", "2026-W05", "2026-W06", True),
        (2, "2026-W01..2026-W02", "2026-W04", "2026-W05", False),
        (1, "2026-W03..2026-W04", "2026-W01", "2026-W06", True),
        (1, "2026-W03..2026-W05", "2026-W01", "2026-W06", False),
    ],
)
def test_a_gap_is_counted_in_whole_periods(
    weeks: Any, gap: int, train: str, validation: str, test: str, allowed: bool
) -> None:
    wanted = splits(weeks.url, train, validation, test, gap)
    if allowed:
        check_disjoint(wanted)
    else:
        with pytest.raises(InputError, match=f"gap = {gap}.*lower gap"):
            check_disjoint(wanted)


@pytest.mark.parametrize("item", ["last 3", "last 1 but 1", "all but last 2", "1..3", "9..12"])
def test_periods_that_text_puts_in_another_order_than_time_are_only_named(make_dataset: Make, item: str) -> None:
    months = [str(month) for month in range(1, 13)]
    data = make_dataset({month: [[2, 3]] for month in sorted(months)}, seed=9).url
    message = rf"^splits\.test\.periods: .*'{item}' takes periods in text order, which puts '12' before '2'; .* as '02'"
    with pytest.raises(InputError, match=message):
        resolve_periods(Split(data=(data,), periods=(item,)), "splits.test")
    with pytest.raises(InputError, match=message):
        with_periods_named(Split(periods=(item,)), "splits.test", known=sorted(months))
    named = splits(data, "1", "10", "12")
    assert [part.periods for part in resolve_periods(named.train)] == [("1",)]
    assert with_periods_named(Split(data=(data,))).periods == tuple(sorted(months))
    check_disjoint(named)
    with pytest.raises(InputError, match=r"^splits\.gap: 1 takes periods in text order, which puts '12' before '2'"):
        check_disjoint(named.replace(gap=1))


def test_whole_numbers_in_order_are_counted(make_dataset: Make) -> None:
    for names in (["01", "02", "10"], ["8", "9"], ["1", "10"], ["10", "2020", "9", "all"]):
        data = make_dataset({name: [[2, 3]] for name in names}, seed=10).url
        assert with_periods_named(Split(data=(data,), periods=("last 1",))).periods == (names[-1],)


def test_periods_are_all_if_left_out_and_never_none(weeks: Any) -> None:
    everything = select(Split(data=(weeks.url,)), labelled=False)
    for values in ({"data": weeks.url}, {"data": weeks.url, "periods": None}):
        split = Split.model_validate(values)
        assert select(split, labelled=False).hash == everything.hash
        assert Split.model_validate(split.model_dump(mode="json")) == split == split.replace(labelled_seed=0)
    splits = "splits={train: {data: d, periods: []}, validation: {data: d}}"
    with pytest.raises(InputError, match=r"splits\.train\.periods: an empty list; name periods, or leave the key out"):
        config.load(GBDTJob, overrides=["out=x", splits])


@pytest.mark.parametrize(
    ("train", "test", "warned"),
    [
        ("2026-W03", "2026-W01", True),
        ("2026-W01..2026-W03", "2026-W04", False),
        (["2026-W01", "2026-W04"], "2026-W03", True),
    ],
)
def test_a_test_before_the_training_is_a_warning(
    make_dataset: Make, caplog: pytest.LogCaptureFixture, train: Any, test: str, warned: bool
) -> None:
    data = make_dataset({f"2026-W0{week}": [[2, 3]] for week in range(1, 6)}, seed=7).url
    parts = {"train": train, "validation": "2026-W05", "test": test}
    splits = Splits.model_validate({name: {"data": data, "periods": weeks} for name, weeks in parts.items()})
    disjoint._warn_once.cache_clear()
    with caplog.at_level("WARNING", "ltrscale"):
        check_disjoint(splits)
        check_disjoint(splits)
    said = [text for text in caplog.messages if f"test takes period {test!r}, which lies before period" in text]
    assert len(said) == warned


def test_periods_without_dates_and_splits_without_a_test_are_no_warning(
    make_dataset: Make, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_dataset({name: [[2, 3]] for name in ("test", "train", "vali")}, seed=8).url
    parts = {"train": "train", "validation": "vali", "test": "test"}
    values = {name: {"data": data, "periods": period} for name, period in parts.items()}
    with caplog.at_level("WARNING", "ltrscale"):
        check_disjoint(Splits.model_validate(values))
        check_disjoint(Splits.model_validate({name: values[name] for name in ("train", "validation")}))
    assert caplog.messages == []
    with pytest.raises(InputError, match="splits: test: missing"):
        SplitsWithTest.from_splits(Splits.model_validate({name: values[name] for name in ("train", "validation")}))
