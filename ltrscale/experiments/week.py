"""The week that comes every week: new rows in; a new model judged, and in service, or the old one stays.

    OUT/service.json            what is in service
    OUT/first/                  the first model, where none was in service
    OUT/new/                    the new rows as a data set, before they join that of training
    OUT/weeks/PERIOD/arrival/   the model in service on the new periods, and their drift
                    /models/    the candidate
                    /gate/      both on periods that neither has seen; the verdict
                    /final/     the candidate once more, on these periods too, if `refit` is set
                    /export/
                    /week.json  what the week began with, and how it ended

Every part is a stage that is skipped where it is up to date, so the same command goes on where it was stopped.
"""

import sys
from collections.abc import Iterator, Mapping

from ltrscale import storage
from ltrscale.bundle import content_hash
from ltrscale.bundle import load as load_bundle
from ltrscale.bundle.provenance import Provenance
from ltrscale.config import validate
from ltrscale.data.dataset.manifest import Dataset, one_view, open_dataset
from ltrscale.data.dataset.periods import in_few_words
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.errors import InputError, Refused
from ltrscale.evaluation.measure.evaluate import EvaluateJob
from ltrscale.evaluation.measure.settings import EvaluateConfig
from ltrscale.evaluation.weeks.decay import Decay, DriftJob
from ltrscale.evaluation.weeks.gate import GateJob
from ltrscale.evaluation.weeks.verdict import PRODUCTION, of_drift
from ltrscale.experiments.methods.base import SeedRun
from ltrscale.experiments.next_steps import predict_command, weekly_command
from ltrscale.experiments.refit import RefitJob
from ltrscale.experiments.service import SERVICE, InService, Week, folder_of
from ltrscale.experiments.weekly import WeeklyJob, named, steps
from ltrscale.ingest.prepare import PrepareJob
from ltrscale.launch.start import cluster_for
from ltrscale.progress import log
from ltrscale.serving.export import ExportJob
from ltrscale.serving.register import RegisterJob
from ltrscale.stages.runs import recorded
from ltrscale.storage import join


def run_weekly(job: WeeklyJob) -> None:
    """Do what remains to be done of a week; with `dry_run` print it.

    Raises:
        Refused: the new period, or the candidate, was refused, now or by an earlier run of the same command.
        InputError: as the stages.
    """
    if job.dry_run:
        sys.stdout.write("".join(f"{line}\n" for line in steps(job)))
        return
    with recorded(job.out, job, "weekly"), cluster_for(job.of.workers):
        week = _run(job)
    if week.outcome == "refused":
        raise Refused([*week.reasons, f"{week.period}: {_serving(job)} stays in service"])


def _run(job: WeeklyJob) -> Week:
    new = _arrived(job)
    earlier = Week.read(job.out, new.manifest.periods[-1])
    content = new.manifest.hash_of(_of_week(job, new))
    if earlier is None or (earlier.content, earlier.settings) != (content, job.settings):
        earlier = _begin(job, new, content, earlier)
    elif earlier.outcome != "under way":
        log.info("weekly: %s is done: %s; other rows or settings would be judged anew", earlier.period, earlier.outcome)
        return earlier
    _check_newest(job, earlier)
    week = _judged(job, new, earlier)
    week.write(job.out)
    log.info(
        "weekly: %s: %s; %s names what serves: %s", week.period, week.outcome, join(job.out, SERVICE), _serving(job)
    )
    for line in _next(job):
        log.info("next, %s", line)
    return week


def _arrived(job: WeeklyJob) -> Dataset:
    """The new periods as a data set of their own, so that rows that are refused never reach the other one."""
    if not job.inputs:
        return open_dataset(job.data)
    out = join(job.out, "new")
    PrepareJob(out=out, prepare=job.reading(add=False), ray=job.ray).run()
    return open_dataset(out)


def _of_week(job: WeeklyJob, new: Dataset) -> list[str]:
    """The new periods; of the whole data set only the last one is new."""
    return [*new.manifest.periods] if job.inputs else [new.manifest.periods[-1]]


def _check_newest(job: WeeklyJob, week: Week) -> None:
    """Check that a week that was stopped does not replace the model of a later one.

    Raises:
        InputError: it would.
    """
    now = InService.read(job.out)
    if now is not None and now.period > week.period:
        raise InputError(
            f"{week.period}: was stopped, and {now.bundle} of {now.period} is in service since, which an older model "
            "must not replace; nothing is left to do"
        )


