"""Relabelled data sets: columns kept, counts, and labels that do not depend on the layout of files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from preparing import prepare

from ltrscale import storage
from ltrscale.config import load, validate
from ltrscale.data.dataset import writer
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.derive import relabel as module
from ltrscale.derive import rewrite
from ltrscale.derive.relabel import RelabelConfig, RelabelJob
from ltrscale.errors import InputError
from ltrscale.ingest.inputs import PrepareConfig

Write = Callable[..., str]
Apply = Callable[..., str]
Rows = Callable[[str], list[dict[str, Any]]]

IMPLICIT = {"kind": "implicit_feedback", "documents": 3, "copies": 2}
CLICKS = {"kind": "clicks", "ranking": "random"}


def graded(n_groups: int, *, periods: Sequence[str] = ("all",), **more: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Groups of 1 to 8 documents with grades 0 to 4; every fifth has none. The third feature numbers all documents."""
    rng = np.random.default_rng(0)
    rows, first = [], 0
    for q in range(n_groups):
        n = int(rng.integers(1, 9))
        x = rng.normal(size=(n, 3)).astype(np.float32)
        x[:, 2] = np.arange(first, first + n)
        first += n
        labels = None if q % 5 == 4 else rng.integers(0, 5, n).tolist()
        row = {"features": x.tolist(), "labels": labels, "period": periods[q % len(periods)]}
        rows.append({**row, **{name: make(q) for name, make in more.items()}})
    return rows


def by_query(rows: list[dict[str, Any]], *leave_out: str) -> dict[str, str]:
    """The content of each group as text, where NaN equals itself."""
    return {row["query_id"]: repr({k: row[k] for k in sorted(row) if k not in leave_out}) for row in rows}


ALL_STEPS = [
    {"kind": "relevant_only"},
    {"kind": "min_docs", "documents": 2},
    IMPLICIT,
    {"kind": "labelled_fraction", "fraction": 0.7},
    {"kind": "binary_feedback", "tau": 1, "unlabel_empty": False},
    {**CLICKS, "max_relevance": 1},
    {"kind": "click_ratio_weights", "depth": 1},
    {"kind": "random_negatives", "extra": 2},
    {"kind": "refine", "feature": "bm25", "scale": "none"},
]


@pytest.mark.slow
@pytest.mark.parametrize("upto", range(1, len(ALL_STEPS) + 1))
def test_counts_add_up_after_every_step(write: Write, apply: Apply, rows_of: Rows, upto: int) -> None:
    source = write(graded(80, periods=("a", "b")))
    url = apply(source, *ALL_STEPS[:upto])
    manifest, rows = open_dataset(url).manifest, rows_of(url)
    assert sorted(row["gid"] for row in rows) == list(range(len(rows)))
    assert len({row["query_id"] for row in rows}) == len(rows)
    counts = manifest.counts()
    assert counts == (len(rows), sum(len(r["features"]) for r in rows), sum(r["labels"] is not None for r in rows))
    assert manifest.files.longest == max(len(row["features"]) for row in rows)
    values, documents = np.unique([y for row in rows for y in row["labels"] or ()], return_counts=True)
    if manifest.label_counts:
        assert list(manifest.label_counts.values()) == documents.tolist()
        assert list(map(float, manifest.label_counts)) == values.tolist()
    a = manifest.accounting
    assert (a.rows_kept, a.groups_kept) == (counts.documents, counts.groups)
    assert (a.rows_in, a.groups_in) == (a.rows_kept + a.rows_rejected, a.groups_kept + a.groups_rejected)
    here = open_dataset(source).manifest.counts()
    groups, docs = here.groups, here.documents
    for number, step in enumerate(ALL_STEPS[:upto]):
        done = {
            key.split(": ")[1]: n for key, n in a.rules.items() if key.startswith(f"steps.{number} ({step['kind']})")
        }
        assert (done["groups read"], done["documents read"]) == (groups, docs)
        groups += done["groups added"] - done["groups dropped"]
        docs += done["documents added"] - done["documents dropped"]
    assert (groups, docs) == (counts.groups, counts.documents)
    x = np.concatenate([row["features"] for row in rows])
    for feature, summary in enumerate(manifest.summaries):
        assert summary.mean == pytest.approx(x[:, feature].mean(), abs=1e-5)


