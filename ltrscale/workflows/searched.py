"""The jobs whose settings are searched: what a trial of each runs, and how parameters become its settings."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from pydantic import ValidationError

from ltrscale import bundle, storage
from ltrscale import config as configs
from ltrscale.config import Config
from ltrscale.data.dataset.manifest import Dataset, one_view
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.errors import InputError
from ltrscale.launch.workers import ONE, Workers
from ltrscale.storage import join
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.resumption import EPOCHS
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.tuning.search import ReportValue
from ltrscale.tuning.space import Params, Space, assign, find, label
from ltrscale.workflows.origins import bundle_hashes, dataset_hashes
from ltrscale.workflows.runs import heard_by
from ltrscale.workflows.stage import Stage
from ltrscale.workflows.stages import FinetuneJob, PretrainJob
from ltrscale.workflows.tree_stages import GBDTJob


class _SearchedJob(Config):
    """A job whose settings are searched: the stages that a trial runs, and how it is compared with others."""

    kind: str
    splits: Splits
    """Training and validation; the test split is not read."""
    workers: Workers = ONE
    """Workers of each trial. Those of a network share each step, those of trees share the data."""

    @property
    def metric(self) -> str:
        """What trials are compared by: a metric of the bundle that the last stage commits."""
        raise NotImplementedError

    def result(self) -> Config:
        """All that the metric depends on."""
        return self.replace(workers=ONE)

    @property
    def reads(self) -> dict[str, Split]:
        """The splits that a trial reads, by name."""
        return {"train": self.splits.train, "validation": self.splits.validation}

    def inputs(self) -> dict[str, str]:
        """Content hashes of what is read."""
        return dataset_hashes(self.reads.values())

    def stages(self, out: str) -> tuple[Stage, ...]:
        """What a trial runs in a directory, in order."""
        raise NotImplementedError

    def step_of(self, record: Mapping[str, Any]) -> int | None:
        """Where a record of the stage stands, as ASHA counts; None for a record without the metric."""
        raise NotImplementedError

    def run(self, folder: str, report: ReportValue) -> float:
        """Run the stage in a directory, or go on there; returns the metric."""
        (stage,) = self.stages(join(folder, "model"))
        best = -math.inf

        def hear(record: Mapping[str, Any]) -> None:
            nonlocal best
            if (step := self.step_of(record)) is not None:
                best = max(best, record[self.metric])  # which is what the stage would commit there
                report(step, best)

        with heard_by(hear):
            stage.run()
        return _value(stage.out, self.metric)

    def jobs(self, out: str) -> dict[str, Stage]:
        """The stages as jobs of their own, by the name of their config."""
        stages = self.stages(join(out, "best"))
        return {"best.yaml" if len(stages) == 1 else f"best-{stage.stage}.yaml": stage for stage in stages}


class GBDTSearch(_SearchedJob):
    """Boosted trees; ASHA counts trees."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""

    @property
    def metric(self) -> str:
        """That by which training stops."""
        return f"validation_ndcg@{self.gbdt.stop_on}"

    def stages(self, out: str) -> tuple[Stage, ...]:
        """Training."""
        return (GBDTJob(out=out, splits=self.splits, gbdt=self.gbdt, workers=self.workers),)

    def step_of(self, record: Mapping[str, Any]) -> int | None:
        """Trees so far."""
        return record.get("tree")


class FinetuneSearch(_SearchedJob):
    """A network trained with labels; ASHA counts epochs, those of the head first."""

    kind: Literal["finetune"] = "finetune"
    pretrained: str | None = None
    """Bundle to start from; empty starts from random weights."""
    finetune: FinetuneConfig = FinetuneConfig()

    @property
    def metric(self) -> str:
        """That which chooses the epoch."""
        return f"validation_{self.finetune.validation_metric}"

    def result(self) -> Config:
        """All that the metric depends on."""
        return self.replace(workers=ONE, finetune=self.finetune.identity())

    def inputs(self) -> dict[str, str]:
        """Of the data sets and the pretrained bundle."""
        return super().inputs() | bundle_hashes([self.pretrained] if self.pretrained else [])

    def stages(self, out: str) -> tuple[Stage, ...]:
        """Finetuning."""
        shared: dict[str, Any] = {"splits": self.splits, "workers": self.workers}
        return (FinetuneJob(out=out, pretrained=self.pretrained, finetune=self.finetune, **shared),)

    def step_of(self, record: Mapping[str, Any]) -> int | None:
        """Epochs so far, of both phases."""
        if "epoch" not in record or self.metric not in record:
            return None
        before = self.finetune.head_epochs if self.pretrained and record["phase"] != "head" else 0
        return int(record["epoch"] + before)