def _begin(job: WeeklyJob, new: Dataset, content: str, earlier: Week | None) -> Week:
    """Start a week: find its periods and what is in service, and write them down.

    Raises:
        InputError: as `_check_new` and `_in_service`.
    """
    periods, all_periods = _of_week(job, new), open_dataset(job.data).manifest.periods
    _check_new(job, new, all_periods, is_begun=earlier is not None and earlier.content == content)
    before = [period for period in all_periods if period not in periods]
    splits = {key: named(job, names) for key, names in (("before", before), ("splits", [*before, *periods]))}
    production = _in_service(job, earlier, **splits)
    week = Week(
        period=periods[-1],
        content=content,
        settings=job.settings,
        production=production,
        bundle=earlier.bundle if earlier is not None else None,
        **splits,
    )
    week.write(job.out)
    return week


def _check_new(job: WeeklyJob, new: Dataset, all_periods: list[str], *, is_begun: bool) -> None:
    """Check that new periods may join those of the data set, or have joined it in an earlier run, and can be judged.

    Raises:
        InputError: the data set has later periods, or other rows of these; or the newest has no labels.
    """
    periods = _of_week(job, new)
    before, taken = ([p for p in all_periods if (p in periods) == is_taken] for is_taken in (False, True))
    if before and before[-1] > periods[0]:
        raise InputError(
            f"{new.url}: the rows are of {in_few_words(periods)}, and {job.data} has {before[-1]!r} already; add "
            "earlier periods with jobs.prepare (prepare.add), which judges nothing"
        )
    if job.inputs and taken and not is_begun:
        remedy = "leave inputs out to judge the newest period as it is there"
        if taken != periods:
            remedy = "leave its rows out of the inputs"
        raise InputError(
            f"{new.url}: {job.data} has {in_few_words(taken)} already, and a period is not replaced; {remedy}"
        )
    if not any(cell.labelled for f in new.manifest.files if f.period == periods[-1] for cell in f.row_groups):
        raise InputError(
            f"{new.url}: {periods[-1]} has no labels, by which models are judged; run this again once it has some"
        )


def _in_service(job: WeeklyJob, earlier: Week | None, before: SplitsWithTest, splits: SplitsWithTest) -> str:
    """What the candidate of a week is compared with; trains the first model where nothing is in service yet.

    Raises:
        InputError: as `_unseen`, before it is in service: `production` may then name another.
    """
    now = InService.read(job.out)
    if now is not None:  # a week that is judged anew is compared with what it was compared with before
        compared = earlier.production if earlier is not None and earlier.bundle == now.bundle else now.bundle
        _unseen(splits, compared)
        return compared
    first = storage.absolute(job.production or _first(job, before))
    _unseen(splits, first)
    InService.now(first, (before.test.periods or ("",))[-1]).write(job.out)
    log.info("weekly: %s is in service to begin with, compared with no other", first)
    return first


def _serving(job: WeeklyJob) -> str:
    now = InService.read(job.out)
    return "nothing" if now is None else now.bundle


def _first(job: WeeklyJob, before: SplitsWithTest) -> str:
    """The first model, which is evaluated alone."""
    log.info("weekly: nothing is in service; the first model learns from the periods before the new one")
    folder = join(job.out, "first")
    bundle = _trained(job, before, folder)
    config = EvaluateConfig(**job.evaluate.model_dump(), models={PRODUCTION: (bundle,)}, splits=before)
    EvaluateJob(out=join(folder, "evaluation"), evaluate=config, ray=job.ray).run()
    return bundle


def _trained(job: WeeklyJob, splits: SplitsWithTest, folder: str) -> str:
    """The method's bundle, trained with the first seed of the pipeline."""
    seed = job.of.seeds[0]
    with one_view():
        return SeedRun(job.of.methods, splits.drawn(seed), seed, job.of.workers, folder).model(job.method)


