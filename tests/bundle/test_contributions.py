"""What each feature adds to the difference of two scores, for every kind of bundle, and whether it is the right one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WriteDataset
from exported_models import network, saved, trees
from reference import shapley

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.bundle import TreesArchitecture
from ltrscale.bundle.boosters import import_catboost
from ltrscale.bundle.opened import Computing
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.models.in_context import InContextNetwork, InContextSizes
from ltrscale.models.ranker import MeanRanker
from ltrscale.training.finetune import FinetuneJob

NAMES = ("first", "second", "third")


@pytest.fixture(scope="module")
def numbers(write_dataset: WriteDataset) -> str:
    """Groups of three features, the last one sometimes missing; the first and a product make the labels."""
    rng, weeks = np.random.default_rng(0), {}
    for week in range(1, 5):
        groups = []
        for _ in range(40):
            x_LF = rng.normal(size=(8, 3)).astype(np.float32)
            labels_L = np.clip(np.round(x_LF[:, 0] + x_LF[:, 1] * x_LF[:, 2] + 1), 0, 4)
            x_LF[rng.random(8) < 0.1, 2] = np.nan
            groups.append((x_LF, labels_L.astype(np.float32)))
        weeks[f"2026-W0{week}"] = groups
    return write_dataset(weeks, [Feature(name=name) for name in NAMES])


def batch_of(data: str) -> QueryGroups:
    return next(iter(iterate(select(Split(data=(data,), periods=("2026-W04",)), labelled=False), docs_per_batch=200)))


def pairs_of(groups: QueryGroups) -> torch.Tensor:
    """The first two documents of each list that has two, both ways."""
    first_M = groups.offsets_Q1[:-1][groups.lengths_Q > 1]
    return torch.cat([torch.stack([first_M, first_M + 1], 1), torch.stack([first_M + 1, first_M], 1)])


def walked(library: str, content: bytes, folder: Path) -> list[shapley.Tree]:
    """The trees of a model file, for the oracle."""
    match library:
        case "lightgbm":
            import lightgbm

            return shapley.lightgbm_trees(lightgbm.Booster(model_str=content.decode()))
        case "xgboost":
            import xgboost

            return shapley.xgboost_trees(xgboost.Booster(model_file=bytearray(content)))
        case _:
            model = import_catboost().CatBoost()
            model.load_model(blob=content)
            model.save_model(str(folder / "model.json"), format="json")
            return shapley.catboost_trees(json.loads((folder / "model.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["lightgbm", "xgboost", "catboost"])
def test_the_parts_of_trees_are_exact_shapley_values_subtracted(library: str, numbers: str, tmp_path: Path) -> None:
    opened = bundle.load(trees(tmp_path / "model", numbers, library))
    groups = batch_of(numbers)
    pairs_P2 = pairs_of(groups)[::9]
    found = opened.explainer(Computing(threads=1), opened.features)(groups, pairs_P2)
    forest = walked(library, opened.content, tmp_path)
    parts_NF = {row: shapley.shapley(forest, groups.features_NF[row].tolist()) for row in pairs_P2.unique().tolist()}
    expected_PF = torch.tensor([np.subtract(parts_NF[a], parts_NF[b]).tolist() for a, b in pairs_P2.tolist()])
    torch.testing.assert_close(found.features_PF.float(), expected_PF, rtol=1e-4, atol=1e-6)
    assert found.features_PF.abs().max() > 1e-3


def about(features: tuple[Feature, ...]) -> bundle.BundleFacts:
    return bundle.BundleFacts(config={}, features=features, dataset_hash="", metrics={}, made_by={})


def in_context(folder: Path, data: str) -> str:
    dataset = open_dataset(data)
    features = tuple(f for f in dataset.manifest.features if f.kind == "numeric")[:5]
    split = Split(data=(data,), periods=("2026-W01",))
    selection = select(split, labelled=True).serving(features, whose="the test")
    examples = next(iter(iterate(selection, docs_per_batch=200)))
    torch.manual_seed(0)
    untrained = InContextNetwork(InContextSizes(layers=2))
    bundle.save_in_context(str(folder), untrained, [examples], about(features))
    return str(folder)


def order(folder: Path, data: str) -> str:
    feature = next(f for f in open_dataset(data).manifest.features if f.kind == "numeric")
    bundle.save_order(str(folder), bundle.FeatureOrder(feature=feature.name), about((feature,)))
    return str(folder)


def context(folder: Path, data: str) -> str:
    parts = {"kind": "rankformer", "heads": 2, "feedforward": 8, "layers": 1}
    return saved(folder, data, network(data, transform={"per_query": True}, encoder={"kind": "mlp"}, context=parts))


def mean(folder: Path, data: str) -> str:
    return saved(folder, data, MeanRanker([network(data, s, encoder={"kind": "dcnv2", "hidden": [8]}) for s in (0, 1)]))


def blend(folder: Path, data: str) -> str:
    members = {"trees": trees(folder / "trees", data, "lightgbm"), "order": order(folder / "order", data)}
    weights = bundle.Blend(weights={"trees": 0.75, "order": 0.25})
    bundle.save_blend(str(folder / "blend"), weights, about(open_dataset(data).manifest.features), members)
    return str(folder / "blend")


def stack(folder: Path, data: str) -> str:
    """Trees that see one feature and the score of a network."""
    import lightgbm

    features = open_dataset(data).manifest.features
    inside = saved(folder / "inside", data, network(data, encoder={"kind": "mlp", "hidden": [8]}))
    columns_NG = np.random.default_rng(0).normal(size=(500, 2))
    parameters = {"num_leaves": 7, "verbosity": -1, "num_threads": 1}
    grown = lightgbm.train(parameters, lightgbm.Dataset(columns_NG, columns_NG.sum(1)), 20)
    first = next(f.name for f in features if f.kind == "numeric")
    architecture = TreesArchitecture(sees=(first,), members=("inside",), standardise=True)
    models = {"model": grown.model_to_string().encode()}
    bundle.save_trees(str(folder / "stack"), models, architecture, about(features), members={"inside": inside})
    return str(folder / "stack")


MAKE: dict[str, Callable[[Path, str], str]] = {
    "lightgbm": lambda folder, data: trees(folder, data, "lightgbm"),
    "xgboost": lambda folder, data: trees(folder, data, "xgboost", min_child_weight=1.0),
    "catboost": lambda folder, data: trees(folder, data, "catboost"),
    "fewer features": lambda folder, data: trees(folder, data, "lightgbm", leave_out=("c_*",)),
    "stack": stack,
    "order": order,
    "blend": blend,
    "context": context,
    "mean": mean,
    "in_context": in_context,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_parts_add_up_to_the_difference_whatever_the_bundle(
    make: Callable[[Path, str], str], synthetic_dataset: str, tmp_path: Path
) -> None:
    opened, features = bundle.load(make(tmp_path, synthetic_dataset)), open_dataset(synthetic_dataset).manifest.features
    shuffled = features[::-1]
    groups = batch_of(synthetic_dataset)
    groups = groups.select(torch.arange(3))
    groups = replace(groups, features_NF=groups.features_NF.flip(1))
    pairs_P2 = pairs_of(groups)
    scores_N = opened.scorer(features=shuffled, threads=1)(groups).double()
    found = opened.explainer(Computing(threads=1), shuffled)(groups, pairs_P2)
    difference_P = scores_N[pairs_P2[:, 0]] - scores_N[pairs_P2[:, 1]]
    assert difference_P.abs().max() > 1e-3
    torch.testing.assert_close(found.total_P, difference_P, rtol=1e-3, atol=1e-5)
    assert found.beside_P.abs().max() < 1e-4 * scores_N.abs().max()
    half = len(pairs_P2) // 2
    torch.testing.assert_close(found.features_PF[:half], -found.features_PF[half:], rtol=1e-3, atol=1e-4)
    unread = torch.tensor([feature not in opened.features for feature in shuffled])
    assert (found.features_PF[:, unread] == 0).all()


def planted(rng: np.random.Generator, driver: int) -> np.ndarray:
    """A list of ten; the first two documents differ in what matters by the driver, and in all else that does not."""
    x_LF = rng.normal(size=(10, 6)).astype(np.float32)
    x_LF[0, :3] = x_LF[1, :3] + rng.normal(scale=0.2, size=3)
    x_LF[:2, driver] = 1.2, -1.0
    return x_LF


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightgbm", "neural"])
def test_a_planted_driver_comes_first_in_95_percent_of_pairs(
    kind: str, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    rng, weeks = np.random.default_rng(1), {}
    for week in range(1, 5):
        lists = rng.normal(size=(150, 10, 6)).astype(np.float32)
        weeks[f"2026-W0{week}"] = [
            (x_LF, np.clip(np.round(x_LF[:, :3].sum(1) + rng.normal(scale=0.3, size=10)), 0, 4).astype(np.float32))
            for x_LF in lists
        ]
    data = write_dataset(weeks, [Feature(name=f"f{i}") for i in range(6)])
    if kind == "lightgbm":
        url = trees(tmp_path / "model", data, kind, num_trees=60)
    else:
        splits = {"train": ["2026-W01", "2026-W02"], "validation": ["2026-W03"]}
        values = {
            "out": str(tmp_path / "model"),
            "splits": {name: {"data": data, "periods": periods} for name, periods in splits.items()},
            "finetune": {
                "network": {"encoder": {"kind": "mlp", "hidden": [32]}},
                "head_epochs": 1,
                "epochs": 20,
                "stream": {"docs_per_batch": 400},
                "optimizer": {"learning_rate": 5e-3},
            },
        }
        validate(FinetuneJob, values, "test").run()
        url = str(tmp_path / "model")
    opened = bundle.load(url)
    drivers = rng.integers(3, size=200)
    x_NF = torch.from_numpy(np.concatenate([planted(rng, driver) for driver in drivers]))
    groups = QueryGroups(x_NF, torch.arange(0, len(x_NF) + 1, 10))
    pairs_P2 = groups.offsets_Q1[:-1, None] + torch.tensor([0, 1])
    found = opened.explainer(Computing(threads=1), opened.features)(groups, pairs_P2)
    assert (found.features_PF.argmax(1).numpy() == drivers).mean() >= 0.95