class PretrainSearch(_SearchedJob):
    """Pretraining, judged by what finetuning makes of it; ASHA counts epochs of pretraining, see `keep_every`."""

    kind: Literal["pretrain"] = "pretrain"
    train: Split | None = None
    """Whose documents are pretrained on; empty takes those of `splits.train`."""
    splits: Splits
    """Training and validation of finetuning; the test split is not read."""
    pretrain: PretrainConfig = PretrainConfig()
    finetune: FinetuneConfig = FinetuneConfig()

    @property
    def metric(self) -> str:
        """That which chooses the epoch of finetuning."""
        return f"validation_{self.finetune.validation_metric}"

    @property
    def documents(self) -> Split:
        """What is pretrained on."""
        return self.train or self.splits.train

    def result(self) -> Config:
        """All that the metric depends on."""
        return self.replace(
            workers=ONE, train=self.documents, pretrain=self.pretrain.identity(), finetune=self.finetune.identity()
        )

    @property
    def reads(self) -> dict[str, Split]:
        """The splits that a trial reads, by name."""
        return {"documents": self.documents, **super().reads}

    def stages(self, out: str) -> tuple[PretrainJob, FinetuneJob]:
        """Pretraining, and finetuning from where it ends."""
        pretrained, finetuned = join(out, "pretrained"), join(out, "finetuned")
        return (
            PretrainJob(out=pretrained, train=self.documents, pretrain=self.pretrain, workers=self.workers),
            FinetuneJob(
                out=finetuned,
                pretrained=pretrained,
                splits=self.splits,
                finetune=self.finetune,
                workers=self.workers,
            ),
        )

    def run(self, folder: str, report: ReportValue) -> float:
        """Pretrain and finetune in a directory, or go on there; returns the metric."""
        pretraining, finetuning = self.stages(folder)

        def finetuned(job: FinetuneJob) -> float:
            with heard_by(None), _same_mode():
                job.run()
            return _value(job.out, self.metric)

        def hear(record: Mapping[str, Any]) -> None:
            if "bundle" in record:
                epoch, out = record["epoch"], f"{finetuning.out}-{record['epoch']:05d}"
                report(epoch, finetuned(finetuning.replace(out=out, pretrained=record["bundle"])))

        for url in storage.children(join(pretraining.out, EPOCHS)):  # of a run that was cut off
            if (manifest := storage.read_manifest(url)) is not None:
                hear({"epoch": manifest["made_by"]["epoch"], "bundle": url})
        with heard_by(hear):
            pretraining.run()
        return finetuned(finetuning)

    def jobs(self, out: str) -> dict[str, Stage]:
        """The stages as jobs of their own; nothing is kept along the way."""
        alone = self.replace(pretrain=self.pretrain.replace(keep_every=None))
        return super(PretrainSearch, alone).jobs(out)


Searched = GBDTSearch | PretrainSearch | FinetuneSearch
SearchedT = TypeVar("SearchedT", bound=Searched)