@pytest.mark.slow
def test_relevance_is_the_first_label_where_there_is_a_label(write: Write, apply: Apply, rows_of: Rows) -> None:
    source = write(graded(60, periods=("a", "b")))
    first = {row["features"][0][2]: row["labels"] for row in rows_of(source)}
    once = apply(source, {"kind": "binary_feedback", "tau": 2, "periods": "a"})
    twice = apply(once, {"kind": "labelled_fraction", "fraction": 0.5}, {**CLICKS, "max_relevance": 4})
    for url in (once, twice):
        for row in rows_of(url):
            expected = first[row["features"][0][2]] if row["labels"] else None
            assert row["relevance"] == expected
    assert {y for row in rows_of(once) if row["period"] == "a" for y in row["labels"] or ()} == {0, 1}
    assert all(row["labels"] == row["relevance"] for row in rows_of(once) if row["period"] == "b")


@pytest.mark.slow
def test_a_step_leaves_everything_else_unchanged(write: Write, apply: Apply, rows_of: Rows) -> None:
    more = {
        "doc_ids": lambda q: None if q % 3 == 0 else [f"d{q}", *[None] * 20],
        "positions": lambda q: None if q % 4 == 0 else [7.0, *[float("nan")] * 20],
        "meta_user": lambda q: f"user {q}",
        "meta_age": lambda q: None if q % 2 else q,
    }
    rows = graded(50, periods=("b", "a"), **more)
    for row in rows:
        for name in ("doc_ids", "positions"):
            row[name] = row[name] and row[name][: len(row["features"])]
    source = write(rows)
    url = apply(source, {"kind": "binary_feedback", "tau": 2, "periods": "a"})
    before, after = rows_of(source), rows_of(url)
    assert by_query(after, "labels", "relevance") == by_query(before, "labels")
    assert [row["gid"] for row in after] == [row["gid"] for row in before]  # no step adds or drops groups
    assert any(row["labels"] for row in after if row["period"] == "a")
    sampled = apply(source, IMPLICIT)
    users = {row["query_id"]: row["meta_user"] for row in before}
    assert all(users[row["query_id"].partition("#")[0]] == row["meta_user"] for row in rows_of(sampled))


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [IMPLICIT, CLICKS, {"kind": "binary_feedback", "tau": 2}, {"kind": "labelled_fraction", "fraction": 0.3}]
)
def test_features_ids_and_relevance_move_together(
    write: Write, apply: Apply, rows_of: Rows, step: Mapping[str, Any]
) -> None:
    rows = graded(40)
    for q, row in enumerate(rows):
        row["doc_ids"] = [f"{q}-{i}" for i in range(len(row["features"]))]
    source = write(rows)
    known = {
        d: (x, None if row["labels"] is None else y)
        for row in rows_of(source)
        for d, x, y in zip(row["doc_ids"], row["features"], row["labels"] or row["doc_ids"], strict=True)
    }
    for row in rows_of(apply(source, step)):
        for i, document in enumerate(row["doc_ids"]):
            features, relevance = known[document]
            assert row["features"][i] == features
            if row["labels"] is not None:
                assert row["relevance"][i] == relevance


