"""The mistakes that people make most, and the remedies that messages name: each remedy is applied, and helps."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from command_lines import run_here
from labelled_groups import WriteDataset
from preparing import prepare

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.api.estimator import Ranker
from ltrscale.bundle import load
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.errors import InputError
from ltrscale.evaluation.measure.evaluate_job import EvaluateJob
from ltrscale.experiments.auto.auto import AutoJob
from ltrscale.experiments.pipeline import PipelineJob
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob, RowsJob
from ltrscale.training.pretrain import PretrainJob
from ltrscale.training.untrained import FeatureJob
from ltrscale.trees.gbdt import GBDTJob

ROOT = Path(__file__).resolve().parents[1]
HEADER = ["time", "search", "product", "price", "sold"]
COLUMNS = {"query": "search", "item": "product", "label": "sold", "time": "time", "features": ["price"]}
WEEKS = {"train": "2026-W01", "validation": "2026-W02", "test": "2026-W03"}


def rows(searches: int = 40) -> list[list[str]]:
    """A shop's log, ordered by search."""
    return [
        [f"2026-02-{1 + s % 7:02} 10:00:00", f"s{s}", f"p{p}", f"{s + p}.5", str((s + p) % 2)]
        for s in range(searches)
        for p in range(4)
    ]


def write(path: Path, lines: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return str(path)


def settings(path: str, *overrides: str) -> PrepareConfig:
    """The config of a job as the command line makes it."""
    values = [f"prepare={{inputs: [{path}], source: {{kind: items, columns: {COLUMNS}}}}}", "out=x", *overrides]
    return configs.load(PrepareJob, overrides=values).prepare


def refused(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(InputError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def suggested(message: str, pattern: str = r"([\w.]+=\w+)") -> str:
    """The `key=value` that a message suggests."""
    found = re.search(pattern, message)
    assert found, message
    return found[1]


@pytest.mark.slow
def test_an_unsorted_log_names_the_setting_that_sorts(tmp_path: Path) -> None:
    log = rows()
    np.random.default_rng(0).shuffle(log)
    path, out = write(tmp_path / "log.csv", log), str(tmp_path / "out")
    message = refused(prepare, settings(path), out)
    assert "returning_query" in message
    assert "query s" in message
    assert suggested(message) == "prepare.sort=true"
    assert prepare(settings(path, suggested(message)), out).manifest.counts().documents == 160
    log[3][HEADER.index("price")] = "?"
    message = refused(prepare, settings(write(tmp_path / "bad.csv", log), "prepare.sort=true"), str(tmp_path / "bad"))
    assert "prepare.sort" not in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({0: ("price", "cheap")}, ["unparsable 1", "column 'price' is not a number ('cheap')"]),
        ({1: ("time", "soon")}, ["unparsable 1", "column 'time' is not a time stamp ('soon')"]),
        ({2: ("sold", "-3"), 9: ("sold", "")}, ["bad_label 2", "(label -3)", "(no label)"]),
        ({3: ("price", "1e99")}, ["infinite 1", "(price inf)"]),
        ({5: ("product", "p0")}, ["duplicate_document 1", "(document p0)"]),
        ({5: ("product", "p0"), 8: ("sold", "-1")}, ["bad_label 1, duplicate_document 1"]),
    ],
    ids=["number", "time", "label", "infinite", "duplicate", "two rules"],
)
def test_a_rejection_shows_the_value_and_counts_by_rule(
    tmp_path: Path, changes: Mapping[int, tuple[str, str]], said: Sequence[str]
) -> None:
    log = rows()
    for row, (column, value) in changes.items():
        log[row][HEADER.index(column)] = value
    out = tmp_path / "out"
    message = refused(prepare, settings(write(tmp_path / "log.csv", log)), str(out))
    assert all(text in message for text in said), message
    (quarantine,) = (out / "quarantine").iterdir()
    found = pq.read_table(quarantine)["found"].to_pylist()
    assert len(found) == len(changes)
    assert all(f"({text})" in message for text in found)


def test_a_rejection_names_the_key_that_accepts_it(tmp_path: Path) -> None:
    log = rows()
    log[0][HEADER.index("price")] = "cheap"
    path, out = write(tmp_path / "log.csv", log), str(tmp_path / "out")
    key = suggested(refused(prepare, settings(path), out), r"mend the input or raise (\S+)$")
    assert prepare(settings(path, f"{key}=0.01"), out).manifest.counts().documents == 159


def test_a_value_without_a_grade_is_named(tmp_path: Path) -> None:
    log = [[*row[:-1], ("view", "cart", "wishlist")[i % 3]] for i, row in enumerate(rows())]
    graded = settings(
        write(tmp_path / "log.csv", log), "prepare.source.columns.grades={view: 0, cart: 1}", "prepare.max_rejected=1"
    )
    assert prepare(graded, str(tmp_path / "out")).manifest.accounting.rules == {"bad_label": 53}
    (quarantine,) = (tmp_path / "out" / "quarantine").iterdir()
    said = "'wishlist' has no grade (view, cart have one)"
    assert set(pq.read_table(quarantine)["found"].to_pylist()) == {said}
    assert f"bad_label ({said})" in refused(prepare, graded.replace(max_rejected=0.1), str(tmp_path / "refused"))


def test_too_long_a_group_shows_its_length(tmp_path: Path) -> None:
    message = refused(
        prepare, settings(write(tmp_path / "log.csv", rows(2)), "prepare.max_group=3"), str(tmp_path / "out")
    )
    assert "group_too_long 8" in message
    assert "(4 documents)" in message


def test_new_data_without_labels_name_the_key_to_unset(tmp_path: Path) -> None:
    path = write(tmp_path / "new.csv", [row[:-1] for row in rows()], HEADER[:-1])
    message = refused(prepare, settings(path), str(tmp_path / "out"))
    assert "no column 'sold' (label)" in message
    key = suggested(message, r"set (\S+) to null")
    manifest = prepare(settings(path, f"{key}=null"), str(tmp_path / "out")).manifest
    assert (manifest.counts().documents, manifest.counts().labelled) == (160, 0)


def test_an_unknown_period_names_the_key_and_the_range(synthetic_dataset: str, tmp_path: Path) -> None:
    splits = {name: {"data": synthetic_dataset, "periods": weeks} for name, weeks in WEEKS.items()}
    splits["validation"]["periods"] = "2026-W1"
    job = GBDTJob.model_validate({"out": str(tmp_path / "out"), "splits": splits})
    message = refused(job.run)
    assert message.startswith("splits.validation.periods: ")
    assert "there is no period '2026-W1'; the nearest is '2026-W" in message
    assert all(week in message for week in ("2026-W01", "2026-W04"))
    job = PretrainJob.model_validate({"out": str(tmp_path / "out"), "train": splits["validation"]})
    assert refused(job.run).startswith("train.periods: ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["gbdt.num_leafs=8"], "gbdt.num_leafs: unknown key; did you mean 'gbdt.num_leaves'?"),
        (["gbdt.kind=catboost", "gbdt.dept=8"], "gbdt.dept: unknown key; did you mean 'gbdt.depth'?"),
        (["gbdt.kind=catboost", "gbdt.max_bin=8"], "gbdt.max_bin: a key of kind lightgbm, xgboost, and gbdt.kind is"),
        (["splits.train.period=x"], "splits.train.period: unknown key; did you mean 'splits.train.periods'?"),
    ],
)
def test_an_unknown_key_is_shown_as_typed(overrides: list[str], said: str) -> None:
    splits = "splits={train: {data: d}, validation: {data: d}, test: {data: d}}"
    assert said in refused(configs.load, GBDTJob, (), ["out=x", splits, *overrides])


