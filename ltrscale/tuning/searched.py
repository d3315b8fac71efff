"""The jobs whose settings a search varies: stages and metric of a trial, and parameters assigned to settings."""

import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import ValidationError

from ltrscale import bundle, storage
from ltrscale import config as configs
from ltrscale.config import Config, Operational
from ltrscale.data.dataset.split import Split, Splits, with_periods_named
from ltrscale.errors import InputError
from ltrscale.origin import result_of
from ltrscale.runtime.workers import ONE, Workers
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.runs import heard_by, metric_records, record_folder
from ltrscale.stages.stage import Stage
from ltrscale.storage import join
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.pretrain import PretrainConfig, PretrainJob
from ltrscale.training.resumption import EPOCHS
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.gbdt import GBDTJob
from ltrscale.tuning.space import Params, ReportValue, Space, label


class _SearchedJob(Config):
    """A job whose settings a search varies: the stages that a trial runs, and the metric that compares trials."""

    kind: str
    splits: Splits
    """Training and validation; the test split is not read."""
    workers: Operational[Workers] = ONE
    """Workers of each trial; they share each step of a network, or the training groups of trees."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The metric that compares trials: one of the bundle that the last stage commits."""

    @property
    def judges_on_the_way(self) -> bool:
        """Whether a trial reports the metric before it ends, as ASHA needs."""
        return True

    def result(self) -> Config:
        """The settings that determine the metric."""
        return result_of(self)

    def identity(self) -> dict[str, Any]:
        """The settings that determine the metric, with the periods of the splits by name."""
        settings = self.result().model_dump(mode="json")
        learnt = {"train": _named(self.splits.train), "validation": _named(self.splits.validation)}
        return {**settings, "splits": {**settings["splits"], **learnt}}

    def reads(self) -> Iterable[Split]:
        """The splits that a trial reads."""
        return self.splits.train, self.splits.validation

    @abstractmethod
    def with_seed(self, seed: int) -> Self:
        """The job with another seed."""

    @abstractmethod
    def stages(self, out: str) -> tuple[Stage, ...]:
        """The stages that a trial runs in a directory, in order."""

    def step_of(self, record: Mapping[str, Any]) -> int | None:  # noqa: ARG002
        """The step of a record, as ASHA counts steps; None for a record without the metric."""
        return None

    def run(self, folder: str, report: ReportValue) -> float:
        """Run or resume the stage in a directory; returns the metric."""
        (stage,) = self.stages(join(folder, "model"))
        best = -math.inf

        def hear(record: Mapping[str, Any]) -> None:
            nonlocal best
            if (step := self.step_of(record)) is not None:
                # a stage commits its best step, or with `keep_head` its start if that is better, which is no step
                best = max(best, record[self.metric])
                report(step, best)

        if (record_of_cut := record_folder(stage.out)) is not None:  # an interrupted run does not repeat its steps
            for record in metric_records(record_of_cut):
                hear(record)
        with heard_by(hear):
            stage.run()
        return _value(stage.out, self.metric)

    def outside_search(self) -> Self:
        """The job without what only a trial needs."""
        return self

    def jobs(self, out: str) -> dict[str, Stage]:
        """The stages as separate jobs outside the search, by the file name of their config."""
        stages = self.outside_search().stages(join(out, "best"))
        return {"best.yaml" if len(stages) == 1 else f"best-{stage.stage}.yaml": stage for stage in stages}


