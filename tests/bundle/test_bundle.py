"""Bundles: a loaded model scores like the saved one, and damaged or foreign files are refused."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ltrscale import bundle, storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle.boosters import renumber
from ltrscale.bundle.files import _CLASSES
from ltrscale.bundle.views import Projection
from ltrscale.data.dataset.manifest import Feature
from ltrscale.errors import InputError
from ltrscale.models.batch_norm import MicroBatchNorm, moments, update_running_statistics
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.in_context import InContextNetwork, InContextSizes
from ltrscale.models.ranker import Architecture, HeadConfig, MeanRanker, Projector, ProjectorConfig, Ranker

FEATURES = (Feature(name="price"), Feature(name="age"), Feature(name="brand", kind="categorical"))


def documents(n: int = 60, seed: int = 0) -> QueryGroups:
    generator = torch.Generator().manual_seed(seed)
    x_NF = torch.randn(n, 3, generator=generator)
    x_NF[:, 2] = torch.randint(0, 5, (n,), generator=generator) * 1000.0
    x_NF[::7, 0] = math.nan
    x_NF[3, 2] = 99.0
    return QueryGroups(x_NF, torch.tensor([0, n // 3, n]))


def about(**changes: Any) -> bundle.BundleFacts:
    values: dict[str, Any] = {
        "config": {"seed": 3, "network": {"width": 16}},
        "features": FEATURES,
        "dataset_hash": "abc",
        "metrics": {"validation_ndcg@5": 0.5, "epoch": 7, "lost": math.nan},
        "made_by": {"stage": "test"},
    }
    return bundle.BundleFacts(**values | changes)


def trained_ranker(numeric: str = "log1p_standard") -> Ranker:
    """A ranker with running statistics and weights that differ from the initial ones."""
    torch.manual_seed(0)
    config = TransformConfig.model_validate({"numeric": numeric, "quantiles": 20})
    transform = fit_transform([documents().features_NF], [f.kind for f in FEATURES], config)
    encoder = ResNetConfig(width=16, blocks=2, activation="gelu", embedding=2)
    head = HeadConfig(layers=2, width=6)
    ranker = Ranker(Architecture(transform=config, encoder=encoder, head=head), transform)
    optimizer = torch.optim.SGD(ranker.parameters(), lr=0.1)
    for _ in range(3):
        ranker(documents()).square().sum().backward()
        optimizer.step()
        for module in ranker.modules():
            if isinstance(module, MicroBatchNorm):
                update_running_statistics([module], moments([module]))
    return ranker.eval()


class Pretrained(nn.Module):
    def __init__(self, ranker: Ranker) -> None:
        super().__init__()
        self.transform, self.encoder = ranker.transform, ranker.encoder
        self.projector = Projector(16, ProjectorConfig(output=4, batch_norm=True))
        self.architecture = ranker.architecture.replace(head=None, projector=self.projector.config)


def trees() -> tuple[lightgbm.Booster, str]:
    groups = documents(400)
    vocabularies = {2: np.arange(5, dtype=np.float32) * 1000}
    x_NF = renumber(groups.features_NF.numpy(), vocabularies)
    data = lightgbm.Dataset(x_NF, label=(x_NF[:, 2] == 3) + np.nan_to_num(x_NF[:, 0]), categorical_feature=[2])
    booster = lightgbm.train({"verbosity": -1, "num_threads": 1, "min_data_in_leaf": 5}, data, 5)
    booster.pandas_categorical = [codes.astype(int).tolist() for codes in vocabularies.values()]
    return booster, booster.model_to_string()


@pytest.fixture
def neural(tmp_path: Path) -> str:
    url = str(tmp_path / "neural")
    bundle.save_ranker(url, trained_ranker(), about())
    return url


def test_a_ranker_that_several_bundles_hold_scores_a_batch_once(
    neural: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, inner, outer = (str(tmp_path / name) for name in ("order", "inner", "outer"))
    bundle.save_order(order, bundle.FeatureOrder(feature="age", ascending=True), about(features=FEATURES[1:2]))
    for url, members in ((inner, {"a": neural, "b": order}), (outer, {"mean": inner, "network": neural})):
        bundle.save_blend(url, bundle.Blend(weights=dict.fromkeys(members, 0.5)), about(), members)
    opened = [bundle.load(url) for url in (outer, neural, inner, order)]
    assert opened[0].members["mean"].members["a"].content_hash == opened[1].content_hash == bundle.content_hash(neural)
    features = [*reversed(FEATURES), Feature(name="other")]
    alone = [each.scorer(features=features) for each in opened]
    calls = []
    of_network = Ranker.forward
    monkeypatch.setattr(Ranker, "forward", lambda self, groups: (calls.append(1), of_network(self, groups))[1])
    together = bundle.scorers_of({each.url: each for each in opened}, features=features).values()
    batches = [documents(seed=seed) for seed in range(3)]
    others = [replace(each, features_NF=each.features_NF[:, [2, 1, 0, 0]]) for each in batches]
    for groups in [*others, others[0]]:
        found = [score(groups) for score in together]
        assert len(calls) == 1
        assert all(torch.equal(scores_N, score(groups)) for scores_N, score in zip(found, alone, strict=True))
        calls.clear()


@pytest.mark.slow
@pytest.mark.parametrize("numeric", ["none", "standard", "log1p_standard", "quantile_normal"])
def test_a_ranker_scores_the_same_once_loaded(tmp_path: Path, numeric: str) -> None:
    url, ranker, groups = str(tmp_path / "out"), trained_ranker(numeric), documents(seed=1)
    bundle.save_ranker(url, ranker, about())
    opened = bundle.load(url)
    assert torch.equal(opened.scorer()(groups), ranker(groups).detach())
    assert opened.scorer()(QueryGroups(torch.zeros(0, 3), torch.tensor([0]))).shape == (0,)
    assert opened.kind == "neural"
    assert opened.features == FEATURES
    assert opened.config == {"seed": 3, "network": {"width": 16}}
    assert opened.metrics == {"validation_ndcg@5": 0.5, "epoch": 7, "lost": None}
    assert (opened.dataset_hash, opened.made_by) == ("abc", {"stage": "test"})
    x_NF = opened.transform()(groups.features_NF)
    assert torch.equal(opened.encoder().eval()(x_NF), ranker.embed(groups).documents_ND)


def test_a_score_depends_on_its_document_alone(neural: str) -> None:
    score, groups = bundle.load(neural).scorer(), documents()
    scores_N = score(groups)
    assert not scores_N.requires_grad
    order = torch.tensor([1, 0, 1])
    expected_N = torch.cat([scores_N[20:], scores_N[:20], scores_N[20:]])
    torch.testing.assert_close(score(groups.select(order)), expected_N, rtol=1e-5, atol=1e-5)
    alone = [score(QueryGroups(row_1F, torch.tensor([0, 1]))) for row_1F in groups.features_NF.split(1)]
    torch.testing.assert_close(torch.cat(alone), scores_N, rtol=1e-5, atol=1e-5)


def test_a_pretrained_encoder_goes_on_but_does_not_score(tmp_path: Path) -> None:
    url, model, groups = str(tmp_path / "out"), Pretrained(trained_ranker()).eval(), documents()
    bundle.save_pretrained(url, model, about())
    opened = bundle.load(url)
    assert opened.kind == "pretrained"
    encoder = opened.encoder()
    x_NF = opened.transform()(groups.features_NF)
    assert torch.equal(encoder.eval()(x_NF), model.encoder(model.transform(groups.features_NF)))
    assert encoder.train().blocks[0].first.weight.requires_grad
    assert opened.architecture.projector == ProjectorConfig(output=4, batch_norm=True)
    with pytest.raises(InputError, match=r"cannot score; finetune it first"):
        opened.scorer()


def test_trees_score_as_lightgbm_does(tmp_path: Path) -> None:
    url, (booster, text), groups = str(tmp_path / "out"), trees(), documents()
    bundle.save_trees(url, {"model": text.encode()}, bundle.TreesArchitecture(), about())
    opened = bundle.load(url)
    known_N = groups.features_NF[:, 2] % 1000 == 0
    x_NF = groups.features_NF.numpy().copy()
    x_NF[:, 2] = np.where(known_N, x_NF[:, 2] / 1000, np.nan)
    assert (~known_N).sum() == 1
    for threads in (1, 2):
        np.testing.assert_array_equal(opened.scorer(threads=threads)(groups).numpy(), booster.predict(x_NF))
    assert opened.scorer()(QueryGroups(torch.zeros(0, 3), torch.tensor([0]))).shape == (0,)
    assert (Path(url) / "model.txt").read_text() == text
    with pytest.raises(InputError, match="holds trees; name a bundle with an encoder to start from"):
        bundle.load(url, bundle.EncoderBundle)


@pytest.mark.parametrize("kind", ["neural", "trees"])
def test_features_are_matched_by_name(neural: str, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    url = neural if kind == "neural" else str(tmp_path / "trees")
    if kind == "trees":
        bundle.save_trees(url, {"model": trees()[1].encode()}, bundle.TreesArchitecture(), about())
    opened, groups = bundle.load(url), documents()
    price, age, brand = FEATURES
    extra_N1 = torch.ones(groups.n_documents, 1)
    x_NF = torch.cat([extra_N1, groups.features_NF[:, [2, 0]], extra_N1, groups.features_NF[:, [1]]], dim=1)
    there = [Feature(name="new"), brand, price, Feature(name="more", kind="categorical"), age]
    caplog.set_level("INFO", "ltrscale")
    scorers = [opened.scorer(features=there) for _ in range(2)]
    expected_N = opened.scorer()(groups)
    for scorer in scorers:
        assert torch.equal(scorer(QueryGroups(x_NF, groups.offsets_Q1)), expected_N)
    assert not caplog.records  # a trained model leaves aside what it has not learnt from
    for features, message in (
        (
            [brand],
            r"2 of its 3 features are not in the data: 'price' \(numeric, there missing\), 'age' \(numeric, there",
        ),
        (
            [price, Feature(name="age", kind="categorical"), brand],
            r"1 of .*: 'age' \(numeric, there categorical\); prep",
        ),
        ([price, age], r"1 of its 3 features are not in the data: 'brand' \(categorical, there missing\)"),
    ):
        with pytest.raises(InputError, match=f"^{url}: {message}") as raised:
            opened.scorer(features=features)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["config.json", "weights.safetensors"])
def test_a_damaged_or_missing_file_is_named(neural: str, name: str) -> None:
    path = Path(neural) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}: .*hash differs"):
        bundle.load(neural)
    path.unlink()
    with pytest.raises(InputError, match=rf"{name}: no such file"):
        bundle.load(neural)


def test_what_is_no_bundle_is_named(neural: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bundle is committed there; the path does not exist"):
        bundle.load(str(tmp_path / "nothing"))
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"no bundle is committed there; it has no manifest\.json"):
        bundle.load(str(tmp_path / "else"))
    shutil.copytree(neural, tmp_path / "else" / "model")
    with pytest.raises(InputError, match=rf"name one below it: {tmp_path}/else/model$"):
        bundle.load(str(tmp_path / "else"))
    path = Path(neural) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "version": 3}))
    with pytest.raises(InputError, match=r"manifest\.json: a bundle of version 3, .* reads version 2"):
        bundle.load(neural)
    path.write_text(json.dumps({**manifest, "format": "ltrscale-dataset"}))
    with pytest.raises(InputError, match="not a bundle but 'ltrscale-dataset'"):
        bundle.load(neural)


def test_messages_tell_the_kinds_apart() -> None:
    texts = [bundle_class.holds for bundle_class, _ in _CLASSES.values()]
    assert len({*texts}) == len(texts)


def as_version_1(url: str) -> None:
    """Rewrite a bundle as it was written up to 2026-11."""
    path = Path(url) / "manifest.json"
    manifest = json.loads(path.read_text())
    keys = {"neural": "architecture", "combined": "architecture", "pretrained": "architecture", "feature": "order"}
    for file in manifest["files"]:
        if file["path"].endswith("config.json"):
            config = json.loads((Path(url) / file["path"]).read_text())
            part = {keys.get(config["kind"], config["kind"]): config.pop("part")}
            none = dict.fromkeys(("architecture", "trees", "order", "blend", "in_context"))
            kind = {"combined": "neural"}.get(config["kind"], config["kind"])
            content = json.dumps({**config, **none, **part, "kind": kind}).encode()
            (Path(url) / file["path"]).write_bytes(content)
            file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps({**manifest, "version": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["neural", "combined", "trees", "blend"])
def test_bundles_of_version_1_score_as_before(neural: str, tmp_path: Path, kind: str) -> None:
    url = neural if kind == "neural" else str(tmp_path / "other")
    match kind:
        case "combined":
            bundle.save_ranker(url, MeanRanker([trained_ranker(), trained_ranker()]), about())
        case "trees":
            bundle.save_trees(url, {"model": trees()[1].encode()}, bundle.TreesArchitecture(), about())
        case "blend":
            order = str(tmp_path / "order")
            bundle.save_order(order, bundle.FeatureOrder(feature="age"), about(features=FEATURES[1:2]))
            members = {"network": neural, "order": order}
            bundle.save_blend(url, bundle.Blend(weights=dict.fromkeys(members, 0.5)), about(), members)
    before = bundle.load(url).scorer()(documents())
    as_version_1(url)
    opened = bundle.load(url)
    assert opened.kind == kind
    assert torch.equal(opened.scorer()(documents()), before)


def test_where_some_bundles_are_trusted_no_other_is_opened(
    neural: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = bundle.content_hash(neural)
    trusted = tmp_path / "trusted.txt"
    monkeypatch.setenv("LTRSCALE_TRUSTED_BUNDLES", str(trusted))
    with pytest.raises(InputError, match=r"trusted\.txt: no such file"):
        bundle.load(neural)
    trusted.write_text(f"# ours\n{'0' * 64}\n# {digest}\n")
    for read in (bundle.load, bundle.content_hash):
        with pytest.raises(InputError, match=rf"its content hash {digest} is not in .*trusted\.txt"):
            read(neural)
    trusted.write_text(f"{'0' * 64}\n  {digest} # the one in production\r\n")
    assert bundle.load(neural).scorer()(documents()).isfinite().all()
    Path(neural, "config.json").write_bytes(b"{}")
    with pytest.raises(InputError, match="hash differs"):
        bundle.load(neural)


def change(url: str, name: str, content: bytes) -> None:
    """Replace a file of a bundle, and its hash in the manifest."""
    path, manifest = Path(url, storage.MANIFEST), bundle.read_bundle_manifest(url)
    for file in manifest["files"]:
        if file["path"] == name:
            file |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    path.write_text(json.dumps(manifest))
    Path(url, name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("config.json", b'"width": 16', b'"width": 17', "the architecture has other weights"),
        ("config.json", b'"width": 16', b'"width": 1000000', "the architecture has other weights"),
        ("config.json", b"{", b"[" * 100_000, "recursion"),
        ("config.json", b"{", b"", "Extra data"),
        ("config.json", b"{", b"\xff", "decode"),
        ("weights.safetensors", b'"F32"', b'"F16"', "invalid|Invalid"),
        ("weights.safetensors", b"encoder", b"encodes", "the architecture has other weights"),
        ("weights.safetensors", b"transform.numeric_F", b"transform.numeric_X", "its network reads"),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(
    neural: str, name: str, old: bytes, new: bytes, reason: str
) -> None:
    content = Path(neural, name).read_bytes()
    assert old in content
    change(neural, name, content.replace(old, new, 1))
    with pytest.raises(InputError, match=f"neural.*: the bundle's files do not fit each other .*({reason})"):
        bundle.load(neural).scorer()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cardinalities_C": torch.tensor([1 << 50])}, "the state is one of another transform"),
        ({"cardinalities_C": torch.tensor([-5])}, "the cardinalities are not those"),
        ({"cardinalities_C": torch.tensor([6, 6])}, "the cardinalities are not those"),
        ({"codes_V": torch.zeros(99)}, "the state is one of another transform"),
    ],
)
def test_a_transform_of_other_sizes_is_refused_before_memory_is_taken(
    neural: str, changes: dict[str, torch.Tensor], reason: str
) -> None:
    weights = bundle.load(neural).weights() | {f"transform.{name}": value for name, value in changes.items()}
    change(neural, "weights.safetensors", safetensors.torch.save(weights))
    for read in (lambda opened: opened.scorer(), lambda opened: opened.transform(), lambda opened: opened.encoder()):
        with pytest.raises(InputError, match=f"the bundle's files do not fit each other .*{reason}"):
            read(bundle.load(neural))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"blocks": 2', '"blocks": 1000000000', "blocks: .* less than or equal to 1000"),
        ('"width": 16', '"width": 1000000000000', "width: .* less than or equal to 1000000"),
        ('"kind": "plain"', '"kind": "plr", "embedding": 100000000', "numbers.* less than or equal to 1000000"),
        ('"kind": "resnet"', f'"kind": "mlp", "hidden": {[8] * 100_000}', "hidden: .* at most 1000 items"),
    ],
)
def test_an_architecture_larger_than_any_is_refused(neural: str, old: str, new: str, reason: str) -> None:
    content = Path(neural, "config.json").read_text()
    assert old in content
    change(neural, "config.json", content.replace(old, new, 1).encode())
    with pytest.raises(InputError, match=rf"config\.json: part: .*{reason}"):
        bundle.load(neural)


def named(url: str, features: Sequence[Feature]) -> None:
    """Change the features that a bundle names."""
    config = json.loads(Path(url, "config.json").read_text())
    config["features"] = [feature.model_dump() for feature in features]
    change(url, "config.json", json.dumps(config).encode())


def test_a_model_of_another_number_of_features_is_refused_before_it_scores(neural: str, tmp_path: Path) -> None:
    order, reader, pretrained = (str(tmp_path / name) for name in ("order", "reader", "pretrained"))
    examples = replace(documents(), labels_N=torch.arange(60.0) % 2)
    bundle.save_order(order, bundle.FeatureOrder(feature="age"), about(features=FEATURES[1:2]))
    bundle.save_in_context(reader, InContextNetwork(InContextSizes(layers=2)), [examples], about())
    bundle.save_pretrained(pretrained, Pretrained(trained_ranker()), about())  # type: ignore[arg-type]
    many = [Feature(name=f"f{number}") for number in range(5000)]
    for url in (neural, order, reader):
        named(url, many)
        with pytest.raises(InputError, match=f"{url}: .*features"):
            bundle.load(url).scorer(features=many)
    named(pretrained, many)
    with pytest.raises(InputError, match=r"its network reads \[3\] features, and config.json names 5000"):
        bundle.load(pretrained, bundle.EncoderBundle).encoder()


def test_an_in_context_network_of_other_sizes_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    url = str(tmp_path / "reader")
    examples = replace(documents(), labels_N=torch.arange(60.0) % 2)
    bundle.save_in_context(url, InContextNetwork(InContextSizes(layers=2)), [examples], about())
    content = Path(url, "config.json").read_text()
    for old, new, reason in (
        ('"state": 32', '"state": 1000000', "the architecture has other weights"),
        ('"layers": 2', '"layers": 1000000', "layers: .* less than or equal to 1000"),
        ('"readings": 1', '"readings": 1000000', "readings: .* less than or equal to 100"),
    ):
        assert old in content
        change(url, "config.json", content.replace(old, new).encode())
        with pytest.raises(InputError, match=reason):
            bundle.load(url).scorer()


def test_bundles_inside_a_bundle_have_a_bound_at_any_depth(
    neural: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, outer = str(tmp_path / "inner"), str(tmp_path / "outer")
    for url, members in ((inner, {"a": neural, "b": neural}), (outer, {"mean": inner, "network": neural})):
        bundle.save_blend(url, bundle.Blend(weights=dict.fromkeys(members, 0.5)), about(), members)
    assert len(bundle.load(outer).members) == 2
    monkeypatch.setattr("ltrscale.bundle.contents._MOST_MEMBERS", 3)
    with pytest.raises(InputError, match="outer: holds 4 bundles, and 3 are the most; blend or stack fewer"):
        bundle.load(outer)
    with pytest.raises(InputError, match="again: holds 4 bundles, and 3 are the most"):
        bundle.save_blend(str(tmp_path / "again"), bundle.Blend(weights=dict.fromkeys(members, 0.5)), about(), members)
    assert not (tmp_path / "again").exists()
    assert bundle.load(inner).scorer()(documents()).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"features_C": np.array([3])}, "reads other features than the 3"),
        ({"features_C": np.array([-1])}, "reads other features than the 3"),
        ({"features_C": np.array([0.0])}, "reads other features than the 3"),
        ({"mean_C": np.zeros(2)}, "arrays of the projection do not fit"),
        ({"components_KC": np.zeros((1, 2))}, "arrays of the projection do not fit"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    fits = {"features_C": np.array([0]), "mean_C": np.zeros(1), "scale_C": np.ones(1), "components_KC": np.ones((1, 1))}
    assert Projection.from_bytes(Projection(**fits).to_bytes(), 3).features_C.tolist() == [0]
    with pytest.raises(ValueError, match=reason):
        Projection.from_bytes(Projection(**fits | changes).to_bytes(), 3)


def test_the_directory_holds_a_card(neural: str) -> None:
    assert {path.name for path in Path(neural).iterdir()} == {
        "config.json", "weights.safetensors", "README.md", "manifest.json",
    }  # fmt: skip
    card = (Path(neural) / "README.md").read_text()
    assert card.startswith("# A neural ranker")
    for text in ("features: 3, 1 of them categorical", "`abc`", "| validation_ndcg@5 | 0.5 |", "| lost | None |"):
        assert text in card
    bundle.save_ranker(neural, trained_ranker("none"), about())
    assert bundle.load(neural).architecture.transform.numeric == "none"


def test_no_pickle_is_written(neural: str) -> None:
    assert {path.suffix for path in Path(neural).iterdir()} == {".json", ".safetensors", ".md"}


@pytest.mark.s3
def test_a_bundle_on_s3(s3: str, tmp_path: Path) -> None:
    url, ranker, groups = storage.join(s3, tmp_path.name), trained_ranker(), documents()
    bundle.save_ranker(url, ranker, about())
    assert torch.equal(bundle.load(url).scorer()(groups), ranker(groups).detach())
