"""Adding periods to a data set gives the same as one run over all periods; counts add up, and no old data is lost."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare, rejections_of, rows_of

from ltrscale import storage
from ltrscale.config import validate
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.manifest import Accounting, Dataset, open_dataset
from ltrscale.data.dataset.origin import inputs_of
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.ids import hash_ids
from ltrscale.data.stream.readers import read_direct
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob

COLUMNS = {"query": "q", "item": "d", "label": "y", "features": ["f*"], "time": "day", "period": "day"}
SOURCE = {"kind": "items", "columns": COLUMNS}


def config(*paths: str | Path | Mapping[str, Any], add: bool = False, **settings: Any) -> PrepareConfig:
    inputs = [path if isinstance(path, Mapping) else {"path": str(path)} for path in paths]
    values = {"inputs": inputs, "source": SOURCE, "max_rejected": 0.9, "add": add, **settings}
    return PrepareConfig.model_validate(values)


def write_days(folder: Path, days: Sequence[int], *, first_query: int = 0, broken: int = 2) -> Path:
    """A file of items with 40 groups a day; a few rows break rules."""
    rng = np.random.default_rng(days[0])
    rows = []
    for day in days:
        for query in range(first_query + 100 * day, first_query + 100 * day + 40):
            for i in range(int(rng.integers(1, 8))):
                values = {
                    "f1": float(round(rng.normal(day))),
                    "f2": None if rng.random() < 0.2 else float(rng.lognormal()),
                }
                rows.append({"q": f"q{query}", "d": f"d{i}", "y": float(i % 3), "day": f"2026-03-{day:02}", **values})
    for i in range(broken):
        rows[7 * i]["y"] = -1.0
        rows[7 * i + 1]["day"] = "some day"
    path = folder / f"days-{'-'.join(map(str, days))}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def by_gid(dataset: Dataset) -> list[dict[str, Any]]:
    """All groups; features are text, because NaN does not equal itself."""
    rows = [{**row, "features": str(row["features"])} for row in rows_of(dataset)]
    return sorted(rows, key=lambda row: int(row["gid"]))


@pytest.mark.slow
def test_what_is_added_is_as_if_made_at_once(tmp_path: Path) -> None:
    parts = [write_days(tmp_path, days) for days in ([3, 4], [5], [1, 2])]
    out = str(tmp_path / "out")
    for path in parts:
        added = prepare(config(path, add=True), out)
    whole = prepare(config(*parts), str(tmp_path / "whole"))
    assert added == open_dataset(out)
    assert by_gid(added) == by_gid(whole)
    assert added.manifest.periods == [f"2026-03-0{day}" for day in (1, 2, 3, 4, 5)]
    for name in ("features", "accounting", "label_counts", "grouped"):
        assert getattr(added.manifest, name) == getattr(whole.manifest, name)
    assert added.manifest.files.longest == whole.manifest.files.longest
    assert added.manifest.accounting.rows_rejected == 12
    for ours, theirs in zip(added.manifest.summaries, whole.manifest.summaries, strict=True):
        assert ours.unique_in_group == theirs.unique_in_group
        exclude = {"unique_in_group"}
        assert ours.model_dump(exclude=exclude) == pytest.approx(theirs.model_dump(exclude=exclude), rel=1e-9)
    assert any(summary.unique_in_group for summary in whole.manifest.summaries)
    found = rejections_of(added)
    assert sum(row["rows"] for row in found) == 12
    assert len(list((tmp_path / "out" / "quarantine").iterdir())) == 3


@pytest.mark.slow
def test_what_is_unique_within_its_query_or_a_copy_is_said_once_and_not_with_each_week(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ltrscale")
    for day in (1, 2, 3):
        f2 = [i if day == 3 else i % 2 for _ in range(30) for i in range(6)]  # on the third day it is unique too
        columns = {"q": [f"q{day}-{i // 6}" for i in range(180)], "y": [i % 2 for i in range(180)]}
        columns |= {"d": [f"d{i}" for i in range(180)], "day": [f"2026-03-0{day}"] * 180}
        path = tmp_path / f"{day}.parquet"
        pq.write_table(
            pa.table({**columns, "f1": [float(i % 6) for i in range(180)], "f2": [float(x) for x in f2]}), path
        )
        prepare(config(path, add=True), str(tmp_path / "out"))
    said = [message.partition(";")[0] for message in caplog.messages if "unique within its query" in message]
    of_documents = "for 100% of the documents"
    assert len([message for message in caplog.messages if "have the same lists" in message]) == 1
    assert said == [f"prepare: unique within its query: {name} {of_documents}" for name in ("f1", "f2")]


@pytest.mark.slow
def test_the_order_of_the_columns_of_the_inputs_does_not_matter(tmp_path: Path) -> None:
    parts = [write_days(tmp_path, [day]) for day in (1, 2, 3)]
    for folder, backwards in (("one", (False,) * 3), ("two", (True,) * 3), ("three", (False, True, False))):
        (tmp_path / folder).mkdir()
        for path, back in zip(parts, backwards, strict=True):
            table = pq.read_table(path)
            table = table.select(table.schema.names[:: -1 if back else 1])
            pq.write_table(table, tmp_path / folder / f"{path.name}")
    made = {name: prepare(config(tmp_path / name), str(tmp_path / f"of-{name}")) for name in ("one", "two", "three")}
    assert [feature.name for feature in made["one"].manifest.features] == ["f1", "f2"]
    assert len({dataset.manifest.hash for dataset in made.values()}) == 1
    assert by_gid(made["one"]) == by_gid(made["three"])
    lacking = tmp_path / "one" / "days-4.parquet"
    pq.write_table(pq.read_table(parts[0]).drop_columns("f2"), lacking)
    with pytest.raises(InputError, match=r"days-4\.parquet: column 'f2' is missing, which \S+days-1\.parquet has"):
        prepare(config(tmp_path / "one"), str(tmp_path / "none"))


@pytest.mark.slow
def test_what_is_added_gets_the_order_of_the_data_set(tmp_path: Path) -> None:
    parts = [write_days(tmp_path, [day], broken=0) for day in (1, 2)]
    backwards = {"kind": "items", "columns": {**COLUMNS, "features": ["f2", "f1"]}}
    prepare(config(parts[0], source=backwards), str(tmp_path / "out"))
    added = prepare(config(parts[1], add=True), str(tmp_path / "out"))
    assert by_gid(added) == by_gid(prepare(config(*parts, source=backwards), str(tmp_path / "whole")))
    assert [feature.name for feature in added.manifest.features] == ["f2", "f1"]


@pytest.mark.slow
def test_the_same_command_again_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = {"out": str(tmp_path / "out"), "prepare": config(write_days(tmp_path, [1])).model_dump()}
    more = {**job, "prepare": config(write_days(tmp_path, [2]), add=True).model_dump()}
    last = {**job, "prepare": config(write_days(tmp_path, [3]), add=True).model_dump()}
    for values in (job, more, last):
        validate(PrepareJob, values, "test").run()
    manifest = tmp_path / "out" / "manifest.json"
    before = manifest.read_bytes()
    caplog.set_level("INFO", "ltrscale")
    for values in (job, more, last):
        caplog.clear()
        validate(PrepareJob, values, "test").run()
        assert "up to date, nothing to do" in caplog.text
    assert manifest.read_bytes() == before
    assert open_dataset(job["out"]).manifest.periods == ["2026-03-01", "2026-03-02", "2026-03-03"]


@pytest.mark.slow
def test_what_was_added_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    prepare(config(write_days(tmp_path, [1])), out)
    prepare(config(write_days(tmp_path, [1]), compression="none"), out)
    before = prepare(config(write_days(tmp_path, [2]), add=True), out)
    with pytest.raises(InputError, match=r"out: 1 additions are there, which .* would delete; set prepare\.add to add"):
        prepare(config(tmp_path / "days-1.parquet"), out)
    assert open_dataset(out) == before


@pytest.mark.slow
def test_a_data_set_in_parts_knows_its_additions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_FEW_FILES", 1)
    out = str(tmp_path / "out")
    prepare(config(write_days(tmp_path, [1, 2])), out)
    datasets = [prepare(config(write_days(tmp_path, [day]), add=True), out) for day in (3, 4, 5)]
    assert len((storage.read_manifest(out) or {})["made_by"]["added"]) < 3
    assert datasets[-1] == open_dataset(out)
    with pytest.raises(InputError, match="out: 3 additions are there, which"):
        prepare(config(tmp_path / "days-1-2.parquet", compression="none"), out)
    # also one that was opened before its part was merged into another
    names = [f"days-{days}.parquet" for days in ("1-2", "3", "4", "5")]
    for number, dataset in enumerate(datasets):
        assert [Path(entry["path"]).name for entry in inputs_of(dataset)] == names[: number + 2]


def make_old_period(folder: Path) -> PrepareConfig:
    return config(write_days(folder, [2, 1], first_query=5000), add=True)


def write_with_features(folder: Path, *names: str) -> Path:
    columns = {"q": ["a"], "d": ["d"], "y": [1.0], "day": ["2026-03-09"], **{name: [1.0] for name in names}}
    pq.write_table(pa.table(columns), folder / "other.parquet")
    return folder / "other.parquet"


def make_other_type(folder: Path) -> PrepareConfig:
    path = write_with_features(folder, "f1")
    pq.write_table(pq.read_table(path).append_column("f2", pa.array(["much"])), path)
    return config(path, add=True)


def make_other_kind(folder: Path) -> PrepareConfig:
    columns = {**COLUMNS, "features": ["f1"], "categorical": ["f2"]}
    return config(write_with_features(folder, "f1", "f2"), source={"kind": "items", "columns": columns}, add=True)


def make_other_columns(folder: Path) -> PrepareConfig:
    source = {"kind": "items", "columns": {**COLUMNS, "meta": ["d"]}}
    return config(write_days(folder, [9]), source=source, add=True)


def make_too_many_rejected(folder: Path) -> PrepareConfig:
    return config(write_days(folder, [9]), max_rejected=0, add=True)


def make_mended(folder: Path) -> PrepareConfig:
    table, mended = pq.read_table(folder / "days-1.parquet"), folder / "mended.parquet"
    pq.write_table(table.set_column(table.schema.get_field_index("y"), "y", pa.array([1.0] * len(table))), mended)
    return config(mended, add=True)


def make_unexpected(folder: Path) -> PrepareConfig:
    return config(write_days(folder, [9]), expect={"2026-03-09": {"groups": 7}}, add=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_old_period, r"days-2-1\.parquet: period '2026-03-01' is in \S+out already, and only new periods"),
        (
            make_other_type,
            r"other\.parquet: column 'f2' is string, and numeric until period '2026-03-01' of \S+out; a feature keeps",
        ),
        (make_other_kind, r"other\.parquet: column 'f2' is categorical, and numeric until period '2026-03-01' of"),
        (make_other_columns, r"days-9\.parquet: column 'meta_d' of its groups is string where it is missing in"),
        (make_too_many_rejected, r"4 of \d+ rows rejected .* max_rejected is 0\.00%"),
        (
            make_mended,
            r"rows rejected .* returning_query .*; queries that the data set has are not replaced: leave their",
        ),
        (make_unexpected, r"period '2026-03-09': expected 7 groups, found 40"),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(
    tmp_path: Path, make: Callable[[Path], PrepareConfig], message: str
) -> None:
    before = prepare(config(write_days(tmp_path, [1])), str(tmp_path / "out"))
    rows = by_gid(before)
    with pytest.raises(InputError, match=message):
        prepare(make(tmp_path), before.url)
    assert open_dataset(before.url) == before
    assert by_gid(before) == rows
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*") if path.name != "quarantine") == [
        *("manifest.json", "period=2026-03-01", "query-ids")
    ]


@pytest.mark.slow
def test_ids_return_from_every_addition(tmp_path: Path) -> None:
    parts = [write_days(tmp_path, [day], broken=0) for day in (1, 2, 3)]
    back = pa.concat_tables([pq.read_table(parts[0])[:30], pq.read_table(parts[1])[:30]])
    day_4 = pa.array(["2026-03-04"] * len(back))
    in_day_4 = back.set_column(back.schema.get_field_index("day"), "day", day_4)
    new = pq.read_table(write_days(tmp_path, [4], broken=0))
    pq.write_table(pa.concat_tables([new, in_day_4.cast(new.schema)]), tmp_path / "back.parquet")
    returning = len(back["q"].unique())
    out = str(tmp_path / "out")
    for path in (*parts, tmp_path / "back.parquet"):
        made = prepare(config(path, add=True), out)
    assert made.manifest.accounting.rules == {"returning_query": len(back)}
    assert made.manifest.accounting.groups_rejected == returning
    known = [np.load(tmp_path / "out" / file.path) for file in made.manifest.query_ids]
    stored = hash_ids(row["query_id"] for row in by_gid(made))
    assert [(np.diff(one.astype(object)) > 0).all() for one in known] == [True] * len(known)
    assert len(known) == 1  # a file takes over one that is not twice as long
    assert np.array_equal(np.sort(np.concatenate(known)), np.sort(stored))


def test_nothing_is_added_to_a_data_set_that_records_no_hashes(tmp_path: Path) -> None:
    first, second = (write_days(tmp_path, [day]) for day in (1, 2))
    made = prepare(config(first), str(tmp_path / "out"))
    (tmp_path / "out" / "manifest.json").write_text(made.manifest.replace(query_ids=()).model_dump_json())
    with pytest.raises(InputError, match=r"out: made by an earlier version, .* no query ids of period '2026-03-01'"):
        prepare(config(second, add=True), made.url)


def test_hashes_that_were_changed_are_named(tmp_path: Path) -> None:
    first, second = (write_days(tmp_path, [day]) for day in (1, 2))
    made = prepare(config(first), str(tmp_path / "out"))
    (file,) = made.manifest.query_ids
    path = tmp_path / "out" / file.path
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(InputError, match=rf"{file.path}: its content is not what was committed"):
        prepare(config(second, add=True), str(tmp_path / "out"))


@pytest.mark.slow
def test_fixed_periods_record_no_hashes(tmp_path: Path) -> None:
    train = {"path": str(write_days(tmp_path, [1])), "period": "train"}
    out = str(tmp_path / "out")
    assert prepare(config(train), out).manifest.query_ids == ()
    both = prepare(config(write_days(tmp_path, [2]), add=True), out)
    assert len(both.manifest.query_ids) == 1
    known = np.load(f"{out}/{both.manifest.query_ids[0].path}")
    in_days = [row["query_id"] for row in by_gid(both) if row["period"] != "train"]
    assert np.array_equal(known, np.sort(hash_ids(in_days)))


def test_only_what_prepare_made_is_added_to(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    prepare(config(write_days(tmp_path, [1])), out)
    manifest = storage.read_manifest(out)
    assert manifest is not None
    with storage.Commit(out) as commit:
        commit.finish({**manifest, "made_by": {"stage": "relabel"}})
    with pytest.raises(InputError, match=r"out: made by relabel; periods can be added to a data set of prepare only"):
        prepare(config(write_days(tmp_path, [2]), add=True), out)


@pytest.mark.slow
def test_query_ids_return_from_before_where_neither_has_a_fixed_period(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    old = write_days(tmp_path, [1], broken=0)
    prepare(config(old, {"path": str(old), "period": "train"}), out)
    table = pq.read_table(old)
    same_ids = table.set_column(table.schema.get_field_index("day"), "day", pa.array(["2026-03-02"] * len(table)))
    pq.write_table(pa.concat_tables([same_ids, pq.read_table(write_days(tmp_path, [3], broken=0))]), tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "new.parquet")
    added = prepare(config(tmp_path / "new.parquet", add=True), out)
    assert added.manifest.accounting.rules == {"returning_query": len(table)}
    assert added.manifest.accounting.groups_rejected == 40
    assert added.manifest.periods == ["2026-03-01", "2026-03-03", "train"]
    test = prepare(config({"path": str(old), "period": "test"}, add=True), out)
    assert test.manifest.accounting.rules == added.manifest.accounting.rules
    assert [row["gid"] for row in by_gid(test)] == list(range(160))


class Crash(BaseException):
    """The machine crashes: no clean-up runs."""


@pytest.mark.slow
@pytest.mark.parametrize("at", range(5))
def test_a_crash_anywhere_leaves_the_old_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The crash happens before the file with this number is placed, or before the manifest is written."""
    old = prepare(config(write_days(tmp_path, [1])), str(tmp_path / "out"))
    rows = by_gid(old)
    addition = config(write_days(tmp_path, [2, 3, 4]), add=True)
    calls = iter(range(100))

    def crash(*_: Any, **__: Any) -> None:
        if next(calls) == at:
            raise Crash
        put(*_, **__)

    with monkeypatch.context() as patch:
        put = storage.files.put
        patch.setattr(storage.files, "put", crash)
        patch.setattr(storage.Commit, "__exit__", lambda *_: None)
        patch.setattr(storage.files, "write_bytes", crash)
        with pytest.raises(Crash):
            prepare(addition, old.url)
    assert open_dataset(old.url) == old
    assert by_gid(old) == rows
    added = prepare(addition, old.url)
    assert added.manifest.periods == [f"2026-03-0{day}" for day in (1, 2, 3, 4)]
    assert by_gid(added)[: len(rows)] == rows