class GBDTSearch(_SearchedJob):
    """Boosted trees; ASHA counts trees."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""

    @property
    def metric(self) -> str:
        return f"validation_ndcg@{self.gbdt.stop_on}"

    def with_seed(self, seed: int) -> Self:
        return self.replace(gbdt=self.gbdt.replace(seed=seed))

    def stages(self, out: str) -> tuple[Stage, ...]:
        return (GBDTJob(out=out, splits=self.splits, gbdt=self.gbdt, workers=self.workers),)

    def step_of(self, record: Mapping[str, Any]) -> int | None:
        return record["tree"] if self.metric in record else None


class FinetuneSearch(_SearchedJob):
    """A network trained with labels; ASHA counts epochs, starting with those of the head."""

    kind: Literal["finetune"] = "finetune"
    pretrained: BundleUrl | None = None
    """Bundle to start from; empty starts from random weights."""
    finetune: FinetuneConfig = FinetuneConfig()

    @property
    def metric(self) -> str:
        return f"validation_{self.finetune.validation_metric}"

    def with_seed(self, seed: int) -> Self:
        return self.replace(finetune=self.finetune.replace(seed=seed))

    def stages(self, out: str) -> tuple[Stage, ...]:
        shared: dict[str, Any] = {"splits": self.splits, "workers": self.workers}
        return (FinetuneJob(out=out, pretrained=self.pretrained, finetune=self.finetune, **shared),)

    def step_of(self, record: Mapping[str, Any]) -> int | None:
        if "epoch" not in record or self.metric not in record:
            return None
        before = self.finetune.head_epochs if self.pretrained and record["phase"] != "head" else 0
        return int(record["epoch"] + before)


class PretrainSearch(_SearchedJob):
    """Pretraining, judged by the metric after finetuning; ASHA counts epochs of pretraining, see `keep_every`."""

    kind: Literal["pretrain"] = "pretrain"
    train: Split | None = None
    """Split of the documents for pretraining; empty takes `splits.train`."""
    splits: Splits
    """Training and validation of finetuning; the test split is not read."""
    pretrain: PretrainConfig = PretrainConfig()
    finetune: FinetuneConfig = FinetuneConfig()

    @property
    def metric(self) -> str:
        return f"validation_{self.finetune.validation_metric}"

    @property
    def split(self) -> Split:
        """The split whose documents are for pretraining."""
        return self.train or self.splits.train

    def result(self) -> Config:
        return result_of(self.replace(train=self.split))

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "train": _named(self.split)}

    def reads(self) -> Iterable[Split]:
        return self.split, *super().reads()

    @property
    def judges_on_the_way(self) -> bool:
        return self.pretrain.keep_every is not None

    def with_seed(self, seed: int) -> Self:
        return self.replace(pretrain=self.pretrain.replace(seed=seed), finetune=self.finetune.replace(seed=seed))

    def stages(self, out: str) -> tuple[PretrainJob, FinetuneJob]:
        pretrained, finetuned = join(out, "pretrained"), join(out, "finetuned")
        return (
            PretrainJob(out=pretrained, train=self.split, pretrain=self.pretrain, workers=self.workers),
            FinetuneJob(
                out=finetuned, pretrained=pretrained, splits=self.splits, finetune=self.finetune, workers=self.workers
            ),
        )

    def run(self, folder: str, report: ReportValue) -> float:
        pretraining, finetuning = self.stages(folder)  # each encoder that pretraining keeps is finetuned at once

        def finetuned(job: FinetuneJob) -> float:
            with _same_mode():
                job.run()
            return _value(job.out, self.metric)

        def hear(record: Mapping[str, Any]) -> None:
            if "bundle" in record:  # epochs of finetuning are not steps of the search
                epoch, out = record["epoch"], f"{finetuning.out}-{record['epoch']:05d}"
                report(epoch, finetuned(finetuning.replace(out=out, pretrained=record["bundle"])))

        for url in storage.children(join(pretraining.out, EPOCHS)):  # kept by an interrupted run
            if (manifest := storage.read_manifest(url)) is not None:
                hear({"epoch": manifest["made_by"]["epoch"], "bundle": url})
        with heard_by(hear):
            pretraining.run()
        return finetuned(finetuning)

    def outside_search(self) -> Self:
        return self.replace(pretrain=self.pretrain.replace(keep_every=None))  # nothing judges encoders along the way


Searched = GBDTSearch | PretrainSearch | FinetuneSearch


def _named(split: Split) -> dict[str, Any]:
    return with_periods_named(split).model_dump(mode="json")


@contextmanager
def _same_mode() -> Iterator[None]:
    """Restore torch's global settings afterwards, because finetuning runs in the middle of pretraining."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision, of_cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = of_cudnn


def _value(url: str, metric: str) -> float:
    value = bundle.load(url).metrics[metric]
    if not isinstance(value, int | float):
        raise InputError(f"{url}: its {metric} is {value!r}, which is not a number to compare")
    return float(value)


SearchedT = TypeVar("SearchedT", bound=Searched)


class Assigned(NamedTuple, Generic[SearchedT]):
    """A job with parameters, and the keys of them that it uses; a key is unused if its `when` does not hold."""

    job: SearchedT
    used: set[str]


def with_params(job: SearchedT, space: Space, params: Params) -> Assigned[SearchedT]:
    """The job with these parameters; an `InputError` if a key is unknown, or a value does not fit.

    Keys with a `when` are set after those without, in the order of the space, once it holds: another may make it hold.
    """
    # without defaults, which as explicit settings would override a preset
    values = job.model_dump(mode="json", exclude_unset=True)
    keys = [key for key in space if key in params and not space[key].when]
    for key in keys:
        _merge_at(values, key, params[key])
    filled = configs.validate(type(job), values, "space")
    waiting, before = [key for key in space if key in params and space[key].when], 0
    while len(waiting) != before:
        before = len(waiting)
        for key in list(waiting):
            if _has(filled, space[key].when):
                _merge_at(values, key, params[key])
                filled = configs.validate(type(job), values, "space")
                waiting.remove(key)
    return Assigned(filled, params.keys() - waiting)


def _has(job: Searched, required: Params) -> bool:
    """Whether the job has these values at these dotted keys."""
    settings = job.model_dump(mode="json")
    return all(_value_at(settings, key) == value for key, value in required.items())


