"""Stages of trees beyond `gbdt_stage`: semi-supervised trees, trees over other models, and the export of trees.

Trees are exported as LightGBM's native text, after a parity check.
"""

from collections.abc import Mapping

from ltrscale.bundle import load
from ltrscale.config import Config, is_current, made_by
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.split import Split, Splits, Texts, check_disjoint
from ltrscale.errors import InputError, UnavailableError
from ltrscale.progress import log
from ltrscale.trees.export import ParityConfig, check_parity, publish
from ltrscale.trees.semi import SemiConfig, train_semi
from ltrscale.trees.stacking import StackConfig, StackMember, train_stack
from ltrscale.workflows.origins import Identity, bundle_hashes, check_unseen, dataset_hashes
from ltrscale.workflows.runs import check_replaceable, run_stage


class SemiJob(Config):
    """Train trees on labelled groups with the help of the training split's other groups."""

    out: str
    """Directory of the bundle."""
    splits: Splits
    """Training and validation; the test split is not read."""
    semi: SemiConfig


@one_view()
def semi_stage(job: SemiJob) -> None:
    """Train semi-supervised trees and commit their bundle."""
    check_disjoint(job.splits)
    splits = job.splits
    run_stage(
        "train_semi",
        job,
        job.out,
        Identity.of(job.semi, splits.train, splits.validation),
        dataset_hashes([splits.train, splits.validation]),
        lambda origin, report: train_semi(job.semi, splits, job.out, made_by=origin, report=report),
    )


class StackedJob(Config):
    """Train trees over the scores of models that are trained already."""

    out: str
    """Directory of the bundle."""
    splits: Splits
    """Training and validation; the test split is not read."""
    stack: StackConfig
    members: dict[str, StackMember]


@one_view()
def stacked_stage(job: StackedJob) -> None:
    """Train trees over models and commit the bundle that holds all of them.

    Raises:
        InputError: a ready bundle may have seen labels of the training split.
    """
    check_disjoint(job.splits)
    splits = job.splits
    for name, member in job.members.items():
        if not member.folds:
            check_ready(name, member.bundle, splits)
    run_stage(
        "stack",
        job,
        job.out,
        Identity.of(_Stacked(stack=job.stack, members=tuple(job.members)), splits.train, splits.validation),
        dataset_hashes([splits.train, splits.validation]) | _hashes(job.members),
        lambda origin, report: train_stack(job.stack, job.members, splits, job.out, made_by=origin, report=report),
    )


class _Stacked(Config):
    """What a stack depends on besides the data and the content of its bundles."""

    stack: StackConfig
    members: tuple[str, ...]


def _hashes(members: Mapping[str, StackMember]) -> dict[str, str]:
    return bundle_hashes(url for member in members.values() for url in (member.bundle, *member.folds))


def check_ready(name: str, url: str, splits: Splits) -> None:
    """Check that a bundle has not seen the labels that the trees are to learn from."""
    try:
        check_unseen(url, splits.train)
    except UnavailableError:  # which says nothing of the bundle
        raise
    except InputError as error:
        raise InputError(
            f"bundles.{name}: {url} was trained or selected on labels of the training split, whose groups it would "
            f"score too well; list its method under members, or train the stack on other periods ({error})"
        ) from error


class ExportJob(ParityConfig):
    """Export a bundle of LightGBM trees as the library's own text, with a note on its features."""

    out: str
    """Directory of the export."""
    bundle: str
    """Bundle of one LightGBM model."""
    data: str
    """Data set directory on whose documents the scores are compared."""
    periods: Texts = ()
    """Periods `P` or ranges `A..B`, both ends included; empty for all."""


class _Exported(ParityConfig):
    """What an export depends on besides its inputs."""

    periods: Texts


@one_view()
def export_stage(job: ExportJob) -> None:
    """Compare scores, then publish; nothing is left where they are further apart than allowed.

    Raises:
        InputError: they are; as `ltrscale.trees.export.check_parity`.
    """
    split = Split(data=(job.data,), periods=job.periods)
    config = _Exported(rows=job.rows, tolerance=job.tolerance, periods=job.periods)
    inputs = dataset_hashes([split]) | bundle_hashes([job.bundle])
    if is_current(job.out, made_by("export", config, inputs)):
        log.info("export: %s is up to date", job.out)
        return
    check_replaceable(job.out, "export")
    files, parity = check_parity(load(job.bundle), split, config)  # before a run directory is begun
    run_stage("export", job, job.out, config, inputs, lambda origin, _: publish(files, parity, job.out, made_by=origin))
