"""The settings of `jobs.weekly`, and what a run with them would do."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from pydantic import Field

from ltrscale import storage
from ltrscale.config import Config, Operational, digest, load, result_of, validate
from ltrscale.data.dataset.manifest import open_dataset
from ltrscale.data.dataset.origin import read_as, settings_of
from ltrscale.data.dataset.periods import among, in_few_words
from ltrscale.data.dataset.split import Split, SplitsWithTest
from ltrscale.errors import InputError, suggestion
from ltrscale.evaluation.measure.settings import EvaluateSettings
from ltrscale.evaluation.weeks.drift import DriftSettings
from ltrscale.evaluation.weeks.verdict import Bounds
from ltrscale.experiments.methods.choices import MethodName
from ltrscale.experiments.pipeline import PipelineConfig
from ltrscale.experiments.service import SERVICE, InService
from ltrscale.ingest.inputs import Inputs, PrepareConfig, list_inputs
from ltrscale.serving.choices import FormatName
from ltrscale.serving.register import Registry
from ltrscale.storage import join

_NEW = "NEW"


class WeeklyJob(Config):
    """Add a new period, and put a model that has learnt from newer ones into service, unless it is refused."""

    out: Operational[str]
    """Directory for everything; `OUT/service.json` names the bundle in service."""
    pipeline: str
    """Config of a pipeline, such as shop/pipeline.yaml, whose data set grows, and which has the settings of the
    method."""
    method: MethodName = "trees"
    """The method of the pipeline that is trained."""
    inputs: Operational[Inputs] = ()
    """Files, directories or patterns with the rows of the new period, in the format of the data set; empty where the
    newest period has been added already."""
    splits: SplitsWithTest = SplitsWithTest(
        train=Split(periods=("all but last 2",)),
        validation=Split(periods=("last 1 but 1",)),
        test=Split(periods=("last 1",)),
    )
    """Periods to learn from, to select on, and to judge on, counted from the new one. Of `test` those count that the
    model in service has not learnt from either."""
    production: str | None = None
    """The bundle in service before the first week, such as a pipeline's. Without it the first week begins with a model
    of the method on the periods before the new one, which goes into service without being compared."""
    max_rejected: float | None = Field(None, ge=0, le=1)
    """Share of rejected new rows above which nothing is done; by default that of the data set."""
    bounds: Bounds = Bounds(refuse="worse", feature_psi=5.0)
    """What the new period and the candidate must keep to, as for jobs.gate. By default a candidate is refused that is
    shown to be worse, and a period in which some feature is plainly broken."""
    drift: DriftSettings = DriftSettings()
    """How drift is measured."""
    refit: bool = False
    """After the gate has said yes, train the candidate once more, as long as validation found best, on the validation
    and test periods too, and put that model into service: it knows the newest periods, and has not been judged."""
    export: FormatName | None = None
    """Export what goes into service for this program, as jobs.export."""
    registry: Registry | None = None
    """Register what goes into service in MLflow's registry, as jobs.register."""
    dry_run: Operational[bool] = False
    """Print what would be done, and do nothing."""
    ray: Operational[bool] = False
    """Read and measure in parallel on a Ray cluster; the results are the same."""

    @cached_property
    def of(self) -> PipelineConfig:
        """The pipeline.

        Raises:
            InputError: it has no such method, or changes the data set before it trains.
        """
        config = load(PipelineConfig, self.pipeline)
        if self.method not in config.methods:
            near = suggestion(self.method, config.methods, "its methods are")
            raise InputError(f"method: {self.pipeline} has no method {self.method!r}; {near}")
        changed = {"match": config.match, "relabel": config.relabel, "learn_from": config.learn_from or None}
        if keys := [key for key, value in changed.items() if value is not None]:
            raise InputError(f"{self.pipeline}: {keys[0]}: new periods join a data set of jobs.prepare; leave it out")
        if self.refit and not config.methods[self.method].is_one_model:
            raise InputError(
                f"refit: {self.method} makes several models, which cannot be trained once more; leave it out"
            )
        return config

    @property
    def data(self) -> str:
        """The data set that grows."""
        return self.of.data or join(self.of.out, "data")

    @property
    def settings(self) -> str:
        """Hash of all that decides on the outcome of a week, besides its rows and the model in service."""
        return digest([result_of(self).model_dump(mode="json", exclude={"out", "inputs"}), self._of_pipeline])

    @property
    def _of_pipeline(self) -> dict[str, Any]:
        return self.of.model_dump(mode="json", include={"methods", "seeds", "evaluate"})

    @property
    def evaluate(self) -> EvaluateSettings:
        """The pipeline's, without a baseline: what is in service takes its place."""
        return EvaluateSettings.model_validate({**self.of.evaluate.model_dump(), "baseline": None})

    def reading(self, *, add: bool) -> PrepareConfig:
        """The settings of `prepare` that read the new rows as those of the data set.

        Raises:
            InputError: the data set is missing, or is none of jobs.prepare.
        """
        before = open_dataset(self.data)
        made_by = before.manifest.made_by
        if made_by.get("stage") != "prepare":
            raise InputError(
                f"{self.data}: made by {made_by.get('stage')}; periods join a data set of jobs.prepare only"
            )
        given = {} if self.max_rejected is None else {"max_rejected": self.max_rejected}
        own = {"inputs": self.inputs, "add": add, "expect": {}}
        return validate(PrepareConfig, {**made_by["config"], **settings_of(read_as(before)), **given, **own}, self.data)


def named(job: WeeklyJob, periods: list[str]) -> SplitsWithTest:
    """The splits with the periods that there are, by name."""
    splits = job.splits.on(job.data)
    named = {name: among(split, periods, f"splits.{name}") for name, split in splits.by_name.items()}
    return SplitsWithTest.of(splits.replace(**{name: split.model_dump() for name, split in named.items()}))


def steps(job: WeeklyJob) -> Iterator[str]:
    """What a run would do, a line each."""
    periods, now = open_dataset(job.data).manifest.periods, InService.read(job.out)
    before, new = ([*periods], _NEW) if job.inputs else ([*periods[:-1]], periods[-1])
    production = now.bundle if now is not None else job.production
    splits, first = named(job, [*before, new]), named(job, before)
    yield f"weekly: dry run, nothing is written; {job.data} has {in_few_words(periods)}"
    if job.inputs:
        files = [file.url for file in list_inputs(job.inputs)]
        sizes = sum(map(storage.size, files)) / 1e6
        yield f"- read {', '.join(files[:3])} ({len(files)} files, {sizes:,.1f} MB) into {join(job.out, 'new')}"
    if production is None:
        yield f"- train {job.method} on {_shown(first.train)} as the first model, for nothing is in service"
    yield f"- drift of {new} from {_shown(first.train)}; refuse it by bounds, and leave {job.data} as it is"
    if job.inputs:
        yield f"- add {new} to {job.data}"
    yield f"- train {job.method} of {job.pipeline} on {_shown(splits.train)}, validate on {_shown(splits.validation)}"
    yield (
        f"- gate, bounds.refuse {job.bounds.refuse}: the candidate against {production or 'the first model'} on "
        f"{_shown(splits.test)}; refused: the old model stays, status 3"
    )
    if job.refit:
        yield "- refit the candidate on the validation and test periods too"
    if job.export:
        yield f"- export for {job.export}"
    if job.registry:
        yield f"- register as {job.registry.name}"
    yield f"- put it into service: {join(job.out, SERVICE)}"


def _shown(split: Split) -> str:
    return in_few_words(split.periods or ())