@pytest.mark.slow
def test_an_accounting_adds_up_after_every_addition(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    sums: list[Accounting] = []
    for day in (1, 2, 3):
        sums.append(prepare(config(write_days(tmp_path, [day], broken=day), add=True), out).manifest.accounting)
    for day, total in enumerate(sums, 1):
        assert total.rows_in == total.rows_kept + total.rows_rejected
        assert total.groups_in == total.groups_kept + total.groups_rejected
        assert total.rules == {"bad_label": day * (day + 1) // 2, "unparsable": day * (day + 1) // 2}


def test_rows_that_are_rejected_twice_are_twice_in_the_quarantine(tmp_path: Path) -> None:
    (tmp_path / "a-bad.txt").write_text("nothing\n" * 3)
    for name in ("b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"1 qid:{name} 1:1\n" * 30)
        part = [{"path": str(tmp_path / file), "period": name} for file in ("a-bad.txt", f"{name}.txt")]
        made = prepare(config(*part, source={"kind": "letor"}, unit_mb=1e-6, add=True), str(tmp_path / "out"))
    found = rejections_of(made)
    assert len(set(made.manifest.quarantine)) == 2
    assert len(found) == made.manifest.accounting.rows_rejected == 6


@pytest.mark.slow
def test_more_labels_than_are_counted_stay_uncounted(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for k, labels in enumerate((range(40), range(40, 70), range(2))):
        rows = [f"{label} qid:{k}-{label} 1:1\n" for label in labels]
        (tmp_path / f"{k}.txt").write_text("".join(rows))
        part = {"path": str(tmp_path / f"{k}.txt"), "period": f"p{k}"}
        manifest = prepare(config(part, source={"kind": "letor"}, add=True), out).manifest
        assert len(manifest.label_counts) == (40 if k == 0 else 0)


@pytest.mark.slow
def test_the_texts_of_categories_are_those_of_all_periods_until_they_are_too_many(tmp_path: Path) -> None:
    columns = {**COLUMNS, "features": ["f"], "categorical": ["city", "c"]}

    def day(number: int, cities: Sequence[str]) -> Path:
        path = tmp_path / f"{number}.parquet"
        rows = {"q": f"q{number}", "y": 1.0, "f": 0.5, "day": f"2026-03-0{number}"}
        items = [{**rows, "d": f"d{i}", "city": city, "c": f"c{i % 3}"} for i, city in enumerate(cities)]
        pq.write_table(pa.Table.from_pylist(items), path)
        return path

    def texts(path: Path, *, add: bool) -> dict[str, dict[str, int]]:
        source = {"kind": "items", "columns": columns}
        return dict(prepare(config(path, add=add, source=source), str(tmp_path / "out")).manifest.categories)

    first = texts(day(1, ["rome", "7", "berlin"]), add=False)
    assert list(first["city"]) == ["berlin", "rome"]
    assert first["city"]["berlin"] == 6113811
    second = texts(day(2, ["paris", "berlin"]), add=True)
    assert list(second["city"]) == ["berlin", "paris", "rome"]
    third = texts(day(3, [f"city {i}" for i in range(5000)]), add=True)
    assert third == {"c": second["c"]}


@pytest.mark.slow
def test_periods_may_be_added_in_another_form(tmp_path: Path) -> None:
    """A data set of lists gets a period of bytes, and one of bytes a period of lists; the groups are the same."""
    first, second = write_days(tmp_path, [1]), write_days(tmp_path, [2])
    found = {}
    for forms in (("zstd", "zstd"), ("lz4_bytes", "lz4_bytes"), ("zstd", "lz4_bytes"), ("lz4_bytes", "zstd")):
        out = str(tmp_path / "-".join(forms))
        prepare(config(first, add=True, compression=forms[0]), out)
        made = prepare(config(second, add=True, compression=forms[1]), out)
        kinds = [pq.read_schema(storage.join(out, file.path)).field("features").type for file in made.manifest.files]
        assert [pa.types.is_large_binary(kind) for kind in kinds] == [form == "lz4_bytes" for form in forms]
        assert made.manifest.version == (2 if "lz4_bytes" in forms else 1)
        row_groups = select(Split(data=(out,)), labelled=False).row_groups
        rows = pa.concat_tables(read_direct(row_groups, ["gid", "query_id", "doc_ids", "features", "labels"]))
        found[forms] = repr((rows.to_pylist(), made.manifest.summaries))  # NaN is not NaN
    assert len({*found.values()}) == 1