OF_CHOICES: list[tuple[type[configs.Config], str, list[str]]] = [
    (AutoJob, "budget=-1", ["budget: Input should be 'quick', 'good' or 'best'", "budget: Input should be greater"]),
    (GBDTJob, "gbdt.kind=lightgmb", ["gbdt: kind 'lightgmb' is unknown; did you mean 'lightgbm'?"]),
    (
        GBDTJob,
        "gbdt.targets={grades: 3}",
        ["gbdt.targets: has no kind; set gbdt.targets.kind to one of standardised, q"],
    ),
    (GBDTJob, "gbdt.targets=3", ["gbdt.targets: Input should be a mapping of keys to values (given 3)"]),
    (
        GBDTJob,
        "gbdt.label_gain=[-1]",
        ["gbdt.label_gain: Input should be 'expon", "gbdt.label_gain.0: Input should be g"],
    ),
    (PrepareJob, "prepare={source: {columns: {}}}", ["prepare.source: has no kind; set prepare.source.kind to one of"]),
    (
        PrepareJob,
        "prepare={source: {kind: items, columns: {query: q, fill: {a: mean}}}}",
        ["prepare.source.columns.fill.a: Input should be 'median'", "columns.fill.a: Input should be a valid number"],
    ),
]


@pytest.mark.parametrize(("cls", "override", "said"), OF_CHOICES, ids=[override for _, override, _ in OF_CHOICES])
def test_a_wrong_choice_is_shown_without_the_words_of_the_library_that_checks(
    cls: type[configs.Config], override: str, said: list[str]
) -> None:
    message = refused(configs.load, cls, (), ["out=x", override])
    assert [text for text in said if text not in message] == []
    assert not re.search(r"constrained|literal\[|tag|discriminator|extract|dict\[|tuple\[", message)