def given_params(job: Searched, space: Space) -> Params | None:
    """Parameters that leave the job unchanged; None if the space does not contain its settings."""
    params: Params = {}
    settings = job.model_dump(mode="json")
    for key, dimension in space.items():
        value = _value_at(settings, key)
        in_range = dimension.choices is None and dimension.contains(value)
        candidates = [value] if in_range else dimension.probes()
        for candidate in candidates:
            tried = _job_with(job, space, {**params, key: candidate})
            if tried is not None and tried.result() == job.result():
                params[key] = candidate
                break
        else:
            return None
    return params


def _job_with(job: Searched, space: Space, params: Params) -> Searched | None:
    """The job with these parameters; None if they do not fit."""
    try:
        return with_params(job, space, params).job
    except InputError:
        return None


def check_space(job: Searched, space: Space) -> None:
    """Raise an `InputError` unless the job has every key, takes its values, and trials stay comparable."""
    checked: dict[str, Params] = {}
    while left := [key for key in space if key not in checked]:
        found = {key: params for key in left if (params := _enabling(job, space, key, checked)) is not None}
        if not found:
            never = label(space[left[0]].when)
            raise InputError(f"space.{left[0]}.when: never holds ({never}); check these keys and their values")
        for key, enabling in found.items():
            _check_values(job, space, key, enabling)
        checked |= found
    _check_together(job, space)


def _enabling(job: Searched, space: Space, key: str, checked: Mapping[str, Params]) -> Params | None:
    """Values of checked keys, each with those that enable it, which make the `when` of a key hold; None without any."""
    params: Params = {}
    required: Params = {}
    for name, value in space[key].when.items():
        required[name] = value
        tries = (
            {**params, **enabling, other: choice}
            for other, enabling in checked.items()
            for choice in space[other].choices or ([value] if other == name and space[other].contains(value) else ())
        )
        for tried in itertools.chain([params], tries):
            if (made := _job_with(job, space, tried)) is not None and _has(made, required):
                params = tried
                break
        else:
            return None
    return params


def _check_values(job: Searched, space: Space, key: str, enabling: Params) -> None:
    """Check one key, with values of other keys that make its `when` hold."""
    for probe in space[key].probes():
        try:
            filled, used = with_params(job, space, {**enabling, key: probe})
        except InputError as error:
            if space[key].choices is None and _is_refused_as("int_from_float", error):
                raise InputError(f"space.{key}: takes whole numbers only; add integer: true") from error
            raise InputError(f"space.{key}: {label(probe)} does not fit: {error}") from error
        assert key in used
        if filled.metric != job.metric or filled.splits.validation != job.splits.validation:
            raise InputError(f"space.{key}: changes what trials are compared by; leave it out of the space")


def _check_together(job: Searched, space: Space) -> None:
    """Check that no choice removes a setting that another key needs."""
    firsts = {key: dimension.probes()[0] for key, dimension in space.items()}
    for key, dimension in space.items():
        for choice in dimension.choices or ():
            try:
                with_params(job, space, {**firsts, key: choice})
            except InputError as error:
                if _is_refused_as("extra_forbidden", error):
                    raise InputError(
                        f"space.{key}: with {label(choice)} another key of the space has no meaning; give that key a "
                        f"when ({error})"
                    ) from error


def _is_refused_as(kind: str, error: InputError) -> bool:
    """Whether the settings were refused with this type of pydantic's errors."""
    cause = error.__cause__
    return isinstance(cause, ValidationError) and any(details["type"] == kind for details in cause.errors())


def _merge_at(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a mapping is merged into an existing one."""
    existing, value = _value_at(values, key), copy.deepcopy(value)  # a copy, because later keys may change parts of it
    both_mappings = isinstance(existing, Mapping) and isinstance(value, Mapping)
    _set_at(values, key, configs.overlay({"_": existing}, {"_": value})["_"] if both_mappings else value)


def _set_at(values: Any, key: str, value: Any) -> None:
    """Set a dotted key of plain data; setting another `kind` clears the settings of the old kind.

    Example:
        >>> config = {"method": {"kind": "simclr_rank", "temperature": 0.1}, "hidden": [64, 64]}
        >>> _set_at(config, "method.kind", "simsiam")
        >>> _set_at(config, "hidden.1", 32)
        >>> config
        {'method': {'kind': 'simsiam'}, 'hidden': [64, 32]}
    """
    first, _, rest = key.partition(".")
    if isinstance(values, list):
        if not first.isdecimal() or int(first) >= len(values):
            raise InputError(f"space: {key}: {first!r} is not an index of a list of {len(values)}; count from 0")
        slot: Any = int(first)
    elif isinstance(values, dict):
        slot = first
    else:
        raise InputError(f"space: {key}: {first!r} is below a plain value; check the dots")
    if not rest:
        if slot == "kind" and _value_at(values, "kind") not in (None, value):
            values.clear()
        values[slot] = value
        return
    if isinstance(values, dict) and values.get(slot) is None:
        values[slot] = {}
    _set_at(values[slot], rest, value)


def _value_at(values: Any, key: str) -> Any:
    """The value at a dotted key of plain data; None if the key does not exist."""
    for part in key.split("."):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values
