"""Rankers that are made without training: the order of one feature, and labelled groups with a network that reads them.

`pretrain_in_context` has taught that network to read examples.

Shapes: M metrics.
"""

import hashlib
import json
from dataclasses import replace
from importlib.resources import files
from typing import ClassVar

import safetensors.torch
import torch
from pydantic import Field
from safetensors import SafetensorError

from ltrscale import storage
from ltrscale.batch import QueryGroups
from ltrscale.bundle import FeatureOrder, Scorer, facts, order_scorer, save_in_context, save_order
from ltrscale.bundle.opened import loaded
from ltrscale.config import Config, validate
from ltrscale.data.dataset.disjoint import joined_splits
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.relevant import at_most, only_relevant
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.models.examples import InContextRanker, ReadingConfig, drawn_samples
from ltrscale.models.in_context import InContextNetwork, InContextSizes
from ltrscale.progress import Report, log
from ltrscale.ranking.choices import metric_named
from ltrscale.stages.inputs import OutputUrl, hashes_of
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.training.ranking import LabelledData

_VALIDATED = ("ndcg@5", "ndcg@10")


class FeatureJob(LabelledStage):
    """Make the order of one feature a bundle; it learns nothing, and only the labels of validation are read."""

    stage: ClassVar = "feature"
    order: FeatureOrder

    def work(self, origin: Origin, report: Report) -> None:
        """Evaluate the order on the validation groups and commit the bundle."""
        data = LabelledData.from_splits(self.splits.train, self.splits.validation, without=())
        data = data.serving([self.order.among(data.train.features)], whose=self.out, on_purpose=True)
        assert data.judged is not None
        metrics = validated(data.judged, order_scorer(self.order))
        report(metrics)
        save_order(self.out, self.order, facts(data.train, self.order, metrics=metrics, made_by=origin))
        log.info("committed %s", self.out)


def validated(judged: Selection, score: Scorer) -> dict[str, float]:
    """NDCG@5 and NDCG@10 of an untrained ranker over the judged groups."""
    values = []
    for groups in iterate(judged):
        assert groups.labels_N is not None
        scored = score(groups), groups.labels_N, groups.offsets_Q1
        values.append(torch.stack([metric_named(metric).values(*scored) for metric in _VALIDATED]))
    means_M = torch.cat(values, dim=1).double().nanmean(dim=1).tolist()
    return {f"validation_{metric}": mean for metric, mean in zip(_VALIDATED, means_M, strict=True)}


WEIGHTS, SIZES = "weights.safetensors", "sizes"


class InContextConfig(Config):
    """Which labelled groups a pretrained network reads."""

    groups: int = Field(2000, ge=1)
    """Labelled groups among which samples are drawn: the training groups with a relevant document, or a random sample
    if there are more. Those without one are not read: of a click log they would fill most of a sample."""
    reading: ReadingConfig = ReadingConfig()
    pretrained: OutputUrl | None = None
    """The directory of a network that jobs.pretrain made with `in_context`; empty takes that of the package."""


class InContextJob(LabelledStage):
    """Make labelled groups a ranker: a network that was pretrained on synthetic problems reads them as examples."""

    stage: ClassVar = "in_context"
    in_context: InContextConfig = InContextConfig()

    def check(self) -> None:
        """Refuse overlapping splits, and scores used as labels, because they may be negative."""
        super().check()
        if self.splits.train.scores is not None:
            raise InputError("splits.train.scores: examples are read with labels, not scores; leave it out")

    def inputs(self) -> dict[str, str]:
        """Content of the data and of the network's weights."""
        return {**super().inputs(), **weights_of(self.in_context)}

    def work(self, origin: Origin, report: Report, *, refit: bool = False) -> None:
        """Sample the examples, evaluate the ranker on the validation groups, and commit the bundle.

        A `refit` reads groups of both splits and evaluates nothing.

        Raises:
            InputError: no training group has a relevant document, or no numeric feature varies.
        """
        config, validation = self.in_context, None if refit else self.splits.validation
        train = joined_splits(self.splits.train, self.splits.validation) if refit else self.splits.train
        data = LabelledData.from_splits(train, validation, without=())
        examples = at_most(only_relevant(data.train), config.groups, config.reading.seed, "examples")
        data = replace(data, train=examples)
        data = data.serving(_numbers(data.train.features, self.out), whose=self.out, on_purpose=True)
        samples = drawn_samples(QueryGroups.concat(list(iterate(data.train))), config.reading)
        log.info("in context: samples %s, documents %s", len(samples), sum(part.n_documents for part in samples))
        network = pretrained_network(config.pretrained)
        metrics = {} if data.judged is None else validated(data.judged, InContextRanker(network, samples))
        report(metrics)
        save_in_context(self.out, network, samples, facts(data.train, config, metrics=metrics, made_by=origin))
        log.info("committed %s", self.out)


def _numbers(features: tuple[Feature, ...], whose: str) -> list[Feature]:
    """The numeric features; the network cannot read categories."""
    numbers = [feature for feature in features if feature.kind == "numeric"]
    if categories := [feature.name for feature in features if feature.kind != "numeric"]:
        log.info("in context: categories are not read: %s", ", ".join(categories))
    if not numbers:
        raise InputError(f"{whose}: no feature is a number, and an in-context network reads numbers alone")
    return numbers


def weights_of(config: InContextConfig) -> dict[str, str]:
    """The content hash of the network's weights, by their location."""
    shipped = {} if config.pretrained else {"network": hashlib.sha256(_shipped()).hexdigest()}
    return {**hashes_of(config), **shipped}


def pretrained_network(url: str | None = None) -> InContextNetwork:
    """The network that comes with the package, or one that jobs.pretrain made.

    Raises:
        InputError: the weights are missing or damaged.
    """
    if url is None:
        return _network(_shipped(), "the weights of the package")
    manifest = storage.read_manifest(url)
    if manifest is None or WEIGHTS not in storage.listed_in(manifest):
        raise InputError(f"{url}: no weights of an in-context network there; make them with jobs.pretrain, in_context")
    return _network(storage.read_verified(url, WEIGHTS, manifest), url)


def _network(data: bytes, whose: str) -> InContextNetwork:
    """The network from a weights file, whose header has its sizes."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        sizes = json.loads(header.get("__metadata__", {}).get(SIZES, "{}"))
        of_network = validate(InContextSizes, sizes, whose)
        network = loaded(lambda: InContextNetwork(of_network), safetensors.torch.load(data))
    except (SafetensorError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise InputError(f"{whose}: not the weights of an in-context network ({error})") from error
    return network.eval()


def _shipped() -> bytes:
    return files("ltrscale.training").joinpath("in_context.safetensors").read_bytes()