def test_an_unknown_key_of_a_method_is_shown_as_typed() -> None:
    methods = "methods={gbdt: {kind: gbdt, gbdt: {num_leafs: 8}}, net: {kind: neural, finetune: {head: {layer: 1}}}}"
    splits = "splits={train: {}, validation: {}, test: {}}"
    message = refused(configs.load, PipelineJob, (), ["out=x", "data=d", splits, methods])
    assert "methods.gbdt.gbdt.num_leafs: unknown key; did you mean 'methods.gbdt.gbdt.num_leaves'?" in message
    assert "methods.net.finetune.head.layer: unknown key; did you mean 'methods.net.finetune.head.layers'?" in message


def unlabelled_weeks(write_dataset: WriteDataset, *zero: str) -> str:
    """A data set of three weeks; in those of the splits `zero` no document is relevant."""
    rng, weeks = np.random.default_rng(0), {}
    for name, week in WEEKS.items():
        labels = [np.zeros(5) if name in zero else rng.permutation(5) % 3 for _ in range(20)]
        weeks[week] = [(rng.normal(size=(5, 2)).astype(np.float32), y.astype(np.float32)) for y in labels]
    return write_dataset(weeks, [Feature(name="a"), Feature(name="b")])


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False])
def test_labels_that_are_all_zero_are_a_warning_when_a_log_is_prepared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zero: bool
) -> None:
    log = [[*row[:-1], "0"] if zero else row for row in rows()]
    prepare(settings(write(tmp_path / "log.csv", log)), str(tmp_path / "out"))
    letor = tmp_path / "log.txt"
    letor.write_text("".join(f"{0 if zero else i % 2} qid:{i // 2} 1:{i}\n" for i in range(18)))
    text = PrepareConfig.model_validate({"inputs": str(letor), "source": {"kind": "letor"}})
    prepare(text, str(tmp_path / "letor"))
    prepare(text, str(tmp_path / "scored"), job=RowsJob)  # such text has some label in any case
    wrong = "labelled groups are 0, so there is nothing to learn or to choose by; check"
    assert [text for text in caplog.messages if "nothing to learn" in text] == zero * [
        f"prepare: {tmp_path}/out: all labels of its 40 {wrong} column 'sold', which prepare takes as the label, "
        "and the query",
        f"prepare: {tmp_path}/letor: all labels of its 9 {wrong} the labels and the query",
    ]