@pytest.mark.slow
@pytest.mark.parametrize("steps", [ALL_STEPS, ALL_STEPS[4:]], ids=["all", "keeping groups"])
def test_the_layout_of_files_changes_nothing(
    write: Write, apply: Apply, rows_of: Rows, monkeypatch: pytest.MonkeyPatch, steps: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(rewrite, "_BLOCK_DOCUMENTS", 60)
    rows = graded(90, periods=("a", "b"))
    given = [{**steps[0], "max_relevance": 4}, *steps[1:]] if steps[0]["kind"] == "clicks" else steps
    one = apply(write(rows), *given)
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 100)
    monkeypatch.setattr(writer, "FILE_BYTES", 100)
    small_files = apply(write(rows, row_group_bytes=200, file_bytes=1), *given)
    assert len(open_dataset(small_files).manifest.files) > 4
    assert by_query(rows_of(small_files)) == by_query(rows_of(one))


def test_labels_of_a_group_do_not_depend_on_the_order_of_groups(write: Write, apply: Apply, rows_of: Rows) -> None:
    """Draws depend on the gid: the same rows with their gids in another file order get the same labels."""
    rows = [{**row, "gid": q, "query_id": f"q{q}"} for q, row in enumerate(graded(40))]
    steps = [{"kind": "labelled_fraction", "fraction": 0.5}, {**CLICKS}]
    forward, backward = (apply(write(order), *steps) for order in (rows, rows[::-1]))
    assert by_query(rows_of(forward)) == by_query(rows_of(backward))


@pytest.mark.slow
def test_seed_and_number_of_a_step_change_its_draws(write: Write, apply: Apply, rows_of: Rows) -> None:
    source = write(graded(60))
    binary = {"kind": "binary_feedback", "tau": 2, "unlabel_empty": False}

    def labels(*steps: dict[str, Any], seed: int = 0) -> list[Any]:
        return [row["labels"] for row in rows_of(apply(source, *steps, seed=seed))]

    assert labels(binary) == labels(binary)
    assert labels(binary) != labels(binary, seed=1)
    harmless = {"kind": "labelled_fraction", "fraction": 1.0}
    assert labels(harmless) == [row["labels"] for row in rows_of(source)]
    assert labels(harmless, binary) != labels(binary)


def test_steps_run_in_the_order_given(write: Write, apply: Apply, rows_of: Rows) -> None:
    source = write(graded(60))
    binary = {"kind": "binary_feedback", "tau": 3.5, "sharpness": 1000}
    dropped_before = rows_of(apply(source, {"kind": "relevant_only"}, binary))
    dropped_after = rows_of(apply(source, {**binary, "unlabel_empty": False}, {"kind": "relevant_only"}))
    best = [max(row["labels"], default=0) for row in graded(60) if row["labels"]]
    assert len(dropped_before) == 12 + sum(y > 0 for y in best)
    assert len(dropped_after) == 12 + sum(y == 4 for y in best)


@pytest.mark.slow
def test_the_labelled_fraction_is_of_all_periods_together(write: Write, apply: Apply, rows_of: Rows) -> None:
    source = write(graded(100, periods=("a", "b", "c")))
    url = apply(source, {"kind": "labelled_fraction", "fraction": 0.25, "periods": ["a", "c"]})
    before, after = (
        [
            sum(row["labels"] is not None and row["period"] in periods for row in rows_of(data))
            for periods in ("ac", "b")
        ]
        for data in (source, url)
    )
    assert after == [round(0.25 * before[0]), before[1]]
    first = apply(source, {"kind": "labelled_fraction", "fraction": 0.25, "sample": "first"})
    labelled = [row["gid"] for row in rows_of(first) if row["labels"] is not None]
    assert sorted(labelled) == [q for q in range(100) if q % 5 != 4][:20]


