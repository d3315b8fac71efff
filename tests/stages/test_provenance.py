"""Which bundles share a draw of labels, by what their jobs recorded."""

import json
from typing import Any

import pytest

from ltrscale.bundle.contents import Provenance
from ltrscale.config import made_by, validate
from ltrscale.data.dataset.split import Split

SPLITS = {
    "train": {"data": ("one",), "periods": ("a",), "labelled_fraction": 0.1},
    "validation": {"data": ("one",), "periods": ("b",)},
}


def labels(*, content: str = "hash", url: str = "one", **changes: dict[str, Any]) -> str | None:
    splits = [Split(**{**SPLITS[name], "data": (url,), **changes.get(name, {})}) for name in SPLITS]
    identity = {"config": {}, "splits": [split.model_dump(mode="json") for split in splits]}
    origin = json.loads(json.dumps(made_by("finetune", identity, {url: content})))
    return validate(Provenance, origin, "bundle").labels()


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"labelled_seed": 1}},
        {"train": {"labelled_fraction": 0.2}},
        {"train": {"labelled_fraction": 1.0, "labelled_groups": 7}},
        {"train": {"labelled_fraction": 1.0, "relevant_groups": 7}},
        {"train": {"labels": "relevance"}},
        {"train": {"periods": ("c",)}},
        {"validation": {"labelled_groups": 7}},
        {"content": "other"},
    ],
)
def test_other_labels_are_another_draw(changes: dict[str, Any]) -> None:
    assert labels(**changes) != labels()


def test_the_place_of_the_data_and_seeds_of_nothing_are_no_draw() -> None:
    assert labels(url="two") == labels()
    assert labels(validation={"labelled_seed": 5}) == labels()
    everything = {"labelled_fraction": 1.0}
    assert labels(train={**everything, "labelled_seed": 1}) == labels(train=everything)
    first = {"labelled_sample": "first"}
    assert labels(train={**first, "labelled_seed": 1}) == labels(train=first)


def test_bundles_of_no_labels_state_none() -> None:
    assert validate(Provenance, {}, "bundle").labels() is None
    pretrained = {"stage": "pretrain", "config": {"splits": [{"data": ["one"]}]}, "inputs": {"one": "hash"}}
    assert validate(Provenance, pretrained, "bundle").labels() is None
