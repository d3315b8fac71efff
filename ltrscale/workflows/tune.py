"""Search over the settings of a job: each trial runs the job's stages in a directory of its own.

The metric is the validation NDCG of the bundle that a trial commits. Below `out` are the history and what the trials
made (`trials/00007/...`), the table and report of the search, and the best settings as configs that the jobs take.
"""

import functools
import math
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.data.dataset.manifest import Dataset, one_view
from ltrscale.data.dataset.preflight import contents_of_read, difference
from ltrscale.data.dataset.split import Split, check_disjoint, with_periods_named
from ltrscale.errors import InputError
from ltrscale.launch.workers import stop_on_sigterm
from ltrscale.progress import log
from ltrscale.storage import join
from ltrscale.tuning.history import History, TrialRecord, best
from ltrscale.tuning.results import PICTURES, REPORT, TABLE, Outcome, write_results
from ltrscale.tuning.search import run_search
from ltrscale.tuning.space import Params, SearchConfig
from ltrscale.workflows.runs import RUN_FILES, recorded
from ltrscale.workflows.searched import (
    FinetuneSearch,
    GBDTSearch,
    PretrainSearch,
    check_space,
    given_params,
    run_trial,
    with_params,
)
from ltrscale.workflows.stage import check_replaceable

_WRITTEN = (TABLE, REPORT, *PICTURES)
_BEST = ("best.yaml", "best-pretrain.yaml", "best-finetune.yaml")
_STARTER_CPUS = 0.1


class TuneJob(SearchConfig):
    """Search over the settings of a job."""

    out: str
    """Directory of the search: its history, what the trials made, table, report and best settings."""
    job: Annotated[GBDTSearch | PretrainSearch | FinetuneSearch, Field(discriminator="kind")]
    """What a trial runs; its settings as they are given are trial 0."""
    fresh: bool = False
    """Start anew: the history in `out`, with all that its trials made, is removed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.asha is not None and isinstance(self.job, PretrainSearch) and self.job.pretrain.keep_every is None:
            raise ValueError("asha judges pretraining along the way: set job.pretrain.keep_every to some epochs")
        return self


def run_tune(config: TuneJob) -> None:
    """Search, or go on with a search that was cut short; then write what it found.

    All trials read the data sets as they were when the search began.

    Raises:
        InputError: the space does not fit the job, a search of other settings or other data is in `out`, or all trials
            failed.
        Stopped: the search was asked to stop.
    """
    check_space(config.job, config.space)
    with one_view() as view:
        check_disjoint(config.job.splits)
        check_replaceable(config.out, "tune")
        _search(config, History(config.out), _identity(config), view)


def _open(history: History, identity: Mapping[str, Any]) -> None:
    """Begin a history, or check that the one that is there is of this search on these data."""
    before = history.identity()
    if before is not None and "data" in before and (what := difference(before["data"], identity["data"])):
        raise InputError(f"{history.url}: the search there {what}, or remove its history with --fresh")
    history.open(identity)


def _search(config: TuneJob, history: History, identity: Mapping[str, Any], view: Mapping[str, Dataset]) -> None:
    """Run the trials that are left, and write what all have found."""
    with recorded(config.out, config.replace(fresh=False)) as report, stop_on_sigterm() as stopping:
        if config.fresh:
            history.remove(RUN_FILES)
            for name in (*_WRITTEN, *_BEST):
                storage.remove(join(config.out, name))
        _open(history, identity)
        run_search(
            _resources(config),
            functools.partial(run_trial, config.job, config.space, view=view),
            history,
            given=given_params(config.job, config.space),
            same=functools.partial(_same, config),
            report=report,
            stopping=stopping,
            cluster_cpus=_cluster_cpus(config),
        )
        _write(config, history)


def _identity(config: TuneJob) -> dict[str, Any]:
    """What the value of a trial depends on, besides its parameters."""
    return {
        "job": _named(config.job.result().model_dump(mode="json"), config.job.reads),
        "space": {key: dimension.model_dump(mode="json") for key, dimension in config.space.items()},
        "inputs": config.job.inputs(),
        "data": contents_of_read(config.job.reads.values()),
    }


def _named(job: dict[str, Any], reads: Mapping[str, Split]) -> dict[str, Any]:
    """The settings of a job, where the splits that it reads name all of their periods."""
    named = {name: with_periods_named(split).model_dump(mode="json") for name, split in reads.items()}
    if "documents" in named:
        job = {**job, "train": named.pop("documents")}
    return {**job, "splits": {**job["splits"], **named}}


def _same(config: TuneJob, params: Params) -> str:
    """Equal for parameters that lead to the same settings."""
    try:
        return configs.digest(with_params(config.job, config.space, params)[0].result())
    except InputError:  # the trial will say so
        return configs.digest(params)


def _is_nested(config: TuneJob) -> bool:
    return config.job.workers.most > 1 or config.job.workers.gpus > 0


def _resources(config: TuneJob) -> SearchConfig:
    """The search, where the process of a trial that only starts workers takes next to nothing."""
    return config.model_copy(update={"cpus": _STARTER_CPUS, "gpus": 0.0}) if _is_nested(config) else config


def _cluster_cpus(config: TuneJob) -> int:
    """Logical CPUs for all trials that run at a time; those with workers need some for reading, too."""
    workers = config.job.workers
    each = _STARTER_CPUS + workers.most * (workers.cpus + 1) if _is_nested(config) else config.cpus
    return math.ceil(config.concurrent * each)


def _write(config: TuneJob, history: History) -> None:
    """Write table, report, pictures and the best settings."""
    storage.check_lease(config.out)
    trials = history.trials()
    commands = []
    if (leader := best(trials)) is not None:
        job, _ = with_params(config.job, config.space, leader.begun.params)
        for name, module, settings in job.jobs(config.out):
            url = join(config.out, name)
            storage.write_bytes(url, configs.dump(settings).encode())
            commands.append(f"python -m jobs.{module} --config {shlex.quote(url)}")

    def used(trial: TrialRecord, key: str) -> bool:
        try:
            return key in with_params(config.job, config.space, trial.begun.params)[1]
        except InputError:
            return True

    outcome = Outcome(config.space, trials, config.job.metric, used)
    write_results(config.out, outcome, commands=commands)
    if leader is not None and leader.result is not None:
        log.info(
            "best of %d trials: trial %d, %s %.4f: %s",
            len(trials), leader.number, config.job.metric, leader.result.value, join(config.out, REPORT),
        )  # fmt: skip