@pytest.mark.slow
def test_short_lists_are_dropped_counted_and_leave_gids_without_gaps(write: Write, apply: Apply, rows_of: Rows) -> None:
    rows = graded(100, periods=("a", "b"))
    long = {q for q, row in enumerate(rows) if len(row["features"]) >= 5 or row["period"] == "b"}
    some_relevant = {q for q, row in enumerate(rows) if row["labels"] is None or any(row["labels"])}
    short, relevant = {"kind": "min_docs", "documents": 5, "periods": "a"}, {"kind": "relevant_only"}
    source = write(rows)
    one, other = (apply(source, *steps) for steps in ((relevant, short), (short, relevant)))
    for url in (one, other):
        found = rows_of(url)
        assert {row["query_id"] for row in found} == {f"q{q}" for q in long & some_relevant}
        assert sorted(row["gid"] for row in found) == list(range(len(found)))
        accounting = open_dataset(url).manifest.accounting
        assert accounting is not None
        assert (accounting.groups_in, accounting.groups_kept) == (100, len(found))
        assert accounting.rows_kept == sum(len(row["features"]) for row in found)
    rules = open_dataset(other).manifest.accounting.rules
    assert rules["steps.0 (min_docs): groups dropped"] == 100 - len(long)


@pytest.mark.slow
def test_groups_stay_different_when_lists_are_sampled_twice(write: Write, apply: Apply) -> None:
    """Draws depend on the key, so the size of a sample shows whether two groups share a key."""
    source = write(graded(20, periods=("a", "b")))
    again = {**IMPLICIT, "max_relevance": 4}
    sampled = apply(source, {**IMPLICIT, "periods": "a"}, again, again)
    labelled = 8 * 2 * 4 + 8 * 4
    assert open_dataset(sampled).manifest.counts().labelled == labelled
    for fraction in (0.1, 0.3, 0.5, 0.7, 0.9):
        hide = {"kind": "labelled_fraction", "fraction": fraction}
        url = apply(source, {**IMPLICIT, "periods": "a"}, again, again, hide)
        assert open_dataset(url).manifest.counts().labelled == round(fraction * labelled)


@pytest.mark.slow
def test_a_stream_serves_the_new_labels_weights_and_positions(write: Write, apply: Apply) -> None:
    weights = {"kind": "click_ratio_weights", "depth": 2}
    url = apply(write(graded(60)), {**CLICKS, "user": {"kind": "pbm", "eta": 0.5}}, weights)
    selection = select(Split(data=(url,)), labelled=True)
    for groups in iterate(selection, docs_per_batch=64):
        labels_N, weights_N, positions_N = groups.labels_N, groups.weights_N, groups.positions_N
        assert labels_N is not None
        assert weights_N is not None
        assert positions_N is not None
        assert set(labels_N.tolist()) <= {0, 1}
        assert (weights_N[positions_N == 1] == 1).all()
        assert len(weights_N[positions_N > 1].unique()) == 1
    graded_too = select(Split(data=(url,), labels="relevance"), labelled=True)
    grades = torch.cat([groups.labels_N for groups in iterate(graded_too) if groups.labels_N is not None])
    assert sorted(grades.tolist()) == sorted(y for row in graded(60) for y in row["labels"] or ())


def test_click_ratios_are_taken_before_documents_are_replaced() -> None:
    negatives, weights = {"kind": "random_negatives"}, {"kind": "click_ratio_weights"}
    load(RelabelConfig, overrides=[f"steps={[CLICKS, weights, negatives]}"])
    load(RelabelConfig, overrides=[f"steps={[CLICKS, {**negatives, 'replace_unseen': 'false'}, weights]}"])
    with pytest.raises(InputError, match="put click_ratio_weights before it"):
        load(RelabelConfig, overrides=[f"steps={[CLICKS, negatives, weights]}"])