ROW_ID = "has one document, as where the query is the id of a row, so there is nothing to learn or to choose by; check"
EQUAL = "have one label, so there is nothing to learn or to choose by; check"


@pytest.mark.slow
@pytest.mark.parametrize(("query", "said"), [("row", f"each of its 24 labelled groups {ROW_ID}"), ("shelf", EQUAL)])
def test_lists_that_teach_no_order_are_named_before_anything_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, query: str, said: str
) -> None:
    """A row's own number as the query, and one whose rows all have its label."""
    header = ["row", "shelf", "price", "sold", "week"]
    rows = [[f"{week}{i}", f"{week}{i // 12}", f"{i % 5}.5", str(i // 12), week] for week in "abc" for i in range(24)]
    columns = {"query": query, "features": ["price"], "label": "sold", "period_column": "week"}
    source = {"kind": "items", "columns": columns}
    log = {"inputs": write(tmp_path / "log.csv", rows, header), "source": source}
    prepare(PrepareConfig.model_validate(log), data := str(tmp_path / "data"))
    assert [message for message in caplog.messages if said.replace("24", "72") in message]
    splits = {name: {"data": data, "periods": week} for name, week in zip(("train", "validation"), "ab", strict=True)}
    messages = [
        refused(GBDTJob.model_validate({"out": str(tmp_path / kind), "splits": splits, "gbdt": {"kind": kind}}).run)
        for kind in ("lightgbm", "xgboost", "catboost")
    ]
    methods = {"network": {"kind": "neural", "pretrain": {}}}
    tested = {name: {"periods": week} for name, week in zip(("train", "validation", "test"), "abc", strict=True)}
    rest = {"data": data, "splits": tested, "evaluate": {"baseline": None}}
    pipeline = {"out": str(tmp_path / "p"), "methods": methods, **rest}
    messages.append(refused(PipelineJob.model_validate(pipeline).run))
    assert not (tmp_path / "p" / "seed-0").exists()
    frame = pd.DataFrame(rows, columns=header).astype({"price": float, "sold": int})
    messages.append(refused(partial(Ranker("neural").fit, frame, query=query, label="sold", features=["price"])))
    said = said.removeprefix("each of its 24 labelled groups ")
    assert [message for message in messages if not message.startswith("train: ") or said not in message] == []


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["train", "validation"])
@pytest.mark.parametrize("name", ["trees", "network"])
def test_labels_that_are_all_zero_end_a_pipeline_before_training(
    write_dataset: WriteDataset, tmp_path: Path, zero: str, name: str
) -> None:
    data, out = unlabelled_weeks(write_dataset, zero), tmp_path / "out"
    methods: dict[str, Any] = {"trees": {"kind": "gbdt"}, "network": {"kind": "neural", "pretrain": {}}}
    config = {
        "out": str(out),
        "data": data,
        "splits": {split: {"periods": week} for split, week in WEEKS.items()},
        "methods": {name: methods[name]},
        "evaluate": {"baseline": None},
    }
    message = refused(PipelineJob.run, PipelineJob.model_validate(config))
    assert message.startswith(f"{zero}: all labels of its 20 labelled groups are 0")
    assert not (out / "seed-0").exists()


@pytest.mark.parametrize("zero", ["train", "validation"])
def test_labels_that_are_all_zero_end_a_job_before_training(
    write_dataset: WriteDataset, tmp_path: Path, zero: str
) -> None:
    data = unlabelled_weeks(write_dataset, zero)
    splits = {split: {"data": data, "periods": week} for split, week in WEEKS.items()}
    job = GBDTJob.model_validate({"out": str(tmp_path / "out"), "splits": splits})
    assert refused(job.run).startswith(f"{zero}: all labels of its 20 labelled groups are 0")
    assert "tree" not in (tmp_path / "out" / "run" / "metrics.jsonl").read_text()


def test_features_that_are_left_aside_on_purpose_are_no_message(
    write_dataset: WriteDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ltrscale")
    data, out = unlabelled_weeks(write_dataset), str(tmp_path / "order")
    splits = {split: {"data": data, "periods": week} for split, week in WEEKS.items()}
    FeatureJob.model_validate({"out": out, "splits": splits, "order": {"feature": "b"}}).run()
    test = select(Split(data=(data,)), labelled=False)
    load(out).scorer(features=test.features)
    assert not [message for message in caplog.messages if "does not read" in message]
    test.serving(test.features[1:], whose="the first data set")
    assert "the first data set: does not read 1 features of the data: a" in caplog.messages


@pytest.mark.slow
def test_a_label_without_a_gain_names_keys_that_help(write_dataset: WriteDataset, tmp_path: Path) -> None:
    rng, weeks = np.random.default_rng(0), {}
    for name, week in WEEKS.items():
        highest = 90 if name == "train" else 4  # revenue in the training weeks, grades in the others
        groups = [(rng.normal(size=(8, 2)), rng.integers(0, highest, 8)) for _ in range(40)]
        weeks[week] = [(x_LF.astype(np.float32), labels_L.astype(np.float32)) for x_LF, labels_L in groups]
    data = write_dataset(weeks, [Feature(name="a"), Feature(name="b")])
    parts = ", ".join(f"{split}: {{data: {data}, periods: {week}}}" for split, week in WEEKS.items())
    usual = [f"out={tmp_path / 'out'}", f"splits={{{parts}}}", "gbdt.num_trees=2", "gbdt.num_threads=1"]
    message = refused(configs.load(GBDTJob, overrides=usual).run)
    for remedy in (suggested(message), f"{suggested(message, r'(gbdt.label_gain)')}={[*map(float, range(90))]}"):
        assert configs.load(GBDTJob, overrides=[*usual, remedy]).run()


@pytest.mark.nightly
def test_the_repeat_line_of_a_report_works_from_where_it_lies(
    synthetic_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a project whose configs name directories relative to it
    (tmp_path / "data").symlink_to(synthetic_dataset)
    splits = {name: {"data": "data", "periods": week} for name, week in WEEKS.items()}
    trees = {"num_trees": 2, "num_threads": 1}
    GBDTJob.model_validate({"out": "my runs/trees", "splits": splits, "gbdt": trees}).run()
    evaluate = {"models": {"trees": "my runs/trees"}, "baseline": None, "splits": splits, "resamples": 100}
    EvaluateJob.model_validate({"out": "my runs/evaluation", "evaluate": evaluate}).run(show=False)
    there = tmp_path / "my runs" / "evaluation"
    found = re.search(r"```sh\n(.*?)\n```", (there / "report.md").read_text(), re.DOTALL)
    assert found
    python = found[1].replace("python -m", f"'{sys.executable}' -m").replace("DIRECTORY", "again")
    done = subprocess.run(["sh", "-c", python], cwd=there, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0
    assert storage.read_bytes("again/metrics.json") == (there / "metrics.json").read_bytes()


@pytest.mark.slow
def test_a_log_that_is_no_terminal_has_times(tmp_path: Path) -> None:
    log = write(tmp_path / "log.csv", rows())
    job = [f"out={tmp_path / 'out'}", f"prepare={{inputs: [{log}], source: {{kind: items, columns: {COLUMNS}}}}}"]
    done = run_here("prepare", *(f"--set={setting}" for setting in job))
    lines = done.stderr.splitlines()
    assert len(lines) >= 2
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d prepare: ", line) for line in lines), lines
