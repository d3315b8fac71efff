"""One function per job: each reads committed directories, runs one stage, and commits one directory.

A stage whose output is committed already with the same config and the same inputs does nothing and says so.
"""

from collections.abc import Callable, Iterable, Mapping

from pydantic import Field, SerializeAsAny

from ltrscale import storage
from ltrscale.bundle import read_manifest
from ltrscale.config import Config, made_by, validate
from ltrscale.data.manifest import open_dataset
from ltrscale.data.prepare import PrepareConfig, input_fingerprints, is_prepared, prepare
from ltrscale.data.split import Split, Splits, check_disjoint
from ltrscale.errors import InputError
from ltrscale.evaluation.evaluate import EvaluateConfig, evaluate
from ltrscale.evaluation.report import print_table
from ltrscale.launch.workers import ONE, Workers
from ltrscale.progress import Report
from ltrscale.simulate.relabel import RelabelConfig, relabel
from ltrscale.simulate.synthetic import SyntheticLogConfig, write_log
from ltrscale.training.combine import CombineConfig, combine
from ltrscale.training.finetune import FinetuneConfig, finetune
from ltrscale.training.pretrain import PretrainConfig, pretrain
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.gbdt import train_gbdt
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
    workers: Workers = ONE
    """Workers that each hold a share of the training groups; for data beyond one machine."""


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


def pretrain_stage(job: PretrainJob) -> None:
    """Pretrain an encoder and commit its bundle."""
    config = job.pretrain
    train = Split(data=job.train.data, periods=job.train.periods)  # which labels are used is nothing to it
    _train_stage(
        "pretrain",
        job,
        _Identity(config=config.identity(), splits=(train,)),
        dataset_hashes([train]),
        lambda origin, report: pretrain(config, train, job.out, origin=origin, report=report, workers=job.workers),
    )


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
        _Identity(config=job.finetune.identity(), splits=(train, validation)),
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


def combine_stage(job: CombineJob) -> None:
    """Combine finetuned rankers and commit the bundle."""
    check_disjoint(job.splits)
    train, validation = job.splits.train, job.splits.validation
    _train_stage(
        "combine",
        job,
        _Identity(config=job.combine.identity(), splits=(train, validation)),
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
    identity: "_Identity",
    inputs: Mapping[str, str],
    body: Callable[[Mapping[str, object], Report], object],
) -> None:
    """Run a stage that can be resumed; what is recorded of the job is without `fresh`, which is said once."""
    run_stage(stage, job.replace(fresh=False), job.out, identity, inputs, body, fresh=job.fresh)


def gbdt_stage(job: GBDTJob) -> None:
    """Train trees and commit their bundle."""
    check_disjoint(job.splits)
    splits = job.splits
    run_stage(
        "train_gbdt",
        job,
        job.out,
        _Identity(config=job.gbdt, splits=(splits.train, splits.validation)),
        dataset_hashes([splits.train, splits.validation]),
        lambda origin, report: train_gbdt(
            job.gbdt, splits, job.out, made_by=origin, report=report, workers=job.workers
        ),
    )


def evaluate_stage(job: EvaluateJob) -> None:
    """Evaluate bundles, commit the report, and print its table."""
    config = job.evaluate
    check_disjoint(config.splits)
    bundles = [url for urls in config.models.values() for url in urls]
    for url in bundles:
        check_unseen(url, config.splits.test)
    run_stage(
        "evaluate",
        job,
        job.out,
        config,
        dataset_hashes([config.splits.validation, config.splits.test]) | bundle_hashes(bundles),
        lambda origin, report: evaluate(config, job.out, made_by=origin, report=report),
    )
    print_table(job.out)


class _Identity(Config):
    """What a stage's output depends on besides the content of its inputs."""

    config: SerializeAsAny[Config]
    splits: tuple[Split, ...]


def dataset_hashes(splits: Iterable[Split]) -> dict[str, str]:
    """Content hash of every data set that the splits read."""
    return {url: open_dataset(url).manifest.hash for split in splits for url in split.data}


def check_unseen(url: str, test: Split) -> None:
    """Check that neither a bundle nor one that it was made from was trained or selected on a period of the test split.

    It can be told where a job made the bundle, and what it was made from is still where it was.

    Raises:
        InputError: it was; names the period.
    """
    origin = (storage.read_manifest(url) or {}).get("made_by", {})
    seen = [validate(Split, split, url) for split in origin.get("config", {}).get("splits", [])]
    for made_from in origin["inputs"] if seen else ():
        check_unseen(made_from, test)
    if len(seen) != 2 or not all(storage.exists(storage.join(data, storage.MANIFEST)) for s in seen for data in s.data):
        return
    try:
        check_disjoint(Splits(train=seen[0], validation=seen[1], test=test))
    except InputError as error:
        raise InputError(f"{url} was made from other splits than it is evaluated on: {error}") from error


def bundle_hashes(urls: Iterable[str]) -> dict[str, str]:
    """Content hash of every bundle's files."""
    files = {url: read_manifest(url).get("files", []) for url in urls}
    return {url: ",".join(sorted(f"{file['path']}:{file['sha256']}" for file in files[url])) for url in files}
