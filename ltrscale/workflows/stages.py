"""One function per job: each reads committed directories, runs one stage, and commits one directory.

A stage whose output is committed already with the same config and the same inputs does nothing and says so.
"""

from collections.abc import Callable, Mapping
from typing import Self

from pydantic import Field, model_validator

from ltrscale import storage
from ltrscale.config import Config, made_by
from ltrscale.data.manifest import one_view, open_dataset
from ltrscale.data.prepare import PrepareConfig, input_fingerprints, is_prepared, prepare
from ltrscale.data.split import Split, Splits, check_disjoint
from ltrscale.errors import InputError
from ltrscale.evaluation.evaluate import EvaluateConfig, evaluate
from ltrscale.evaluation.report import print_table
from ltrscale.launch.workers import ONE, Workers
from ltrscale.progress import Report
from ltrscale.scoring import ScoreConfig, is_scored, score
from ltrscale.simulate.relabel import RelabelConfig, relabel
from ltrscale.simulate.synthetic import SyntheticLogConfig, write_log
from ltrscale.training.combine import CombineConfig, combine
from ltrscale.training.finetune import FinetuneConfig, finetune
from ltrscale.training.pretrain import PretrainConfig, pretrain
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.ensemble import EnsembleConfig, check_draws, choose
from ltrscale.trees.gbdt import train_gbdt
from ltrscale.workflows.origins import Identity, bundle_hashes, check_unseen, dataset_hashes, scored_by
from ltrscale.workflows.runs import run_stage


class PrepareJob(Config):
    """Turn raw logs into a data set directory."""

    out: str
    """Directory of the data set."""
    prepare: PrepareConfig
    synthetic: SyntheticLogConfig | None = None
    """Make this synthetic log first, below `out` with `-log` appended, and read it as input."""
    ray: bool = False
    """Handle the units of the input in parallel on a Ray cluster; the output is the same."""


class RelabelJob(Config):
    """Simulate or clean the labels of a data set."""

    out: str
    """Directory of the new data set."""
    data: str
    """Data set directory to start from; it stays as it is."""
    relabel: RelabelConfig


class PretrainJob(Config):
    """Pretrain an encoder without labels."""

    out: str
    """Directory of the bundle."""
    train: Split
    """Whose documents; labels are not read."""
    pretrain: PretrainConfig = PretrainConfig()
    workers: Workers = ONE
    """Data-parallel workers; more than one run under Ray Train."""
    fresh: bool = False
    """Start anew, also where `out` is up to date: what an unfinished run has left there is removed."""


class FinetuneJob(Config):
    """Finetune a ranker on labelled groups, from a pretrained bundle or from random weights."""

    out: str
    """Directory of the bundle."""
    pretrained: str | None = None
    """Bundle to start from; empty starts from random weights."""
    splits: Splits
    """Training and validation; the test split is not read."""
    finetune: FinetuneConfig = FinetuneConfig()
    workers: Workers = ONE
    """Data-parallel workers; more than one run under Ray Train."""
    fresh: bool = False
    """Start anew, also where `out` is up to date: what an unfinished run has left there is removed."""


class CombineJob(Config):
    """Make one ranker of several finetuned ones."""

    out: str
    """Directory of the bundle."""
    bundles: tuple[str, ...] = Field(min_length=1)
    """Finetuned neural rankers of the same features."""
    splits: Splits
    """Training (of `concat`) and validation; the test split is not read."""
    combine: CombineConfig = CombineConfig()
    workers: Workers = ONE
    """Data-parallel workers; more than one run under Ray Train."""
    fresh: bool = False
    """Start anew, also where `out` is up to date: what an unfinished run has left there is removed."""


class GBDTJob(Config):
    """Train gradient boosted trees on labelled groups."""

    out: str
    """Directory of the bundle."""
    splits: Splits
    """Training and validation; the test split is not read."""
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Train several models, below `out/candidates`, and take the mean of some; empty for one model."""
    workers: Workers = ONE
    """Workers that each hold a share of the training groups; for data beyond one machine."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
        return self


class ScoreJob(ScoreConfig):
    """Score periods of a data set with a bundle."""

    out: str
    """Directory of the scores."""


class EvaluateJob(Config):
    """Evaluate bundles on the test split, with outlier groups and significance."""

    out: str
    """Directory of the report."""
    evaluate: EvaluateConfig


def prepare_stage(job: PrepareJob) -> None:
    """Make a data set directory."""
    config, synthetic = job.prepare, job.synthetic
    if synthetic is not None:
        log_url = f"{job.out.rstrip('/')}-log"
        run_stage(
            "synthetic_log",
            synthetic,
            log_url,
            synthetic,
            {},
            lambda _, report: write_log(synthetic, log_url, report=report),
        )
        config = with_inputs(config, log_url)
    inputs = input_fingerprints(config)
    if is_prepared(job.out, made_by("prepare", config, inputs)):
        return
    run_stage(
        "prepare",
        job,
        job.out,
        config,
        inputs,
        lambda _, report: prepare(config, job.out, ray=job.ray, report=report),
    )


def with_inputs(config: PrepareConfig, log_url: str) -> PrepareConfig:
    """The same config, reading the log at a URL."""
    return config.replace(inputs=[{"path": storage.join(log_url, "*", "*.parquet")}])


