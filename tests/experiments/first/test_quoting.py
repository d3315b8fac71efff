"""Texts from outside in the configs of `jobs.init`: whatever they are, they stay names and values."""

import json
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from shopping_log import shopping_log

from ltrscale.config import load
from ltrscale.errors import InputError
from ltrscale.experiments.first.init import InitJob
from ltrscale.ingest.names import is_unnamed, label_points
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.texts import escaped, flow, plain_yaml

JOIN = 'joins: [{path: "http://127.0.0.1:9/t.csv", key: item, columns: [a]}]'
BREAKS = "\n\r\x85\u2028\u2029\x0b\x0c\x1c"
HOSTILE = [
    *(f"note{end}    {JOIN}" for end in BREAKS),
    *("x\n  max_rejected: 1", "\x00", "\x7f", "\x1b[31m", "\ufffe", "\ufeff", "\xa0", "\u202e", "\U0001f600"),
    *('": [', "' # CHECK: x", "}", "]", "{a: b}", "[a]", "&a", "*a", "!!python/none", "%YAML 1.1", "---", "...", "<<"),
    *("yes", "null", "1e3", "1_000", "2026-01-01", "0x1f", "=", "~", "@a", "`a`", "a: b", "- a", "? a", "#", "\\x0a"),
    *("$(touch x)", "; rm -rf x", "constructor"),
]
TEXTS = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.builds("".join, st.lists(st.sampled_from([*HOSTILE, *string.punctuation]), min_size=2, max_size=3)),
)
NAMES = TEXTS.filter(lambda name: not any(c in BREAKS or c < " " or "\x7f" <= c < "\xa0" for c in name))
"""Names of columns, which `jobs.init` takes."""


@given(TEXTS)
def test_a_value_reads_back_and_a_comment_ends_with_its_line(text: str) -> None:
    for quoted in (flow(text), plain_yaml(text)):
        assert quoted.isprintable()
        assert yaml.safe_load(f"{{a: {quoted}, b: [{quoted}]}} # {escaped(text)}") == {"a": text, "b": [text]}
        assert yaml.safe_load(f"# {escaped(text)}\na: {quoted} # {escaped(text)}\n{quoted}: 1") == {"a": text, text: 1}
    assert flow({text: 1.0}) == f"{{{flow(text)}: 1.0}}"


