"""A ranker made of examples: labelled groups go into a bundle with a pretrained network that reads them.

Nothing is trained, so it takes a moment. The network learnt to read examples on synthetic problems alone.
"""

import hashlib
from importlib.resources import files
from typing import ClassVar

import safetensors.torch
from pydantic import Field

from ltrscale.batch import QueryGroups
from ltrscale.bundle import facts, save_in_context
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.stream.batches import iterate
from ltrscale.errors import InputError
from ltrscale.models.examples import InContextRanker, ReadingConfig, samples
from ltrscale.models.in_context import InContextNetwork, InContextSizes
from ltrscale.progress import Report, log
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.training.combine import validated
from ltrscale.training.ranking import LabelledData


class InContextConfig(Config):
    """Which labelled groups a pretrained network reads."""

    groups: int = Field(2000, ge=1)
    """Labelled groups among which samples are drawn: the training groups, or a random sample if there are more."""
    reading: ReadingConfig = ReadingConfig()


class InContextJob(LabelledStage):
    """Make labelled groups a ranker: a network that was pretrained on synthetic problems reads them as examples."""

    stage: ClassVar = "in_context"
    in_context: InContextConfig = InContextConfig()

    def inputs(self) -> dict[str, str]:
        """The data, and the weights of the network."""
        return {**super().inputs(), "network": hashlib.sha256(_weights()).hexdigest()}

    def own_settings(self) -> InContextConfig:
        """What is read."""
        return self.in_context

    def work(self, origin: Origin, report: Report) -> None:
        """Sample the examples, measure the ranker on the validation groups, and commit the bundle.

        Raises:
            InputError: no training group has a relevant document, or no numeric feature varies.
        """
        config, train = self.in_context, self.splits.train
        data = LabelledData.of(train, self.splits.validation, without=())
        if data.train.n_groups > config.groups and not train.size:
            sampled = train.replace(relevant_groups=config.groups)
            data = LabelledData.of(sampled, self.splits.validation, without=())
        data = data.serving(_numbers(data.train.features, self.out), whose=self.out)
        readings = samples(QueryGroups.concat(list(iterate(data.train))), config.reading)
        log.info("in context: readings %s, documents %s", len(readings), sum(part.n_documents for part in readings))
        network = pretrained_network()
        assert data.judged is not None
        metrics = validated(data.judged, InContextRanker(network, readings))
        report(metrics)
        save_in_context(self.out, network, readings, **facts(data.train, config, metrics=metrics, made_by=origin))
        log.info("committed %s", self.out)


def _numbers(features: tuple[Feature, ...], whose: str) -> list[Feature]:
    """The features without categories, which the network cannot read."""
    numbers = [feature for feature in features if feature.kind == "numeric"]
    if categories := [feature.name for feature in features if feature.kind != "numeric"]:
        log.info("in context: categories are not read: %s", ", ".join(categories))
    if not numbers:
        raise InputError(f"{whose}: no feature is a number, and an in-context network reads numbers alone")
    return numbers


def pretrained_network() -> InContextNetwork:
    """The network that comes with the package, pretrained on problems of `ltrscale/simulate/problems.py`."""
    network = InContextNetwork(InContextSizes())
    network.load_state_dict(safetensors.torch.load(_weights()))
    return network.eval()


def _weights() -> bytes:
    return files("ltrscale.training").joinpath("in_context.safetensors").read_bytes()
