"""The jobs whose settings a search varies: the stages of a trial, and the metric that compares trials."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch

from ltrscale import bundle, storage
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
from ltrscale.tuning.space import ReportValue


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
