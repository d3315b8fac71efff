"""A study: methods at several numbers of labelled groups, over several draws of these groups.

Each model is a cell: a number of labelled groups, a draw, initial weights and a method. Below `out` are

    test/                                    the test groups, and which of them are outliers
    pretrained/seed-0/METHOD/pretrained/     encoders; they see no labels, so one serves all draws
    models/100/draw-3/seed-0/METHOD/model/   bundles, as a pipeline makes them
    models/100/draw-3/seed-0/METHOD/measured/  every metric of every test group
    summary/report.md                        written anew while models arrive

Encoders, models and measurements are stages: those that are up to date are skipped, so a study resumes after any end.
"""

import functools
import time
from collections.abc import Mapping

from ltrscale import storage
from ltrscale.data.dataset.disjoint import check_disjoint
from ltrscale.data.dataset.manifest import one_view
from ltrscale.data.dataset.periods import with_relative_named
from ltrscale.data.dataset.selection import select
from ltrscale.errors import InputError
from ltrscale.evaluation.studies.study import Cost, Design, Model, Study
from ltrscale.evaluation.studies.study_page import document
from ltrscale.experiments.study_grid import StudyConfig, cells_of, shared_encoders
from ltrscale.experiments.study_models import Spent, StudyParts, StudySummary, Summarised
from ltrscale.progress import log, progress
from ltrscale.reports.findings import print_report
from ltrscale.stages.runs import recorded
from ltrscale.stages.tasks import Costs, Task, run_all
from ltrscale.storage import join

_REPORT_S = 60.0


def run_study(config: StudyConfig) -> None:
    """Pretrain, train and measure every model, and report; skips what is up to date.

    The report is written anew while models arrive. A part that fails does not end the others.

    Raises:
        InputError: splits overlap or have too few labelled groups, before anything is trained; or some parts failed,
            at the end.
        Stopped: the process was asked to stop; the same command goes on.
    """
    if config.data is not None:
        config = config.replace(splits=config.splits.on(config.data).model_dump())
    with recorded(config.out, config, "study"), one_view() as view:
        config = with_relative_named(config)
        check_disjoint(config.splits)
        select(config.splits.test, labelled=True)
        for sized in map(config.sized, config.numbers):
            for split in (sized.train, sized.validation):
                select(split, labelled=True)
        failed = _run(StudyParts(config, view))
    if storage.read_manifest(summary := join(config.out, "summary")) is not None:
        print_report(summary, document(Study.read(summary)))
    if failed:
        first = next(iter(failed))
        raise InputError(
            f"{config.out}: {len(failed)} tasks failed, the first is {first} ({failed[first]}); the report names all, "
            "and the same command tries them again"
        )


def _tasks(parts: StudyParts) -> list[Task]:
    """The tasks of the study: pretraining first, for it takes longest."""
    methods, cells = shared_encoders(parts.config.methods), cells_of(parts.config)
    test = Task("test groups", parts.describe_test)
    pretrainings: dict[str, Task] = {}
    models: dict[str, Task] = {}
    for cell in cells:
        needs = [test.name, *(cell.replace(method=name).folder for name in methods[cell.method].built_on())]
        if (encoder := methods[cell.method].encoder(cell.method, methods)) is not None:
            name = f"pretraining of {encoder}, seed {cell.seed}"
            pretrain = functools.partial(parts.pretrain, encoder, cell.seed)
            pretrainings[name] = Task(
                name, pretrain, kind=f"pretraining of {encoder}", folder=parts.encoder(encoder, cell.seed)
            )
            needs.append(name)
        train, size = functools.partial(parts.train, cell), float(cell.labelled)
        models[cell.folder] = Task(
            cell.folder, train, tuple(needs), kind=cell.method, size=size, folder=parts.place(cell.folder)
        )
    return [test, *pretrainings.values(), *models.values()]


def _run(parts: StudyParts) -> dict[str, str]:
    """Run all tasks, and write the report now and then; returns the failures."""
    tasks = _tasks(parts)
    done: set[str] = set()
    failed: dict[str, str] = {}
    costs, share = Costs(tasks), 0.0
    start = reported = time.monotonic()
    with progress("study", 1.0, "tasks") as advance:

        def ended(task: Task, failure: str | None, seconds: float) -> None:
            nonlocal reported, share
            if failure is None:
                done.add(task.name)
            else:
                failed[task.name] = failure
                log.warning("study: %s failed: %s", task.name, failure)
            before, share = share, costs.done(task, seconds, _cost(task, seconds))
            advance(1, share - before)
            log.info("study: %d of %d, %s", len(done) + len(failed), len(tasks), task.name)
            if time.monotonic() - reported >= _REPORT_S:
                _summarise(parts, done, failed)
                reported = time.monotonic()

        run_all(tasks, parts.config.workers, ended)
    log.info("study: %d of %d done in %.0f s", len(done), len(tasks), time.monotonic() - start)
    _summarise(parts, done, failed)
    return failed


def _cost(task: Task, seconds: float) -> float:
    """The seconds of a task in all runs, of which this one took some."""
    spent = Spent.read(task.folder) if task.folder else None
    return seconds if spent is None else max(seconds, spent.seconds)


def _summarise(parts: StudyParts, done: set[str], failed: Mapping[str, str]) -> None:
    """Write the report of the models that are measured."""
    config, methods, cells = parts.config, shared_encoders(parts.config.methods), cells_of(parts.config)
    models = []
    for cell in (cell for cell in cells if cell.folder in done):
        spent = Spent.read(parts.place(cell.folder)) or Spent(of="")
        url = parts.place(cell.folder, "measured")
        costs = {"seconds": spent.seconds if spent.done else None, "documents": spent.documents}
        models.append(Model(**cell.model_dump(exclude={"labelled"}), labelled=str(cell.labelled), url=url, **costs))
    if not models:
        return
    design = Design(
        labelled={str(n): float(n) if isinstance(n, int) else None for n in config.numbers},
        methods={
            name: config.methods[name].about(config.methods)
            for name in config.methods
            if name in {c.method for c in cells}
        },
        baseline=config.evaluate.baseline,
        controls=config.controls,
        counts=config.counts,
        validation_share=config.validation_share,
        validation_size=config.splits.validation.size,
        primary=f"ndcg@{config.evaluate.primary_cutoff}",
        relevant_from=config.evaluate.relevant_from,
        leave_out_constant=config.evaluate.leave_out_constant,
        planned=len(cells),
        seeds=len({cell.seed for cell in cells}),
        failed=dict(failed),
        pretraining={
            name: _pretraining_cost(parts, encoder)
            for name in methods
            if (encoder := methods[name].encoder(name, methods))
        },
    )
    summarised = Summarised(design=design, models=tuple(models))
    StudySummary(out=parts.place("summary"), test=parts.place("test"), summarised=summarised).run()


def _pretraining_cost(parts: StudyParts, name: str) -> Cost:
    """Mean time of pretraining over seeds."""
    seeds = {cell.seed for cell in cells_of(parts.config)}
    folders = [parts.encoder(name, seed) for seed in seeds]
    spent = [record for folder in folders if (record := Spent.read(folder)) is not None and record.done]
    seconds = sum(each.seconds for each in spent)
    if not seconds:
        return Cost()
    return Cost(
        pretraining_minutes=seconds / len(spent) / 60,
        pretraining_documents_per_s=sum(each.documents for each in spent) / seconds,
    )
