"""Exports agree with the bundle, by readers that know only the files; broken ones are refused."""

import itertools
import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from exported_models import PERIODS, full, last_rows, network, saved, score_alone, trees
from reference import serving as reference
from small_trainers import finetuned
from text_log import ENCODER, STREAM

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import Bundle, load
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.ingest.categories import encode
from ltrscale.ingest.inputs import PrepareConfig
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.serving import parity as check
from ltrscale.serving.export import FORMATS, ExportJob, FormatName, Registry
from ltrscale.serving.format import ExportedFeatures, Files, Observed
from ltrscale.serving.parity import Parity, check_parity
from ltrscale.stages.mlflow_runs import MLFLOW
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.trees.stacking import StackedJob, StackMember

ROWS = 500


@pytest.fixture(scope="module")
def models(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Trees with categories and missing values, and without categories."""
    folder = tmp_path_factory.mktemp("models")
    kinds = ("lightgbm", "xgboost")
    with_categories = {kind: trees(folder / kind, synthetic_dataset, kind) for kind in kinds}
    numbers = {
        f"{kind} numbers": trees(folder / f"{kind}-numbers", synthetic_dataset, kind, leave_out=("categorical",))
        for kind in kinds
    }
    # another week, whose categories are others
    splits = {name: {"data": synthetic_dataset, "periods": PERIODS[name]} for name in ("validation", "test")}
    splits["train"] = {"data": synthetic_dataset, "periods": "2026-W02"}
    more = {"out": str(folder / "continued"), "splits": splits, "start": with_categories["lightgbm"]}
    validate(GBDTJob, {**more, "gbdt": {"num_trees": 7, "num_threads": 1, "cat_smooth": 1}}, "test").run()
    return with_categories | numbers | {"lightgbm continued": str(folder / "continued")}


def split_of(data: str) -> Split:
    return Split(data=(data,), periods=("2026-W04",))


def compared(to: FormatName, bundle: Bundle, split: Split) -> tuple[Files, Parity]:
    return check_parity(FORMATS[to], bundle, split, rows=ROWS)


def rows_of(bundle: Bundle, data: str) -> QueryGroups:
    return check._documents(bundle, split_of(data), ROWS, disturbed=True)


def document(features: ExportedFeatures, bundle: Bundle, row: torch.Tensor) -> dict[str, Any]:
    """A row as an engine has it: no entry for a missing value, categories as text."""
    names = [feature.name for feature in bundle.features]
    found: dict[str, Any] = {}
    for column in features.columns:
        value = float(row[names.index(column.name)])
        if np.isnan(value):
            continue
        if column.codes is not None:
            by_code = {column.codes[place]: text for text, place in (column.values or {}).items()}
            found[column.label] = by_code.get(int(value), "nobody has seen this")
        else:
            found[column.label] = value
    return found


def in_engine(files: Mapping[str, bytes], bundle: Bundle, row: torch.Tensor, *, missing_is_zero: bool) -> float:
    """The score of a row in a search engine, whose fields have the names of the data set."""
    names = [feature.name for feature in bundle.features]
    fields = {name: value for name, value in zip(names, row.tolist(), strict=True) if not np.isnan(value)}
    definition = json.loads(files["model.json"])["model"]["model"]["definition"]
    values = reference.features(files["featureset.json"].decode(), fields)
    return reference.ltr_plugin(definition, values, missing_is_zero=missing_is_zero)


TAKEN: list[tuple[FormatName, str]] = [
    ("lightgbm", "lightgbm"),
    ("xgboost", "xgboost"),
    ("treelite", "lightgbm"),
    ("treelite", "xgboost"),
    ("vespa", "lightgbm"),
    ("opensearch", "lightgbm numbers"),
    ("opensearch", "xgboost numbers"),
    ("lightgbm", "lightgbm continued"),
    ("treelite", "lightgbm continued"),
    ("vespa", "lightgbm continued"),
]


@pytest.mark.slow
def test_models_that_are_exported_as_one_number_their_codes_apart(models: dict[str, str]) -> None:
    contents = load(models["lightgbm continued"]).contents
    first, second = (re.findall(r"^pandas_categorical:(.*)$", text.decode(), re.M) for text in contents.values())
    assert first != second
    splits = [re.findall(r"^num_cat=[1-9]", text.decode(), re.M) for text in contents.values()]
    assert all(splits)


@pytest.mark.slow
@pytest.mark.parametrize(("to", "model"), TAKEN)
def test_scores_agree_with_missing_values_and_unseen_categories(
    to: FormatName, model: str, models: dict[str, str], synthetic_dataset: str
) -> None:
    _, parity = compared(to, load(models[model]), split_of(synthetic_dataset))
    assert (parity.documents, parity.missing > 100) == (500, True)
    assert (parity.unseen > 10) == ("numbers" not in model)
    assert parity.largest_difference <= (0.0 if to == model else 1e-6) < parity.largest_score


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "xgboost"])
def test_opensearch_scores_one_document_as_the_bundle_does(
    kind: str, models: dict[str, str], synthetic_dataset: str
) -> None:
    bundle = load(models[f"{kind} numbers"])
    files, _ = compared("opensearch", bundle, split_of(synthetic_dataset))
    assert json.loads(files["model.json"])["model"]["model"]["type"] == "model/xgboost+json"
    groups = rows_of(bundle, synthetic_dataset)
    ours_N = bundle.scorer()(groups)
    for row, score in zip(groups.features_NF[:100], ours_N, strict=False):
        assert in_engine(files, bundle, row, missing_is_zero=False) == pytest.approx(float(score), abs=1e-6)


@pytest.mark.slow
def test_vespa_scores_one_document_as_the_bundle_does(models: dict[str, str], synthetic_dataset: str) -> None:
    bundle = load(models["lightgbm"])
    files, _ = compared("vespa", bundle, split_of(synthetic_dataset))
    features = ExportedFeatures.model_validate_json(files["features.json"])
    groups = rows_of(bundle, synthetic_dataset)
    ours_N = bundle.scorer()(groups)
    for row, score in zip(groups.features_NF[:100], ours_N, strict=False):
        theirs = reference.vespa(files["model.json"].decode(), document(features, bundle, row))
        assert theirs == pytest.approx(float(score), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "xgboost"])
def test_elasticsearch_takes_trees_that_never_met_a_missing_value(
    kind: str, write_dataset: Any, models: dict[str, str], synthetic_dataset: str, tmp_path: Path
) -> None:
    data = write_dataset({f"2026-W0{week}": full(60, week) for week in range(1, 5)}, [Feature(name=n) for n in "abc"])
    bundle = load(trees(tmp_path / kind, data, kind))
    files, parity = compared("elasticsearch", bundle, split_of(data))
    assert parity.missing == 0
    assert parity.largest_difference < 1e-6
    groups = QueryGroups(torch.tensor([[0.75, 0.0, -1.0]]), torch.tensor([0, 1]))
    expected = float(bundle.scorer()(groups)[0])
    row = torch.tensor([0.75, torch.nan, -1.0])
    assert in_engine(files, bundle, row, missing_is_zero=True) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InputError, match="it reads a missing value as 0, and f_0"):
        compared("elasticsearch", load(models[f"{kind} numbers"]), split_of(synthetic_dataset))


def signed(rows: int, seed: int, missing: float = 0.05) -> list[tuple[Any, Any]]:
    """Groups with a feature on both sides of 0, one below 0 and one above, with values at 0 and missing ones."""
    generator = np.random.default_rng(seed)
    x_NF = np.round(generator.normal(size=(rows, 10, 3)), 1).astype(np.float32)
    x_NF[..., 1:] = np.abs(x_NF[..., 1:]) * np.float32([-1, 1])
    labels_NL = (x_NF[..., 0] + x_NF[..., 1] - x_NF[..., 2] > -1).astype(np.float32)
    x_NF[generator.random(x_NF.shape) < missing] = np.nan
    return list(zip(x_NF, labels_NL, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "xgboost"])
def test_features_below_0_are_exported_in_parts_that_are_not(kind: str, write_dataset: Any, tmp_path: Path) -> None:
    features = [Feature(name=name) for name in ("a", "b", "a_negative")]
    data = write_dataset({f"2026-W0{week}": signed(60, week) for week in range(1, 5)}, features)
    bundle = load(trees(tmp_path / "model", data, kind))
    files, parity = compared("opensearch", bundle, split_of(data))
    assert parity.missing > 50
    assert parity.largest_difference < 1e-6
    queries = {
        q["name"]: q["template"]["function_score"]
        for q in json.loads(files["featureset.json"])["featureset"]["features"]
    }
    assert {"a", "a_negative", "a_negative_2", "b_negative"} <= set(queries)
    assert "functions" not in queries["a_negative"]  # the feature of this name, which has no value below 0
    steps = (0.0, -0.0, 0.1, 0.1000001, 3e38, 1e-45)
    values = [sign * step for step in steps for sign in (1, -1)] + [torch.nan]
    rows_NF = torch.tensor([[a, -abs(b), abs(c)] for a, b, c in itertools.product(values, repeat=3)])[::7]
    ours_N = bundle.scorer()(QueryGroups(rows_NF, torch.tensor([0, len(rows_NF)])))
    for row, score in zip(rows_NF, ours_N, strict=True):  # values that no data has
        assert in_engine(files, bundle, row, missing_is_zero=False) == pytest.approx(float(score), abs=1e-6)


@pytest.mark.slow
def test_the_names_of_features_are_no_code_in_any_file(write_dataset: Any, tmp_path: Path) -> None:
    names = ["=cmd|' /C calc'!A0", "../../x", "<script>", "$(touch x)", "matrix;import os", 'a"b', "{{a name}}"]
    generator = np.random.default_rng(0)

    def groups(count: int) -> list[tuple[Any, Any]]:
        features = generator.normal(size=(count, 12, len(names))).astype(np.float32)
        return [(x_LF, (x_LF.sum(1) > 0).astype(np.float32)) for x_LF in features]

    of_periods = {f"2026-W0{week}": groups(50) for week in (1, 2, 3, 4)}
    data = write_dataset(of_periods, [Feature(name=name, kind="numeric") for name in names])
    ranker = saved(tmp_path / "network", data, network(data, encoder={"kind": "mlp", "hidden": [4]}))
    by_trees = trees(tmp_path / "trees", data, "lightgbm")
    others = trees(tmp_path / "others", data, "lightgbm", leave_out=("{{a name}}",))
    plugin = ("elasticsearch", "opensearch")
    exports = [("onnx", ranker), *((to, by_trees) for to in ("lightgbm", "vespa")), *((to, others) for to in plugin)]
    for to, url in exports:
        for name, content in compared(to, load(url), split_of(data))[0].items():
            texts = [content.decode(errors="replace")]
            if name.endswith(".json"):  # where a name is a whole text, as the file is no code
                texts = [
                    text
                    for text in re.findall(r'"((?:[^"\\]|\\.)*)"', texts[0])
                    if json.loads(f'"{text}"') not in names
                ]
            assert not [raw for raw in names for text in texts if raw in text], (to, name)
    for to in plugin:
        with pytest.raises(InputError, match=r"would fill in the feature's name '\{\{a name\}\}' as a template; train"):
            compared(to, load(by_trees), split_of(data))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["elasticsearch", "opensearch"])
@pytest.mark.parametrize("kind", ["lightgbm", "xgboost"])
def test_a_model_whose_searches_would_fail_is_not_published(
    kind: str, to: FormatName, write_dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the values of fields below 0 for scores of queries."""
    honest = check.write_export
    monkeypatch.setattr(
        check, "write_export", lambda to, bundle, observed: honest(to, bundle, Observed(observed.texts))
    )
    data = write_dataset(
        {f"2026-W0{week}": signed(60, week, missing=0) for week in range(1, 5)}, [Feature(name=n) for n in "abc"]
    )
    job = ExportJob(out=str(tmp_path / "out"), bundle=trees(tmp_path / "model", data, kind), data=data, to=to, rows=500)
    with pytest.raises(
        InputError, match=rf"{to} would end searches with an error: .*of 'a' is negative, -\d.*'b'"
    ) as error:
        job.run()
    assert "\n" not in str(error.value)
    assert storage.read_manifest(str(tmp_path / "out")) is None


@pytest.mark.slow
def test_a_missing_value_counts_as_0_where_lightgbm_never_met_one(write_dataset: Any, tmp_path: Path) -> None:
    data = write_dataset({f"2026-W0{week}": full(60, week) for week in range(1, 5)}, [Feature(name=n) for n in "abc"])
    bundle = load(trees(tmp_path / "model", data, "lightgbm"))
    for to in ("vespa", "opensearch", "treelite"):
        _, parity = compared(to, bundle, split_of(data))
        assert parity.missing > 10
        assert parity.largest_difference < 1e-6


@pytest.mark.slow
def test_a_number_that_equals_the_code_of_an_unseen_category_is_none(write_dataset: Any, tmp_path: Path) -> None:
    groups = [(np.concatenate([x_LF, np.full((len(x_LF), 1), 2**24 - 1)], 1), y_L) for x_LF, y_L in full(60, 1)]
    names = [Feature(name=n) for n in "abcd"]
    data = write_dataset({f"2026-W0{week}": groups for week in range(1, 5)}, names)
    _, parity = compared("lightgbm", load(trees(tmp_path / "model", data, "lightgbm")), split_of(data))
    assert parity.unseen == 0


@pytest.mark.slow
def test_a_split_that_asks_for_a_value_is_finite_in_json(write_dataset: Any, tmp_path: Path) -> None:
    """LightGBM's threshold of such a split, 1e300, is above all numbers in single precision."""

    def groups(seed: int) -> list[tuple[Any, Any]]:
        generator = np.random.default_rng(seed)
        x_NF = generator.normal(size=(60, 10, 2)).astype(np.float32)
        x_NF[..., 0][generator.random((60, 10)) < 0.5] = np.nan
        return [(x_LF, np.isnan(x_LF[:, 0]).astype(np.float32)) for x_LF in x_NF]

    data = write_dataset({f"2026-W0{week}": groups(week) for week in range(1, 5)}, [Feature(name=n) for n in "ab"])
    bundle = load(trees(tmp_path / "model", data, "lightgbm"))
    files, parity = compared("opensearch", bundle, split_of(data))
    definition = json.loads(files["model.json"])["model"]["model"]["definition"]
    largest = float(np.finfo(np.float32).max)
    conditions = [float(number) for number in re.findall(r'"split_condition":([^,}]+)', definition)]
    assert max(conditions) == largest
    assert parity.largest_difference < 1e-6


def other_digit(text: bytes) -> bytes:
    """A number of the same length whose first digits differ."""
    return re.sub(rb"[1-9]", lambda digit: b"1" if digit[0] != b"1" else b"7", text, count=1)


def in_json(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return changed


def other_leaf(value: Any) -> None:
    model = value["model"]["model"]
    model["definition"] = re.sub(r'("leaf":-?)0?\.\d+', r"\g<1>0.9", model["definition"], count=1)


def other_threshold(value: Any) -> None:
    value["tree_info"][0]["tree_structure"]["threshold"] += 0.5


def other_split(value: Any) -> None:
    value["learner"]["gradient_booster"]["model"]["trees"][0]["split_conditions"][0] += 0.5


def other_checkpoint(content: bytes) -> bytes:
    """The same with another value wherever the first tree's first leaf has its own."""
    treelite = pytest.importorskip("treelite")
    nodes = json.loads(treelite.Model.deserialize_bytes(content).dump_as_json())["trees"][0]["nodes"]
    leaf = next(node["leaf_value"] for node in nodes if "leaf_value" in node)
    changed = content.replace(struct.pack("<d", leaf), struct.pack("<d", leaf + 0.5))
    assert changed != content
    return changed


BREAKS: list[tuple[FormatName, str, str, Callable[[bytes], bytes]]] = [
    (
        "lightgbm",
        "lightgbm",
        "model.txt",
        lambda text: re.sub(rb"(?<=\nleaf_value=)\S+", lambda leaf: other_digit(leaf[0]), text, count=1),
    ),
    ("xgboost", "xgboost", "model.json", in_json(other_split)),
    ("treelite", "lightgbm", "checkpoint.tl", other_checkpoint),
    ("vespa", "lightgbm", "model.json", in_json(other_threshold)),
    ("opensearch", "lightgbm numbers", "model.json", in_json(other_leaf)),
    ("elasticsearch", "xgboost numbers", "model.json", in_json(other_leaf)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "model", "file", "change"), BREAKS, ids=lambda value: str(value)[:13])
def test_a_file_with_another_number_is_not_published(
    to: FormatName,
    model: str,
    file: str,
    change: Callable[[bytes], bytes],
    models: dict[str, str],
    synthetic_dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = check.write_export

    def broken(*given: Any) -> Any:
        files = honest(*given)
        assert change(files[file]) != files[file]
        return {**files, file: change(files[file])}

    monkeypatch.setattr(check, "write_export", broken)
    job = ExportJob(out=str(tmp_path / "out"), bundle=models[model], data=synthetic_dataset, to=to, rows=500)
    with pytest.raises(InputError, match="away from the bundle's on 500 documents"):
        job.run()
    assert storage.read_manifest(str(tmp_path / "out")) is None


READ_BACK: list[tuple[FormatName, str]] = [
    ("lightgbm", "lightgbm"),
    ("xgboost", "xgboost"),
    ("treelite", "xgboost"),
    ("vespa", "lightgbm"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "model"), READ_BACK)
def test_the_code_on_the_card_gives_the_bundles_scores(
    to: FormatName,
    model: str,
    models: dict[str, str],
    synthetic_dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = ExportJob(out=str(tmp_path / "out"), bundle=models[model], data=synthetic_dataset, to=to, rows=500)
    assert job.run()
    text = (tmp_path / "out" / "README.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if to == "vespa":
        assert "A missing value\nstays missing" in text
        assert not code
        return
    bundle = load(models[model])
    groups = rows_of(bundle, synthetic_dataset)
    features = ExportedFeatures.model_validate_json((tmp_path / "out" / "features.json").read_bytes())
    names = [feature.name for feature in bundle.features]
    found: dict[str, Any] = {"matrix": features.matrix(names, groups.features_NF.numpy())}
    monkeypatch.chdir(tmp_path / "out")
    exec(code[0], found)
    np.testing.assert_allclose(found["scores"], bundle.scorer()(groups).numpy(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "model", "reason"),
    [
        ("elasticsearch", "lightgbm", "split on the category 'c_.*compares numbers only; train without categories"),
        ("opensearch", "xgboost", "split on the category 'c_.*compares numbers only; train without categories"),
        ("vespa", "xgboost", "vespa takes trees of lightgbm only"),
        ("lightgbm", "xgboost", "lightgbm takes trees of lightgbm only"),
        ("onnx", "lightgbm", "onnx takes finetuned networks only; export trees to"),
    ],
)
def test_what_a_format_cannot_express_is_refused_in_one_line(
    to: FormatName, model: str, reason: str, models: dict[str, str], synthetic_dataset: str
) -> None:
    with pytest.raises(InputError, match=reason) as error:
        compared(to, load(models[model]), split_of(synthetic_dataset))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_vespa_needs_the_texts_of_categories(models: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"does not record one text for each code of 'c_category'.*prepare the data"):
        FORMATS["vespa"].write(load(models["lightgbm"]), Observed({}))


def city_log(folder: Path, cities: list[str]) -> str:
    """A data set of four weeks, each query with each of the cities twice; people choose the first one."""
    columns = {"query": "search", "label": "bought", "period_column": "week", "features": ["price"]}
    rng = np.random.default_rng(0)
    rows = [
        {"search": f"{week}-{i}", "week": f"2026-W0{week}", "city": city, "bought": int(city == cities[0])}
        for week in range(1, 5)
        for i in range(20)
        for city in 2 * cities
    ]
    folder.mkdir()
    pd.DataFrame(rows).assign(price=rng.normal(size=len(rows))).to_parquet(folder / "log.parquet")
    source = {"kind": "items", "columns": {**columns, "categorical": ["city"]}}
    inputs = str(folder / "log.parquet")
    PrepareJob(
        out=str(folder / "data"), prepare=PrepareConfig.model_validate({"inputs": inputs, "source": source})
    ).run()
    return str(folder / "data")


@pytest.mark.slow
def test_a_category_that_the_data_lack_has_no_text_and_a_whole_number_has_its_own(tmp_path: Path) -> None:
    """As it was: paris was named by its hash, 2319768."""
    trained = city_log(tmp_path / "trained", ["paris", "7", "berlin", "rome"])
    newer = city_log(tmp_path / "newer", ["7", "berlin", "rome"])
    bundle = load(trees(tmp_path / "model", trained, "lightgbm", min_data_in_leaf=2))
    files, _ = compared("vespa", bundle, split_of(trained))
    texts = ["7", "paris", "berlin", "rome"]
    assert sorted(json.loads(files["model.json"])["pandas_categorical"][0]) == sorted(texts)
    for data, known in ((trained, texts), (newer, [text for text in texts if text != "paris"])):
        files, _ = compared("lightgbm", bundle, split_of(data))
        (city,) = [c for c in ExportedFeatures.model_validate_json(files["features.json"]).columns if c.codes]
        assert city.codes is not None
        values = city.values or {}
        assert {text: city.codes[place] for text, place in values.items()} == {
            text: int(encode(pa.array([text]))[0]) for text in known
        }
    with pytest.raises(
        InputError, match=r"each code of 'city' \(1 have none\); export with the training data"
    ) as error:
        compared("vespa", bundle, split_of(newer))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "xgboost"])
def test_the_library_alone_scores_the_raw_log(
    kind: FormatName, models: dict[str, str], synthetic_dataset: str, tmp_path: Path
) -> None:
    last_rows(synthetic_dataset, tmp_path / "rows.csv")
    job = ExportJob(out=str(tmp_path / "out"), bundle=models[kind], data=synthetic_dataset, to=kind, rows=500)
    assert job.run()
    bundle = load(models[kind])
    selection = select(split_of(synthetic_dataset), labelled=False)
    groups = QueryGroups.concat(list(iterate(selection, docs_per_batch=1000)))
    ours_N = bundle.scorer()(groups).numpy()
    theirs_n = score_alone(tmp_path / "out", tmp_path / "rows.csv")
    np.testing.assert_allclose(theirs_n, ours_N[: len(theirs_n)], rtol=0, atol=1e-6)  # the log has whole queries


@pytest.fixture(scope="module")
def text_bundles(texts: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cross-encoder, and trees that see its scores."""
    folder = tmp_path_factory.mktemp("text")
    settings = {"network": {"encoder": ENCODER}, "head": {"layers": 1}, "head_epochs": 0, "epochs": 1, "stream": STREAM}
    finetuned(texts, folder / "network", FinetuneConfig.model_validate(settings))
    splits = {name: {"data": texts, "periods": periods} for name, periods in PERIODS.items()}
    stack = {"features": ["f_01"], "gbdt": {"num_trees": 2, "num_threads": 1}}
    member = StackMember(bundle=str(folder / "network"))
    job = {"out": str(folder / "stack"), "splits": splits, "stack": stack, "members": {"text": member.model_dump()}}
    validate(StackedJob, job, "test").run()
    return {"network": str(folder / "network"), "stack": str(folder / "stack")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["network", "stack"])
@pytest.mark.parametrize("to", FORMATS)
def test_a_model_of_texts_is_refused_by_every_format(
    text_bundles: dict[str, str], texts: str, tmp_path: Path, to: FormatName, name: str
) -> None:
    settings = {"out": str(tmp_path / "out"), "bundle": text_bundles[name], "to": to, "data": texts}
    with pytest.raises(InputError, match=rf"{name}: reads the tokens of texts, and {to} gets features alone") as error:
        validate(ExportJob, settings, "test").run()
    assert "\n" not in str(error.value)
    assert storage.read_manifest(str(tmp_path / "out")) is None


def test_a_version_is_of_the_store_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ExportJob(out="out", bundle="model", to="mlflow", registry=Registry(name="shop"))
    found = []
    for store in ("sqlite:///a.db", "sqlite:///b.db", "http://user:secret@host:5000"):
        monkeypatch.setenv(MLFLOW, store)
        found.append(str(job.identity()))
    assert len(set(found)) == 3
    assert "secret" not in found[2]