def relabel_stage(job: RelabelJob) -> None:
    """Make a data set directory with other labels.

    Raises:
        InputError: `out` is `data` itself; as `relabel`.
    """
    if _place(job.out) == _place(job.data):
        raise InputError(f"{job.out}: out is the data set itself; choose another directory")
    run_stage(
        "relabel",
        job,
        job.out,
        job.relabel,
        {job.data: open_dataset(job.data).manifest.hash},
        lambda origin, report: relabel(job.relabel, job.data, job.out, origin=origin, report=report),
    )


def _place(url: str) -> str:
    """The same text for the same directory."""
    return str(storage.local_path(url).resolve()) if storage.is_local(url) else url.rstrip("/")


@one_view()
def pretrain_stage(job: PretrainJob) -> None:
    """Pretrain an encoder and commit its bundle."""
    config = job.pretrain
    train = Split(data=job.train.data, periods=job.train.periods)  # which labels are used is nothing to it
    _train_stage(
        "pretrain",
        job,
        Identity.of(config.identity(), train),
        dataset_hashes([train]),
        lambda origin, report: pretrain(config, train, job.out, origin=origin, report=report, workers=job.workers),
    )


@one_view()
def finetune_stage(job: FinetuneJob) -> None:
    """Finetune a ranker and commit its bundle."""
    check_disjoint(job.splits)
    train, validation = job.splits.train, job.splits.validation
    inputs = dataset_hashes([train, validation])
    if job.pretrained:
        inputs |= bundle_hashes([job.pretrained])
    _train_stage(
        "finetune",
        job,
        Identity.of(job.finetune.identity(), train, validation),
        inputs,
        lambda origin, report: finetune(
            job.finetune,
            train,
            validation,
            job.out,
            pretrained=job.pretrained,
            origin=origin,
            report=report,
            workers=job.workers,
        ),
    )


@one_view()
def combine_stage(job: CombineJob) -> None:
    """Combine finetuned rankers and commit the bundle."""
    check_disjoint(job.splits)
    train, validation = job.splits.train, job.splits.validation
    _train_stage(
        "combine",
        job,
        Identity.of(job.combine.identity(), train, validation),
        dataset_hashes([train, validation]) | bundle_hashes(job.bundles),
        lambda origin, report: combine(
            job.combine,
            job.bundles,
            train,
            validation,
            job.out,
            origin=origin,
            report=report,
            workers=job.workers,
        ),
    )


def _train_stage(
    stage: str,
    job: PretrainJob | FinetuneJob | CombineJob,
    identity: Identity,
    inputs: Mapping[str, str],
    body: Callable[[Mapping[str, object], Report], object],
) -> None:
    """Run a stage that can be resumed; what is recorded of the job is without `fresh`, which is said once."""
    run_stage(stage, job.replace(fresh=False), job.out, identity, inputs, body, fresh=job.fresh)


@one_view()
def gbdt_stage(job: GBDTJob) -> None:
    """Train trees, or an ensemble of them, and commit their bundle."""
    check_disjoint(job.splits)
    splits = job.splits
    settings = job.gbdt if job.ensemble is None else _Ensemble(gbdt=job.gbdt, ensemble=job.ensemble)
    run_stage(
        "train_gbdt",
        job,
        job.out,
        Identity.of(settings, splits.train, splits.validation),
        dataset_hashes([splits.train, splits.validation]),
        lambda origin, report: _train_trees(job, origin, report),
    )


def _train_trees(job: GBDTJob, origin: Mapping[str, object], report: Report) -> None:
    """Train trees; of an ensemble each candidate, where that is not done yet, and then choose."""
    if job.ensemble is None:
        train_gbdt(job.gbdt, job.splits, job.out, made_by=origin, report=report, workers=job.workers)
        return
    candidates = []
    for seed in range(job.gbdt.seed, job.gbdt.seed + job.ensemble.candidates):
        out = storage.join(job.out, "candidates", f"seed-{seed}")
        gbdt_stage(GBDTJob(out=out, splits=job.splits, gbdt=job.gbdt.replace(seed=seed), workers=job.workers))
        candidates.append(out)
    choose(job.gbdt, job.ensemble, candidates, job.splits.validation, job.out, made_by=origin)


class _Ensemble(Config):
    """What an ensemble depends on besides the data."""

    gbdt: GBDTConfig
    ensemble: EnsembleConfig


@one_view()
def score_stage(job: ScoreJob) -> None:
    """Score the periods that are not up to date, and commit each."""
    if is_scored(job, job.out):
        return
    run_stage("score", job, job.out, job, {}, lambda _, report: score(job, job.out, report=report))


@one_view()
def evaluate_stage(job: EvaluateJob, *, show: bool = True) -> None:
    """Evaluate bundles, commit the report, and print its table if it is to be shown."""
    config = job.evaluate
    check_disjoint(config.splits)
    bundles = [url for urls in config.models.values() for url in urls]
    scored = [config.splits.test.replace(scores=url, labels="labels") for url in config.scores.values()]
    for url in [*bundles, *(url for split in scored for url in scored_by(split))]:
        check_unseen(url, config.splits.test)
    run_stage(
        "evaluate",
        job,
        job.out,
        config,
        dataset_hashes([config.splits.validation, config.splits.test, *scored]) | bundle_hashes(bundles),
        lambda origin, report: evaluate(config, job.out, made_by=origin, report=report),
    )
    if show:
        print_table(job.out)