def keys(value: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The paths of all keys of a config; names of columns and values that are keys stand as `*`."""
    if isinstance(value, dict):
        names = path[-1:] in [("dates",), ("grades",), ("fill",)] or (path[-2:-1], path[-1:]) == (
            ("joins",),
            ("columns",),
        )
        for key, inner in value.items():
            yield (*path, here := "*" if names else str(key))
            yield from keys(inner, *path, here)
    for inner in value if isinstance(value, list) else ():
        yield from keys(inner, *path)


def written(folder: Path, rows: pa.Table, stem: str, **roles: str) -> dict[str, Any]:
    """The configs that `jobs.init` writes, by name."""
    file, out = folder / f"{stem}.parquet", folder / f"out {stem}"
    pq.write_table(rows, file)
    InitJob(file=str(file), out=str(out), **roles).run()
    configs = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in out.iterdir()}
    job = load(PrepareJob, str(out / "prepare.yaml"))
    assert (job.out, [entry.path for entry in job.prepare.inputs]) == (str(out / "data"), [str(file)])
    for name in {"pipeline", "study"} & {*configs}:
        assert configs[name]["data"] == job.out
    if "weekly" in configs:
        assert configs["weekly"]["pipeline"] == str(out / "pipeline.yaml")
    return configs


def named(columns: Mapping[str, Any]) -> set[str]:
    """The columns that a config names."""
    single = [
        columns.get(use) for use in ("query", "item", "label", "time", "positions", "clicks", "gain", "docs", "labels")
    ]
    several = [columns.get(use, ()) for use in ("within", "meta", "features", "categorical", "dates")]
    return {name for name in single if name is not None} | {name for each in several for name in each}


STEMS = TEXTS.map(lambda text: text.translate(dict.fromkeys(map(ord, "/\x00*?[]\\"), "-"))[:40]).filter(
    lambda stem: not set(stem) <= {"."} and not stem.startswith("~")
)


@cache
def harmless_keys() -> dict[str, set[tuple[str, ...]]]:
    """The keys of the configs of the same log with names that say what the columns are.

    `unjudged` comes with labels of which only some are numbers.
    """
    with TemporaryDirectory() as folder:
        rows = pa.Table.from_pandas(shopping_log(60), preserve_index=False)
        found = {name: {*keys(config)} for name, config in written(Path(folder), rows, "log", **ROLES).items()}
    return {**found, "prepare": found["prepare"] | {("prepare", "source", "columns", "unjudged")}}


ROLES = {"query": "search_id", "item": "product_id", "label": "event", "time": "searched_at"}


@pytest.mark.nightly
@settings(max_examples=25)
@given(
    st.lists(NAMES, min_size=14, max_size=14, unique=True), st.lists(TEXTS, min_size=3, max_size=3, unique=True), STEMS
)
def test_names_and_values_of_a_log_add_no_key(names: Sequence[str], words: Sequence[str], stem: str) -> None:
    log = shopping_log(60)
    log["event"] = log["event"].map(dict(zip(("view", "add_to_cart", "purchase"), words, strict=True)))
    log["brand"] = log["brand"].map(dict(zip(("acme", "löwe", "zeta"), words, strict=True)))
    with TemporaryDirectory() as folder:
        new = dict(zip(log.columns, names, strict=True))
        rows = pa.Table.from_pandas(log, preserve_index=False).rename_columns([new[name] for name in log.columns])
        configs = written(Path(folder), rows, stem, **{role: new[name] for role, name in ROLES.items()})
    for name, config in configs.items():
        assert {*keys(config)} <= harmless_keys()[name], name
    columns = configs["prepare"]["prepare"]["source"]["columns"]
    assert {role: columns[role] for role in ROLES} == {role: new[name] for role, name in ROLES.items()}
    assert {*columns["grades"]} == {*words}
    assert named(columns) <= {*new.values()}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(NAMES, min_size=4, max_size=4, unique=True), STEMS)
def test_names_of_lists_by_row_add_no_key(names: Sequence[str], stem: str) -> None:
    lists = {"id": [f"q{i}" for i in range(9)], "label": [[0, 1] + [0] * (i % 3) for i in range(9)]}
    lists |= {name: [[float(i), 2.0] + [1.5] * (i % 3) for i in range(9)] for name in names[:3]}
    lists[names[3]] = [i / 2 for i in range(9)]
    with TemporaryDirectory() as folder:
        rows = pa.table(lists)
        config = written(Path(folder), rows, stem, query="id", label="label")["prepare"]
    assert {*keys(config["prepare"])} - {
        ("source", "columns", use) for use in ("meta", "positions", "clicks", "gain", "docs")
    } <= {
        *[("inputs",), ("source",), ("source", "kind"), ("source", "columns")],
        *(("source", "columns", use) for use in ("query", "labels", "features", "categorical", "time")),
    }
    assert named(config["prepare"]["source"]["columns"]) <= {*lists}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(STEMS, min_size=2, max_size=2, unique=True))
def test_names_of_letor_files_stay_periods(stems: Sequence[str]) -> None:
    with TemporaryDirectory() as folder:
        (log := Path(folder, "log")).mkdir()
        files = {str(log / f"{first}{stem}.txt") for first, stem in zip("ab", stems, strict=True)}
        for file in files:
            Path(file).write_text("0 qid:1 1:0.5 2:1\n1 qid:1 1:0.25 2:3\n")
        InitJob(file=str(log), out=str(Path(folder, "out"))).run()
        config = yaml.safe_load(Path(folder, "out", "prepare.yaml").read_text(encoding="utf-8"))["prepare"]
    assert {*keys(config)} == {("inputs",), ("inputs", "path"), ("inputs", "period"), ("source",), ("source", "kind")}
    assert {each["path"] for each in config["inputs"]} == files


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"note{end}    {JOIN}" for end in BREAKS] + ["\x00", "a\tb", "\x7f", "\x9b"])
@pytest.mark.parametrize("form", ["items.parquet", "items.jsonl", "lists.parquet"])
def test_a_control_character_in_a_name_is_one_line(name: str, form: str, tmp_path: Path) -> None:
    rows = pd.DataFrame({"query_id": [1, 1, 2], "doc_id": [1, 2, 1], "label": [0, 1, 0], name: [0.5, 0.25, 1.0]})
    file = tmp_path / form
    if form == "items.jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows.to_dict("records")))
    else:
        (rows if form.startswith("items") else rows.groupby("query_id", as_index=False).agg(list)).to_parquet(file)
    with pytest.raises(InputError) as raised:
        InitJob(file=str(file), out=str(tmp_path / "out")).run()
    assert f"{file}: the column " in str(raised.value)
    assert str(raised.value).endswith(" has a control character in its name; rename it")
    assert str(raised.value).isprintable()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_next_commands_name_the_configs_to_a_shell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log, out = tmp_path / "log.csv", tmp_path / "it's; touch $(x) *"
    shopping_log(400).to_csv(log, index=False)
    InitJob(file=str(log), out=str(out)).run()
    commented = [
        line.removeprefix("#") for line in (out / "weekly.yaml").read_text().splitlines() if "--config" in line
    ]
    lines = [message.removeprefix("next: ") for message in caplog.messages if message.startswith("next: ")] + commented
    lines += [message[message.index("python -m") :] for message in caplog.messages if "python -m jobs.study" in message]
    configs = {shlex.split(line)[2]: shlex.split(line)[4] for line in lines}
    written_for = ("prepare", "clicks", "pipeline", "weekly", "study")
    assert configs == {f"jobs.{name}": str(out / f"{name}.yaml") for name in written_for}


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(NAMES, min_size=4, max_size=4, unique=True))
@example(["a", "b", "c", "\xa0"])  # a score without a name
def test_names_of_tables_of_texts_add_no_key(names: Sequence[str]) -> None:
    asked, title, body, score = names
    assume(label_points(score) <= 0)  # the pairs would be judgements
    words = [f"{i} some words of a longer text" for i in range(12)]
    tables = {
        "queries": {"query_id": [f"q{i}" for i in range(12)], asked: words},
        "documents": {"doc_id": [f"d{i}" for i in range(12)], title: words, body: words[::-1]},
        "pairs": {"query_id": [f"q{i // 3}" for i in range(36)], "doc_id": [f"d{i % 12}" for i in range(36)]},
    }
    tables["pairs"][score] = [i / 7 for i in range(36)]
    with TemporaryDirectory() as folder:
        log, out = Path(folder, "log"), Path(folder, "out")
        log.mkdir()
        for name, table in tables.items():
            rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
            (log / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if is_unnamed(score):  # as the index of a data frame
            with pytest.raises(InputError, match=r"pairs\.jsonl: no column is left for a ranker to read"):
                InitJob(file=str(log), out=str(out)).run()
            return
        InitJob(file=str(log), out=str(out)).run()
        config = yaml.safe_load((out / "prepare.yaml").read_text(encoding="utf-8"))["prepare"]
    source, tokens = config["source"], config["source"]["columns"].pop("tokens")
    assert {*config} == {"inputs", "source"}
    assert {*source} == {"kind", "joins", "columns"}
    assert {*source["columns"]} <= {"query", "item", "features", "positions"}
    assert [join["columns"] for join in source["joins"]] == [
        {"query": asked},
        {f"document_{title}": title, f"document_{body}": body},
    ]
    assert {*tokens} == {"tokenizer", "query", "document"}
    assert [*(field["column"] for field in tokens["document"].values())] == [f"document_{title}", f"document_{body}"]
