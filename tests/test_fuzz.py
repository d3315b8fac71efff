"""Mutated files: reading them gives one line or the same result, and touches nothing outside."""

import contextlib
import copy
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ltrscale import bundle, storage
from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.preflight import PreflightConfig, preflight
from ltrscale.data.dataset.scores import find_scores
from ltrscale.data.dataset.selection import Selection, only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.ingest.additions import _fixed_periods
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker
from ltrscale.scoring.predict import PredictJob
from ltrscale.scoring.score import ScoreJob
from ltrscale.stages.inputs import bundle_hashes
from ltrscale.stages.provenance import check_unseen, scored_by
from ltrscale.training import checkpoint
from ltrscale.training.checkpoint import Snapshot
from ltrscale.tuning.history import History, Result, Trial, best

FEATURES = (Feature(name="a"), Feature(name="b"))
fuzzed = settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "..", "../precious", "/etc",
    "a\0b", "\ud800", "*", "x" * 2000, "http://127.0.0.1:1/x", [], {}, [[]], {"a": None}, nested(400),
]  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """Plain data with one or two values replaced, left out, doubled or swapped."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        here = document
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(here[key], dict | list) and here[key] and draw(st.integers(0, 3)):
                here = here[key]
                continue
            match draw(st.integers(0, 5)):
                case 0:
                    del here[key]
                case 1 if isinstance(here, list):
                    here.append(copy.deepcopy(here[key]))
                case 2:
                    here[key] = copy.deepcopy(here[draw(st.sampled_from(keys))])
                case _:
                    here[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            break
    return document


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an unrelated file and one output of each kind."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "precious").mkdir()
    (folder / "precious" / "work").write_text("of years")
    return folder


@pytest.fixture(scope="module")
def data(home: Path, write_dataset: Any) -> Path:
    rng = np.random.default_rng(0)
    groups = [(rng.normal(size=(n, 2)).astype(np.float32), np.arange(n, dtype=np.float32)) for n in (2, 3, 4)]
    shutil.copytree(write_dataset({"p1": groups, "p2": groups}, FEATURES), home / "data")
    return home / "data"


@pytest.fixture(scope="module")
def ranker(home: Path, data: Path) -> Path:
    config = TransformConfig(numeric="none")
    transform = fit_transform([torch.zeros(5, 2)], ["numeric"] * 2, config)
    made = Ranker(Architecture(transform=config, encoder=ResNetConfig(width=4, blocks=1), head=HeadConfig()), transform)
    splits = [{"data": [str(data)], "periods": [period]} for period in ("p1", "p2")]
    about = bundle.BundleFacts(
        config={}, features=FEATURES, dataset_hash="", metrics={"ndcg": 0.5},
        made_by={"stage": "x", "config": {"splits": splits}, "inputs": {str(data): "h", str(home / "ranker"): "h"}},
        read_as={"source": {"kind": "items", "columns": {"query": "q", "features": ["a", "b"]}}, "sort": True},
    )  # fmt: skip
    bundle.save_ranker(str(home / "ranker"), made, about)
    return home / "ranker"


@pytest.fixture(scope="module")
def scores(home: Path, data: Path, ranker: Path) -> Path:
    ScoreJob(bundle=str(ranker), data=str(data), out=str(home / "scores")).run()
    return home / "scores"


@pytest.fixture(scope="module")
def saved(home: Path) -> Path:
    """A checkpoint."""
    tensors = {"weights": {"w": torch.zeros(2)}, "optimizer": {"m": torch.zeros(2)}}
    state = {"step": 3, "epoch": 0, "account": [1, 2], "positions": {"0": [0, 1]}, "optimizer": [{"lr": 0.1}]}
    made_by = {"stage": "x", "config": {"seed": 0}, "inputs": {}}
    checkpoint.write_checkpoint(str(home / "step-3"), Snapshot(state, tensors, {"place": 1}), origin=made_by, data="h")
    return home / "step-3"


@contextlib.contextmanager
def one_line_at_most(home: Path, *files: Path) -> Iterator[None]:
    """The block ends, or says in one line why not; checks that only the given files have changed."""
    restored = {path: path.read_bytes() for path in files}
    before = tree(home, files)
    try:
        with contextlib.suppress(InputError):
            yield
        assert tree(home, files) == before
    finally:
        for path, content in restored.items():
            path.write_bytes(content)


def tree(home: Path, without: tuple[Path, ...]) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in home.rglob("*") if path not in without}


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def read_data(data: Path) -> None:
    split = Split(data=(str(data),))
    for read in (
        lambda: _iterate(select(split, labelled=True)),
        lambda: only_relevant(select(split, labelled=True)),
        lambda: select(split.replace(relevant_groups=1), labelled=True),
        lambda: preflight({"train": split}, PreflightConfig(check="content")),
        lambda: _fixed_periods(open_dataset(str(data))),
    ):
        with contextlib.suppress(InputError):
            read()


def _iterate(selection: Selection) -> list[bytes]:
    """Read the features of all batches."""
    return [groups.features_NF.numpy().tobytes() for groups in iterate(selection, docs_per_batch=100)]


@pytest.mark.slow
@fuzzed
@given(drawn=st.data())
def test_the_manifest_of_a_data_set(home: Path, data: Path, scores: Path, drawn: st.DataObject) -> None:
    path = data / storage.MANIFEST
    with one_line_at_most(home, path):
        write(path, drawn.draw(changed(json.loads(path.read_text()))))
        read_data(data)
        with storage.Commit(str(data)):
            pass
        find_scores(str(scores), open_dataset(str(data)), ["p1"])


@pytest.mark.slow
@fuzzed
@given(drawn=st.data())
def test_the_manifest_of_scores(home: Path, data: Path, scores: Path, ranker: Path, drawn: st.DataObject) -> None:
    path = scores / "period=p1" / storage.HIDDEN_MANIFEST
    with one_line_at_most(home, path):
        write(path, drawn.draw(changed(json.loads(path.read_text()))))
        scored = Split(data=(str(data),), scores=str(scores))
        for read in (
            lambda: _iterate(select(scored, labelled=True)),
            lambda: scored_by(scored),
            lambda: ScoreJob(bundle=str(ranker), data=str(data), out=str(scores)).plan(),
        ):
            with contextlib.suppress(InputError):
                read()


@fuzzed
@given(drawn=st.data())
def test_the_manifest_of_a_bundle(home: Path, ranker: Path, drawn: st.DataObject) -> None:
    path = ranker / storage.MANIFEST
    with one_line_at_most(home, path):
        write(path, drawn.draw(changed(json.loads(path.read_text()))))
        url = str(ranker)
        for read in (bundle.load, lambda u: bundle_hashes([u]), _check_origin):
            with contextlib.suppress(InputError):
                read(url)


def _check_origin(url: str) -> None:
    check_unseen(url, Split(data=("elsewhere",)))


@pytest.mark.slow
@fuzzed
@given(drawn=st.data())
def test_the_config_of_a_bundle(home: Path, ranker: Path, drawn: st.DataObject) -> None:
    path, manifest = ranker / "config.json", ranker / storage.MANIFEST
    with one_line_at_most(home, path, manifest):
        write(path, drawn.draw(changed(json.loads(path.read_text()))))
        sign(manifest, path)
        opened = bundle.load(str(ranker))
        groups = QueryGroups(torch.zeros(2, 2), torch.tensor([0, 2]))
        predict = PredictJob(out=str(home / "items"), bundle=str(ranker), inputs=({"path": "log.csv"},))
        parts = ("transform", "encoder", "projector_layers")
        parts_of = [getattr(opened, name) for name in parts if isinstance(opened, bundle.EncoderBundle)]
        for read in (lambda: opened.scorer()(groups), *parts_of, lambda: predict._reading([opened])):
            with contextlib.suppress(InputError):
                read()


def sign(manifest: Path, file: Path) -> None:
    """Update the hash of a changed file in the manifest."""
    document = json.loads(manifest.read_text())
    for listed in document["files"]:
        if listed["path"] == file.name:
            listed["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    write(manifest, document)


@fuzzed
@given(drawn=st.data())
def test_the_manifest_of_a_checkpoint(home: Path, saved: Path, drawn: st.DataObject) -> None:
    path = saved / storage.MANIFEST
    with one_line_at_most(home, path):
        write(path, drawn.draw(changed(json.loads(path.read_text()))))
        assert checkpoint.read_checkpoint(str(saved)).step >= 0


@fuzzed
@given(drawn=st.data())
def test_the_history_of_a_search(home: Path, drawn: st.DataObject) -> None:
    history = History(str(home / "search"))
    history.begin(Trial(number=0, params={"a.b": 0.5}))
    history.end(0, Result(state="complete", value=0.5, curve=((1, 0.4),)))
    path = home / "search" / "trials" / "00000" / drawn.draw(st.sampled_from(["trial.json", "result.json"]))
    with one_line_at_most(home, path):
        write(path, drawn.draw(changed(json.loads(path.read_text()))))
        best(history.trials())


@st.composite
def damaged(draw: st.DrawFn, content: bytes, begin: int) -> bytes:
    """The content with some bytes changed at a random place, or cut off there."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(begin, len(content) - 1))
        content = content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
    return content if draw(st.integers(0, 9)) else content[: draw(st.integers(0, len(content)))]