ERRORS = [
    ([{"kind": "refine", "feature": "bm24"}], "no feature 'bm24'; the nearest name is 'bm25'"),
    ([{"kind": "refine", "feature": "age"}], "steps.0 (refine): the manifest has no standard deviation of feature"),
    ([{"kind": "clicks"}], "steps.0 (clicks): query q0 of period a has no positions; prepare it with positions"),
    ([{"kind": "click_ratio_weights"}], "steps.0 (click_ratio_weights): query q0 of period a has no positions"),
    ([{"kind": "random_negatives"}], "steps.0 (random_negatives): query q0 of period a has no positions"),
    ([{"kind": "binary_feedback", "tau": 50}], "steps.0 (binary_feedback): none of 16 labelled groups has labels"),
    ([{**IMPLICIT, "max_relevance": 2}], "is above max_relevance 2; raise it"),
    ([CLICKS, {"kind": "relevant_only", "periods": "x"}], "there is no period 'x'; it has a, b"),
    ([{"kind": "min_docs", "documents": 9}], "steps.0 (min_docs): none of 16 labelled groups has labels afterwards"),
    ([{"kind": "binary_feedback", "periods": "b"}], "steps.0 (binary_feedback): no group of its periods has labels"),
    ([{"kind": "labelled_fraction", "fraction": 1, "periods": "b"}], "steps.0 (labelled_fraction): no group of its"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "message"), ERRORS)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(
    write: Write, tmp_path: Path, steps: list[dict[str, Any]], message: str
) -> None:
    rows = graded(20)
    for row in rows:
        row["period"] = "a" if row["labels"] else "b"
    out = str(tmp_path / "out")
    config = RelabelConfig.model_validate({"steps": steps})
    with pytest.raises(InputError) as error:
        RelabelJob(relabel=config, data=write(rows), out=out).work({}, lambda _: None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert storage.read_manifest(out) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


BINARY = {"kind": "binary_feedback", "tau": 2}


def job(data: str, out: Path | str, *steps: dict[str, Any], **settings: Any) -> RelabelJob:
    return validate(RelabelJob, {"data": data, "out": str(out), "relabel": {"steps": steps, **settings}}, "test")


@pytest.mark.slow
def test_the_same_again_does_nothing_and_another_seed_replaces(synthetic_dataset: str, tmp_path: Path) -> None:
    first = job(synthetic_dataset, tmp_path / "out", BINARY)
    first.run()
    manifest = tmp_path / "out" / "manifest.json"
    stamp, content = manifest.stat().st_mtime_ns, manifest.read_text()
    first.run()
    assert manifest.stat().st_mtime_ns == stamp
    origin = json.loads(content)["made_by"]
    assert (origin["stage"], origin["config"]["seed"]) == ("relabel", 0)
    assert origin["inputs"] == {synthetic_dataset: open_dataset(synthetic_dataset).manifest.hash}
    job(synthetic_dataset, tmp_path / "out", BINARY, seed=1).run()
    assert open_dataset(str(tmp_path / "out")).manifest.hash != json.loads(content)
    listed = {file.path for file in open_dataset(str(tmp_path / "out")).manifest.files}
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.parquet")} == listed


def test_metrics_report_what_each_step_did(synthetic_dataset: str, tmp_path: Path) -> None:
    job(synthetic_dataset, tmp_path / "out", {"kind": "relevant_only"}, BINARY).run()
    records = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = open_dataset(synthetic_dataset).manifest.counts()
    assert [record["step"] for record in records] == ["steps.0 (relevant_only)", "steps.1 (binary_feedback)"]
    assert records[0]["groups_read"] == counts.groups
    assert records[1]["groups_read"] == counts.groups - records[0]["groups_dropped"]
    assert records[0]["groups_dropped"] > 0


@pytest.mark.slow
def test_stopped_half_way_leaves_the_old_data_set(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(synthetic_dataset, tmp_path / "out", BINARY).run()
    before = open_dataset(str(tmp_path / "out")).manifest

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_check", stop)
    with pytest.raises(KeyboardInterrupt):
        job(synthetic_dataset, tmp_path / "out", BINARY, seed=1).run()
    assert open_dataset(str(tmp_path / "out")).manifest == before
    assert all(storage.exists(storage.join(str(tmp_path / "out"), file.path)) for file in before.files)


def test_a_data_set_is_not_replaced_by_mistake(synthetic_dataset: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="out is the data set itself; choose another directory"):
        job(synthetic_dataset, synthetic_dataset + "/.", BINARY).run()
    columns = {"query": "query_id", "label": "label", "features": ["f_*"]}
    prepare(
        validate(
            PrepareConfig,
            {
                "inputs": f"{synthetic_dataset}/../log/*/*.parquet",
                "source": {"kind": "items", "columns": columns},
            },
            "test",
        ),
        str(tmp_path / "other"),
    )
    with pytest.raises(InputError, match="the output of prepare is there, which relabel would delete"):
        job(synthetic_dataset, tmp_path / "other", BINARY).run()


@pytest.mark.slow
def test_the_public_settings_on_mq2008(shared_data: Path, tmp_path: Path) -> None:
    """BUYL23's and HOU24's simulations on the whole collection: shares of labels are those of the formulas."""
    fold = shared_data / "letor" / "MQ2008" / "Fold1"
    inputs = [{"path": str(fold / f"{name}.txt.gz"), "period": name} for name in ("train", "vali", "test")]
    source = {"kind": "letor", "n_features": 46}
    data = str(tmp_path / "data")
    prepare(validate(PrepareConfig, {"inputs": inputs, "source": source}, "test"), data)
    grades = np.concatenate(labels_of(data, "labels", "train", "vali", "test"))

    job(data, tmp_path / "implicit", {"kind": "implicit_feedback"}).run()
    manifest = open_dataset(str(tmp_path / "implicit")).manifest
    assert manifest.counts().groups == manifest.counts().labelled == 7840
    assert manifest.files.longest == 16
    lists = labels_of(str(tmp_path / "implicit"), "labels", "train", "vali", "test")
    best = np.array([max(r) for r in labels_of(str(tmp_path / "implicit"), "relevance", "train", "vali", "test")])
    top = np.array([max(y) for y in lists])
    assert not top[best == 0].any()  # rho(0) = 0: nobody acts
    bought = (top[best == 2] == 2).mean()
    assert 0.08 < bought <= 0.12  # kappa = .1, and the best document is always bought

    binary = {"kind": "binary_feedback", "tau": 1.5, "periods": ["train", "vali"], "unlabel_empty": False}
    job(data, tmp_path / "binary", binary).run()
    y = np.concatenate(labels_of(str(tmp_path / "binary"), "labels", "train", "vali"))
    r = np.concatenate(labels_of(str(tmp_path / "binary"), "relevance", "train", "vali"))
    for grade in (0, 1, 2):
        expected, n = 1 / (1 + np.exp(-4 * (grade - 1.5))), (r == grade).sum()
        assert abs(y[r == grade].mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / n)
    test = np.concatenate(labels_of(str(tmp_path / "binary"), "labels", "test"))
    assert sorted([*r.tolist(), *test.tolist()]) == sorted(grades.tolist())


def labels_of(url: str, column: str, *periods: str) -> list[list[float]]:
    """A column's lists in some periods."""
    files = [file.path for file in open_dataset(url).manifest.files if file.period in periods]
    return [y for path in files for y in pq.ParquetFile(f"{url}/{path}").read().column(column).to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["original there", "original gone"])
def test_a_relabelled_period_is_not_tested_under_its_old_labels(
    synthetic_dataset: str, tmp_path: Path, kept: bool
) -> None:
    middle, last = tmp_path / "middle", tmp_path / "last"
    job(synthetic_dataset, middle, BINARY).run()
    job(str(middle), last, {"kind": "labelled_fraction", "fraction": 0.5}).run()
    original = synthetic_dataset if kept else str(middle)
    parts = {
        "train": {"data": str(last), "periods": "2026-W01"},
        "validation": {"data": str(last), "periods": "2026-W02"},
        "test": {"data": original, "periods": "2026-W01"},
    }
    if not kept:
        manifest = json.loads((middle / "manifest.json").read_text())
        manifest["made_by"]["inputs"] = {str(tmp_path / "gone"): "a hash"}
        (middle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="train and test both take period '2026-W01'"):
        check_disjoint(validate(Splits, parts, "test"))
    parts["test"]["periods"] = "2026-W03"
    check_disjoint(validate(Splits, parts, "test"))