def _judged(job: WeeklyJob, new: Dataset, week: Week) -> Week:
    """Do all steps of a week, of which those that are done do nothing; returns how it ended."""
    folder = folder_of(job.out, week.period)
    if reasons := _drifted(job, new, week, join(folder, "arrival")):
        return week.replace(outcome="refused", reasons=reasons)
    if job.inputs and not {*new.manifest.periods} <= {*open_dataset(job.data).manifest.periods}:
        PrepareJob(out=job.data, prepare=job.reading(add=True), ray=job.ray).run()
    bundle = _trained(job, week.splits, join(folder, "models"))
    try:
        _gate(job, week, bundle, join(folder, "gate")).run()
    except Refused as refused:
        return week.replace(outcome="refused", reasons=str(refused).split("\n"))
    if job.refit:
        final = join(folder, "final")
        RefitJob(out=final, bundle=bundle, also=week.splits.test, workers=job.of.workers).run()
        bundle = final
    service = InService.now(
        storage.absolute(bundle), week.period, before=week.production, **_published(job, week, bundle)
    )
    service.write(job.out)
    return week.replace(outcome="in service", bundle=service.bundle)


def _drifted(job: WeeklyJob, new: Dataset, week: Week, out: str) -> list[str]:
    """Why the new periods are refused: the bounds on drift that they break, seen by the model in service."""
    test = week.splits.test.replace(data=new.url, periods=_of_week(job, new))
    splits = week.before.replace(test=test.model_dump())
    settings = {**job.evaluate.model_dump(), "slice_by": ("period",), "slices": {}}
    config = EvaluateConfig(**settings, models={PRODUCTION: (week.production,)}, splits=splits)
    evaluation, drift = join(out, "evaluation"), join(out, "drift")
    EvaluateJob(out=evaluation, evaluate=config, ray=job.ray).run(show=False)
    DriftJob(out=drift, evaluation=evaluation, **job.drift.model_dump()).run(show=False)
    return [check.reason for check in of_drift(Decay.read(drift).drift, job.bounds, PRODUCTION) if not check.holds]


def _gate(job: WeeklyJob, week: Week, candidate: str, out: str) -> GateJob:
    """The gate on the test periods that the model in service has not learnt from either."""
    splits = week.splits.replace(test=_unseen(week.splits, week.production).model_dump())
    return GateJob(
        out=out,
        production=week.production,
        candidate=candidate,
        splits=splits,
        evaluate=job.evaluate,
        bounds=job.bounds,
        drift=job.drift,
        ray=job.ray,
    )


def _unseen(splits: SplitsWithTest, production: str) -> Split:
    """The test periods after the last one that a bundle has learnt from, or was selected on.

    Raises:
        InputError: there is none.
    """
    test, origin = splits.test, validate(Provenance, load_bundle(production).made_by, production)
    named_periods = {period for split in splits.by_name.values() for period in split.periods or ()}
    learnt = {period for split in origin.config.splits for period in split.periods or ()} & named_periods
    if not learnt:  # as of one that learnt from tables in memory
        log.warning("weekly: %s names none of these periods as learnt from; it is taken to have seen none", production)
    until = max(learnt, default="")
    newer = [period for period in test.periods or () if period > until]
    if not newer:
        raise InputError(
            f"splits.test: {production} has learnt from {until!r}, so that no test period is left to judge it on; give "
            "the rows of a newer period"
        )
    return test.replace(periods=newer)


def _published(job: WeeklyJob, week: Week, bundle: str) -> Mapping[str, str | None]:
    """Export and register a bundle, as far as the config asks for it; returns where it is and its version."""
    folder, published = folder_of(job.out, week.period), dict[str, str | None]()
    if job.export is not None:
        out = join(folder, "export")
        ExportJob(out=out, bundle=bundle, to=job.export, data=job.data, periods=week.splits.test.periods).run()
        published["export"] = storage.absolute(out)
    if job.registry is not None:
        # a run that was stopped after this must not register it again
        done = join(folder, f"registered-{content_hash(bundle)[:12]}.txt")
        version = storage.read_if_there(done)
        if version is None:
            version = RegisterJob(bundle=bundle, **job.registry.model_dump()).run().encode()
            storage.write_bytes(done, version)
        published["version"] = version.decode()
    return published


def _next(job: WeeklyJob) -> Iterator[str]:
    """The commands that come next."""
    service = InService.read(job.out)
    if service is not None:
        yield f"to rank new rows: {predict_command(service.bundle, job.data, join(job.out, 'predictions'))}"
    if command := weekly_command(f"{job.out.rstrip('/')}.yaml"):
        yield f"when the next period is there: {command}"
