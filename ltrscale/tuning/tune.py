"""Search over the settings of a job: each trial runs the job's stages in a separate directory.

The metric is the validation metric of the bundle that a trial commits. Below `out` are the history and the outputs of
the trials (`trials/00007/...`), the table and report of the search, and the best settings as configs for the jobs.
"""

import functools
import math
import shlex
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ltrscale import config as configs
from ltrscale import storage
from ltrscale.config import Operational, recordable
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.preflight import contents_of_read, difference
from ltrscale.errors import InputError
from ltrscale.progress import Report, log
from ltrscale.reports.findings import REPORT
from ltrscale.signals import stop_on_signal
from ltrscale.stages.runs import RUN_FILES, holding
from ltrscale.stages.stage import Origin, Settings, Stage
from ltrscale.storage import join
from ltrscale.tuning.history import PICTURES, TABLE, History, SearchOutcome, TrialRecord, best, write_results
from ltrscale.tuning.search import run_search, search_here
from ltrscale.tuning.searched import (
    FinetuneSearch,
    GBDTSearch,
    PretrainSearch,
    Searched,
    check_space,
    given_params,
    run_trial,
    with_params,
)
from ltrscale.tuning.space import Params, SearchConfig

_WRITTEN = (TABLE, REPORT, *PICTURES)
_BEST = ("best.yaml", "best-pretrain.yaml", "best-finetune.yaml")
_STARTER_CPUS = 0.1


class TuneJob(SearchConfig, Stage):
    """Search over the settings of a job."""

    stage: ClassVar = "tune"
    out: Operational[str]
    """Directory of the search: its history, the outputs of the trials, table, report and best settings."""
    job: Annotated[GBDTSearch | PretrainSearch | FinetuneSearch, Field(discriminator="kind")]
    """The job that a trial runs; trial 0 has its settings as given."""
    fresh: Operational[bool] = False
    """Start anew; removes the history in `out` with the outputs of its trials."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.asha is not None and not self.job.judges_on_the_way:
            raise ValueError("asha judges pretraining along the way: set job.pretrain.keep_every to some epochs")
        return self

    def check(self) -> None:
        """Refuse a space that does not fit the job, and splits that overlap."""
        check_space(self.job, self.space)
        check_disjoint(self.job.splits)

    def identity(self) -> Settings:
        """Settings and space, with all periods named."""
        space = {key: dimension.model_dump(mode="json") for key, dimension in self.space.items()}
        return {"job": self.job.identity(), "space": space}

    def is_done(self, origin: Origin) -> bool:  # noqa: ARG002
        """Never: the history decides which trials remain, and the results are written anew each time."""
        return False

    def recorded_as(self) -> Self:
        """The config without `fresh`: repeating the search must not delete it."""
        return self.replace(fresh=False)

    def clear(self) -> None:
        """Remove the history and the results."""
        if self.fresh:
            History(self.out).remove(RUN_FILES)
            for name in (*_WRITTEN, *_BEST):
                storage.remove(join(self.out, name))

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Run the remaining trials, all on the data sets as they were when the search began; write the results.

        Raises:
            InputError: `out` holds a search with other settings or other data, or all trials failed.
            Stopped: the search was asked to stop.
        """
        history, identity = History(self.out), history_of(self)
        before = history.identity()
        if before is not None and "data" in before and (what := difference(before["data"], identity["data"])):
            raise InputError(f"{history.url}: the search there {what}, or remove its history with --fresh")
        history.open(identity)
        config, cpus, workers = self, self.cpus, self.job.workers
        if workers.most > 1 or workers.gpus > 0:  # a trial's process only waits for them; they need CPUs to read, too
            config = self.model_copy(update={"cpus": _STARTER_CPUS, "gpus": 0.0})
            cpus = _STARTER_CPUS + workers.most * (workers.cpus + 1)
        with one_view() as view, stop_on_signal() as stopping:
            run_search(
                config,
                functools.partial(run_trial, self.job, self.space, view=view),
                history,
                given=given_params(self.job, self.space),
                same=functools.partial(_same, self),
                report=report,
                stopping=stopping,
                cluster_cpus=math.ceil(self.concurrent * cpus),
            )
        write_found(self, history)

    def best_here(self) -> Searched:
        """Run the remaining trials one after the other in this process; returns the job with the best settings.

        Writes the history alone. One of another search or of other data is removed first.

        Raises:
            InputError: the space does not fit the job, splits overlap, or all trials failed.
        """
        self.check()
        with holding(self.out), one_view() as view:
            history, identity = History(self.out), history_of(self)
            if history.is_of_another(identity):
                log.info("tune: %s holds another search, which starts anew", self.out)
                history.remove(RUN_FILES)
            history.open(identity)
            leader = search_here(
                self,
                functools.partial(run_trial, self.job, self.space, view=view),
                history,
                given=given_params(self.job, self.space),
                same=functools.partial(_same, self),
            )
        return with_params(self.job, self.space, leader.begun.params)[0]


def history_of(config: TuneJob) -> dict[str, Any]:
    """Everything besides its parameters that the value of a trial depends on: the identity of the history."""
    return recordable({**config.identity(), "inputs": config.inputs(), "data": contents_of_read(config.job.reads())})


def _same(config: TuneJob, params: Params) -> str:
    """A text that is equal for parameters which lead to the same settings."""
    try:
        return configs.digest(with_params(config.job, config.space, params)[0].result())
    except InputError:  # the trial itself will fail with this error
        return configs.digest(params)


def write_found(config: TuneJob, history: History) -> None:
    """Write table, report, pictures and the best settings."""
    storage.check_lease(config.out)
    trials = history.trials()
    commands = []
    if (leader := best(trials)) is not None:
        job, _ = with_params(config.job, config.space, leader.begun.params)
        for name, stage in job.jobs(config.out).items():
            url = join(config.out, name)
            storage.write_bytes(url, configs.dump(stage).encode())
            commands.append(f"python -m jobs.{stage.stage} --config {shlex.quote(url)}")

    def used(trial: TrialRecord, key: str) -> bool:
        try:
            return key in with_params(config.job, config.space, trial.begun.params)[1]
        except InputError:
            return True

    outcome = SearchOutcome(config.space, trials, config.job.metric, used)
    write_results(config.out, outcome, commands=commands)
    if leader is not None and leader.result is not None:
        log.info(
            "best of %d trials: trial %d, %s %.4f: %s",
            len(trials), leader.number, config.job.metric, leader.result.value, join(config.out, REPORT),
        )  # fmt: skip