@pytest.mark.slow
@fuzzed
@given(drawn=st.data())
def test_the_footer_of_a_parquet_file(home: Path, data: Path, drawn: st.DataObject) -> None:
    """Data that can be read are unchanged, whether or not the file was checked before."""
    path = data / open_dataset(str(data)).manifest.files[0].path
    content = path.read_bytes()
    expected = _iterate(select(Split(data=(str(data),)), labelled=True))
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    with one_line_at_most(home, path):
        path.write_bytes(drawn.draw(damaged(content, footer)))
        with contextlib.suppress(InputError):
            preflight({"train": Split(data=(str(data),))}, PreflightConfig())
        assert _iterate(select(Split(data=(str(data),)), labelled=True)) == expected


@fuzzed
@given(drawn=st.data())
def test_weights_of_a_bundle(home: Path, ranker: Path, drawn: st.DataObject) -> None:
    path, manifest = ranker / "weights.safetensors", ranker / storage.MANIFEST
    with one_line_at_most(home, path, manifest):
        path.write_bytes(drawn.draw(damaged(path.read_bytes(), 0)))
        sign(manifest, path)
        bundle.load(str(ranker)).scorer()(QueryGroups(torch.zeros(2, 2), torch.tensor([0, 2])))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"files": ' + "[" * 100_000, "9" * 5000, ""])
def test_a_manifest_that_is_no_json(tmp_path: Path, content: str) -> None:
    (tmp_path / storage.MANIFEST).write_text(content)
    with pytest.raises(InputError, match=r"manifest\.json: not (JSON|a manifest)"):
        storage.read_manifest(str(tmp_path))


def test_bundles_that_say_they_were_made_from_each_other_are_looked_at_once(tmp_path: Path) -> None:
    splits = [{"data": [str(tmp_path / "data")], "periods": [period]} for period in ("p1", "p2")]
    for name in ("a", "b"):
        inputs = {str(tmp_path / other): "h" for other in ("a", "b")}
        made_by = {"stage": "x", "config": {"splits": splits}, "inputs": inputs}
        (tmp_path / name).mkdir()
        write(tmp_path / name / storage.MANIFEST, {"made_by": made_by})
    check_unseen(str(tmp_path / "a"), Split(data=("elsewhere",)))