@contextmanager
def _same_mode() -> Iterator[None]:
    """Finetuning in the middle of pretraining leaves torch's settings as they were."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)


def _value(url: str, metric: str) -> float:
    value = bundle.load(url).metrics[metric]
    if not isinstance(value, int | float):
        raise InputError(f"{url}: its {metric} is {value!r}, which is no number to compare")
    return float(value)


def run_trial(
    job: Searched,
    space: Space,
    params: Params,
    folder: str,
    report: ReportValue,
    *,
    view: Mapping[str, Dataset] | None = None,
) -> float:
    """A trial: the job with these parameters, in this directory, on the data sets as the search sees them."""
    with one_view(view):
        return with_params(job, space, params)[0].run(folder, report)


def with_params(job: SearchedT, space: Space, params: Params) -> tuple[SearchedT, set[str]]:
    """The job with these parameters, and the keys that were used: others are for settings that it has not.

    Keys with a `when` come after those without, in the order of the space.

    Raises:
        InputError: a key is unknown, or a value does not fit.
    """
    values = job.model_dump(mode="json", exclude_unset=True)
    keys = [key for key in space if key in params and not space[key].when]
    for key in keys:
        _lay(values, key, params[key])
    made, used = configs.validate(type(job), values, "space"), set(keys)
    for key in (key for key in space if key in params and space[key].when):
        settings = made.model_dump(mode="json")
        if all(find(settings, name) == wanted for name, wanted in space[key].when.items()):
            _lay(values, key, params[key])
            made = configs.validate(type(job), values, "space")
            used.add(key)
    return made, used


def _lay(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is laid over the one that is there."""
    below, value = find(values, key), copy.deepcopy(value)  # keys below this one may change it
    both = isinstance(below, Mapping) and isinstance(value, Mapping)
    assign(values, key, configs.overlay({"_": below}, {"_": value})["_"] if both else value)


def given_params(job: Searched, space: Space) -> Params | None:
    """Parameters that leave the job as it is; None where the space has none."""
    params: Params = {}
    for key, dimension in space.items():
        given = find(job.model_dump(mode="json"), key)
        in_range = dimension.choices is None and dimension.contains(given)
        candidates = [given] if in_range else dimension.probes()
        same = [candidate for candidate in candidates if _leaves(job, {**params, key: candidate}, space)]
        if not same:
            return None
        params[key] = same[0]
    return params


def _leaves(job: Searched, params: Params, space: Space) -> bool:
    try:
        return with_params(job, space, params)[0].result() == job.result()
    except InputError:
        return False


def check_space(job: Searched, space: Space) -> None:
    """Check that every key is one of the job, that it takes the values it may get, and that trials stay comparable.

    Raises:
        InputError: names the key and the remedy.
    """
    for key, dimension in space.items():
        where = _enabling(job, space, key)
        for place, probe in enumerate(dimension.probes()):
            try:
                made, used = with_params(job, space, {**where, key: probe})
            except InputError as error:
                if place == 2 and dimension.choices is None and "integer" in str(error):
                    raise InputError(f"space.{key}: takes whole numbers only; add integer: true") from error
                raise InputError(f"space.{key}: {label(probe)} does not fit: {error}") from error
            assert key in used
            if made.metric != job.metric or made.splits.validation != job.splits.validation:
                raise InputError(f"space.{key}: changes what trials are compared by; leave it out of the space")
    _check_together(job, space)


def _enabling(job: Searched, space: Space, key: str) -> Params:
    """Choices of other keys with which the `when` of a key holds."""
    others = {name: dimension for name, dimension in space.items() if name != key}
    params: Params = {}

    def holds(tried: Params, name: str, wanted: Any) -> bool:
        return bool(find(with_params(job, others, tried)[0].model_dump(mode="json"), name) == wanted)

    for name, wanted in space[key].when.items():
        if holds(params, name, wanted):
            continue
        tries = (
            {**params, **_enabling(job, others, other), other: choice}
            for other, dimension in others.items()
            for choice in dimension.choices or ()
        )
        enabled = next((tried for tried in tries if holds(tried, name, wanted)), None)
        if enabled is None:
            raise InputError(f"space.{key}.when: {name} is never {label(wanted)}; check the key and its values")
        params = enabled
    return params


def _check_together(job: Searched, space: Space) -> None:
    """Check that no choice removes a setting that another key needs."""
    firsts = {key: dimension.probes()[0] for key, dimension in space.items()}
    for key, dimension in space.items():
        for choice in dimension.choices or ():
            try:
                with_params(job, space, {**firsts, key: choice})
            except InputError as error:
                cause = error.__cause__
                if isinstance(cause, ValidationError) and any(e["type"] == "extra_forbidden" for e in cause.errors()):
                    raise InputError(
                        f"space.{key}: with {label(choice)} another key of the space has no meaning; give that key a "
                        f"when ({error})"
                    ) from error
