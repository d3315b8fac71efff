"""The final model: a model trained again, on its training and validation groups together.

Validation found how long to train. Its groups, the latest ones, are then more useful as training data.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field

from ltrscale import bundle
from ltrscale.bundle import Bundle
from ltrscale.config import Config, Operational, by_kind, validate
from ltrscale.data.dataset.disjoint import joined_splits
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.errors import InputError
from ltrscale.experiments.methods.base import Method, MethodName
from ltrscale.progress import Report
from ltrscale.stages.inputs import bundle_hashes, dataset_hashes
from ltrscale.stages.provenance import Provenance
from ltrscale.stages.stage import Origin, Settings, with_splits
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.resumption import TrainingStage
from ltrscale.training.untrained import InContextConfig, InContextJob, weights_of
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob


class RefitSettings(Config):
    """The final models of a pipeline."""

    methods: tuple[MethodName, ...] = Field(min_length=1)
    """Methods of one model: kind neural, gbdt without ensemble, tuned, or in_context."""
    test: bool = False
    """Learn from the test periods too: a model for use, with nothing left to test it on."""

    def check(self, methods: Mapping[str, Method]) -> None:
        """Raise a ValueError unless the methods exist, and their bundles can be refitted."""
        for name in self.methods:
            if name not in methods:
                raise ValueError(f"refit.methods: {name!r} is not among the methods {', '.join(methods)}")
            if not methods[name].is_one_model:
                raise ValueError(
                    f"refit.methods: {name!r} makes several models; name a method of kind neural, gbdt without "
                    "ensemble, tuned, or in_context"
                )


class _Learned(NamedTuple):
    """The bundle's record of how it was made."""

    opened: Bundle
    settings: FinetuneConfig | GBDTConfig | InContextConfig
    train: Split
    validation: Split
    start: str | None

    @classmethod
    def read(cls, url: str) -> Self:
        """Read a bundle's record; an `InputError` if it has several models or is from another kind of job."""
        opened = bundle.load(url)
        origin, stage = validate(Provenance, opened.made_by, url), opened.made_by.get("stage")
        kinds: dict[Any, type[Any]] = {
            "finetune": FinetuneConfig,
            "train_gbdt": by_kind(GBDTConfig).get(str(opened.config.get("kind")), LightGBMConfig),
            "in_context": InContextConfig,
        }
        if stage not in kinds or "ensemble" in opened.config or len(origin.config.splits) != 2:
            raise InputError(
                f"{url}: made by {stage or 'something else'}; a refit is of one network, one model of trees or one "
                "reader of examples that jobs.finetune, jobs.train_gbdt or a pipeline has made: name such a bundle"
            )
        settings = validate(kinds[stage], opened.config, url)
        train, validation = origin.config.splits
        read = {*train.data, *validation.data, train.scores, validation.scores}
        if isinstance(settings, FinetuneConfig) and settings.goals is not None:
            read.add(settings.goals.production)
            settings = settings.replace(goals={"weights": opened.goals})  # those that validation found
        others = [other for other in origin.inputs if other not in read and stage != "in_context"]
        probed = opened.metrics.get("start")  # the best of several encoders
        return cls(opened, settings, train, validation, str(probed) if probed else next(iter(others), None))

    def epochs(self) -> dict[str, int]:
        """The epochs of each phase that validation chose."""
        return {phase: self.opened.count(f"epochs_{phase}") or 0 for phase in ("head", "full")}


class RefitJob(TrainingStage):
    """Train a model once more, on its training and validation groups together, for as long as validation found best."""

    stage: ClassVar = "refit"
    out: Operational[str]
    """Directory of the new bundle."""
    bundle: str
    """Bundle of one network, one model of trees, or examples to read. It records everything that made it: settings,
    splits, and the bundle that it started from; all of these are taken from there, and must still be there."""
    also: Split | None = None
    """Further groups to learn from, such as the test periods of the data set; nothing is left to test the model on."""

    @cached_property
    def _learned(self) -> _Learned:
        return _Learned.read(self.bundle)

    @property
    def _rest(self) -> Split:
        """The groups that join those of the training split."""
        validation = self._learned.validation
        return validation if self.also is None else joined_splits(validation, self.also)

    def identity(self) -> Settings:
        """Settings and periods of the bundle, and the further periods."""
        return with_splits(self._learned.settings, self._learned.train, self._rest)

    def inputs(self) -> dict[str, str]:
        """Content of the data sets, of the bundle, and of the bundle that it started from."""
        settings, start = self._learned.settings, self._learned.start
        bundles = [self.bundle, *([start] if start else [])]
        weights = weights_of(settings) if isinstance(settings, InContextConfig) else {}
        return dataset_hashes([self._learned.train, self._rest]) | bundle_hashes(bundles) | weights

    def work(self, origin: Origin, report: Report) -> None:
        """Train, and commit the bundle."""
        learned = self._learned
        splits = Splits(train=learned.train, validation=self._rest)
        match learned.settings:
            case FinetuneConfig() as network:
                network = network.replace(probe_epochs=0)
                tuned = FinetuneJob(
                    out=self.out, splits=splits, pretrained=learned.start, finetune=network, workers=self.workers
                )
                tuned.work(origin, report, epochs=learned.epochs())
            case InContextConfig() as in_context:
                InContextJob(out=self.out, splits=splits, in_context=in_context).work(origin, report, refit=True)
            case trees:
                number = learned.opened.count("trees") or trees.num_trees
                trees = trees.replace(num_trees=number, early_stopping_rounds=None, minutes=None)
                grown = GBDTJob(out=self.out, splits=splits, gbdt=trees, start=learned.start, workers=self.workers)
                grown.work(origin, report, refit=True)
