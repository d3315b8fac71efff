"""Methods made of others: searches, means of runs, blends, combined networks, students, stacks; the union of all."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from ltrscale.config import by_kind, kind_of
from ltrscale.data.dataset.labelled import Fold, fold_of
from ltrscale.data.dataset.periods import with_periods_named
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, Splits
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.errors import InputError
from ltrscale.evaluation.studies.traits import MethodTraits
from ltrscale.experiments.methods.base import Method, MethodName, SeedRun
from ltrscale.experiments.methods.neural import InContextMethod, NeuralMethod, network
from ltrscale.experiments.methods.students import NetworkStudent, Student
from ltrscale.experiments.methods.trees import FeatureMethod, GBDTMethod, SemiMethod, limited
from ltrscale.scoring.score import ScoreJob
from ltrscale.training.combine import BlendConfig, BlendJob, CombineConfig, CombineJob
from ltrscale.training.settings import Preset
from ltrscale.trees.stacking import StackConfig, StackedJob, StackMember, check_ready
from ltrscale.tuning.searched import Searched
from ltrscale.tuning.space import SamplerConfig, Space
from ltrscale.tuning.tune import TuneJob


class TunedMethod(Method):
    """Another method with the settings that a search finds best on the validation groups.

    Each sample of labelled groups has its own search: the trials of a seed learn from its labels alone.
    """

    kind: Literal["tuned"] = "tuned"
    of: str
    """Name of a method of kind gbdt or neural, which is trial 0; pretraining is not part of a trial."""
    space: Space = Field(min_length=1)
    """Values of dotted keys of that method, `gbdt.NAME` or `finetune.NAME`, as in jobs.tune."""
    trials: int = Field(30, ge=1)
    """Number of trials; HOU24 uses up to 150 on its industrial log, and grids of 27 cells on public data."""
    minutes: float | None = Field(None, gt=0)
    """Also end the search after this much time of trials; empty for no limit."""
    search: SamplerConfig = SamplerConfig()

    @property
    def is_one_model(self) -> bool:
        return True

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        if self.of not in methods or not methods[self.of].is_searchable:
            raise ValueError(
                f"{where}.of: {self.of!r} is not a neural method without starts_from, nor one of a single gbdt"
            )

    def encoder(self, name: str, methods: Mapping[str, Method]) -> str | None:
        return methods[self.of].encoder(self.of, methods)

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return methods[self.of].about(methods).replace(tuned=True)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        (job,) = self._best(run, name, 1)
        (stage,) = job.stages(out)
        stage.run()

    def train_best(self, run: SeedRun, name: str, number: int) -> list[str]:
        """Models with the settings of the best `number` trials, best first; fewer if the search has fewer."""
        bundles = [run.model(name)]
        for rank, job in enumerate(self._best(run, name, number)[1:], 1):
            (stage,) = job.stages(run.place(name, "leaders", str(rank), "model"))
            stage.run()
            bundles.append(stage.out)
        return bundles

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        run.methods[self.of].average(run, bundles, out)

    def _best(self, run: SeedRun, name: str, number: int) -> list[Searched]:
        """The jobs with the best settings; repeated runs share the first run's search."""
        if run.searches is not None:
            return [job.with_seed(run.seed) for job in self._best(run.searches, name, number)]
        job = run.methods[self.of].search_job(run, self.of)
        settings = self.model_dump(include={"space", "trials", "minutes", "search"})
        return TuneJob(out=run.place(name, "search"), job=job, **settings).best_here(number)


class EnsembleMethod(Method):
    """The mean score of several models of one method: of other seeds, without a fold each, or a search's best trials.

    With another seed networks have other initial weights and another order of the data, trees other samples of rows and
    columns. Runs of a tuned method all have the settings that its search found, unless they are its best trials.
    Compare a mean with a mean: three networks are ahead of one model of trees by their number alone.
    """

    kind: Literal["ensemble"] = "ensemble"
    of: str
    """Name of a method of kind neural, gbdt, tuned or in_context; its own run counts as the first."""
    runs: int = Field(3, ge=2)
    """Total number of models; DASALC-ens takes 3 to 5."""
    over: Literal["seeds", "folds", "trials"] = "seeds"
    """How the models differ: in their `seeds`; in their `folds`, of which there are as many as `runs` and each model
    lacks one; or they are the best `trials` of the search of a tuned method, each with its settings."""

    def built_on(self) -> tuple[str, ...]:
        return (self.of,)

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        if self.of not in methods or not methods[self.of].is_one_model:
            raise ValueError(f"{where}.of: {self.of!r} is not a neural method, nor another of one model")
        if self.over == "seeds":
            methods[self.of].check_differs(f"{where}.runs")
        if self.over == "trials" and not isinstance(methods[self.of], TunedMethod):
            raise ValueError(f"{where}.over: trials are those of a search, and {self.of!r} is not of kind tuned")

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        traits = methods[self.of].about(methods)
        return MethodTraits(family=traits.family, tuned=traits.tuned)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        method = run.methods[self.of]
        if self.over == "folds":
            bundles = [run.without(fold).model(self.of) for fold in self.folds_in(run)]
        elif self.over == "trials":
            assert isinstance(method, TunedMethod)
            bundles = method.train_best(run, self.of, self.runs)
        else:
            bundles = run.repeated(self.of, self.runs)
        method.average(run, bundles, out)

    def folds_in(self, run: SeedRun) -> list[Fold]:
        """The folds; each model leaves one out."""
        dealt = run.splits.train.fold
        return [fold_of(dealt, k, self.runs, held_out=False, seed=run.seed) for k in range(self.runs)]


class BlendMethod(Method):
    """The mean of other methods' scores, with weights that are equal by half, and by half chosen by validation.

    Trees and networks err differently, so that their mean is often better than each.
    """

    kind: Literal["blend"] = "blend"
    members: tuple[str, ...] = Field(min_length=2)
    """Names of other methods, of any kind."""
    blend: BlendConfig = BlendConfig()

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    def built_on(self) -> tuple[str, ...]:
        return self.members

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        for member in self.members:
            if member not in methods or isinstance(methods[member], BlendMethod):
                raise ValueError(f"{where}.members: {_what_is(member, methods)}; name another method")

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        families = {methods[member].about(methods).family for member in self.members}
        return MethodTraits(family=families.pop() if len(families) == 1 else "mixed")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        bundles, settings = {member: run.model(member) for member in self.members}, self.blend.replace(seed=run.seed)
        BlendJob(out=out, splits=run.splits, bundles=bundles, blend=settings).run()


class CombinedMethod(Method):
    """One ranker that combines the rankers of several neural methods with the same seed."""

    kind: Literal["combined"] = "combined"
    parts: tuple[str, ...] = Field(min_length=2)
    """Names of neural methods."""
    combine: CombineConfig = CombineConfig(how="concat")

    def built_on(self) -> tuple[str, ...]:
        return self.parts

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        networks = [network(f"{where}.parts", part, methods) for part in self.parts]
        if len({each.left_out(methods) for each in networks}) > 1:
            raise ValueError(f"{where}.parts leave out different features; combine rankers of the same ones")

    def streams(self) -> Sequence[StreamConfig]:
        return [self.combine.stream] if self.combine.how == "concat" else []

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        families = {methods[part].about(methods).family for part in self.parts}
        return MethodTraits(family="pretrained" if "pretrained" in families else "not pretrained")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        bundles, settings = tuple(map(run.model, self.parts)), self.combine.replace(seed=run.seed)
        CombineJob(out=out, bundles=bundles, splits=run.splits, combine=settings, workers=run.workers).run()


class SelfTrainedMethod(Method):
    """A student that learns the mean score of several runs of a method on all training groups, then the labels.

    The groups whose labels are in use teach the runs, and the student in the end; no other label is read.
    """

    kind: Literal["self_trained"] = "self_trained"
    of: str
    """Name of the method whose runs teach: any but stacks, blends, self-trained methods and orders of a feature."""
    runs: int = Field(3, ge=1)
    """Total number of runs, as for an ensemble; the method's own run counts as the first."""
    groups: int | None = Field(None, ge=1)
    """Learn the scores of at most this many training groups, a random sample; empty for all groups."""
    student_as: str | None = None
    """Name of the neural method, or of the method of LightGBM's trees, whose settings train the student on the labels;
    it starts from that method's pretrained encoder, if there is one. Empty for `of`."""
    student: Student = NetworkStudent()
    """How the student learns the scores: as a network, or as trees by one of three objectives."""

    can_teach: ClassVar = False

    def built_on(self) -> tuple[str, ...]:
        return (self.of,)

    def encoder(self, name: str, methods: Mapping[str, Method]) -> str | None:
        return methods[self._trained_as].encoder(self._trained_as, methods)

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        if self.of not in methods or not methods[self.of].can_teach:
            raise ValueError(f"{where}.of: {_what_is(self.of, methods)}; name another method")
        if self.runs > 1:
            methods[self.of].check_differs(f"{where}.runs")
        trained_as = methods.get(self._trained_as)
        if trained_as is None or not trained_as.takes(self.student):
            raise ValueError(
                f"{where}.student of kind {self.student.kind} is trained as {self._trained_as!r}, which is not "
                f"{self.student.needs}; name one as student_as, or choose another kind"
            )

    def streams(self) -> Sequence[StreamConfig]:
        return self.student.streams()

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        teacher, student = (methods[name].about(methods).family for name in (self.of, self._trained_as))
        if student == "trees":
            return MethodTraits(family="trees" if teacher == "trees" else "mixed")
        return MethodTraits(family="pretrained" if "pretrained" in (teacher, student) else student)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        method = run.methods[self._trained_as]
        labels = method.splits_in(run)
        scored = self._scored(run, name, labels.train)
        scores = labels.replace(train=scored.replace(leave_out=labels.train.leave_out))
        method.train_student(self.student, run, self._trained_as, scores, run.place(name, "student"), out)

    def _scored(self, run: SeedRun, name: str, split: Split) -> Split:
        """The groups of a training split, or a sample of them, with the mean scores of the runs as labels."""
        train, scores = with_periods_named(split), run.place(name, "scores")
        if len(train.data) > 1:
            raise InputError(f"{name} learns scores of one data set, train has {', '.join(train.data)}; name one")
        bundles = tuple(run.repeated(self.of, self.runs))
        ScoreJob(out=scores, bundle=bundles, data=train.data[0], periods=train.periods, layout="scores").run()
        scored = Split(data=train.data, periods=train.periods, scores=scores, labelled_seed=train.labelled_seed)
        share = 1.0 if self.groups is None else self.groups / select(scored, labelled=True).n_groups
        return scored.replace(labelled_fraction=min(1.0, share))

    @property
    def _trained_as(self) -> str:
        """The method whose settings train the student on the labels."""
        return self.student_as or self.of


class StackMethod(Method):
    """Trees over the scores of other methods of the same seed, of bundles, and over raw features."""

    kind: Literal["stack"] = "stack"
    members: tuple[str, ...] = ()
    """Names of methods other than stacks, blends and orders of a feature; each is trained again for every fold."""
    bundles: dict[MethodName, str] = Field(default_factory=dict)
    """Bundles whose scores the trees see too; they must not have seen labels of the training split."""
    stack: StackConfig = StackConfig()

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    def built_on(self) -> tuple[str, ...]:
        return self.members

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        if not self.members and not self.bundles:
            raise ValueError(f"{where}: members and bundles are both empty; name at least one")
        if shared := self.bundles.keys() & {*self.members}:
            raise ValueError(f"{where}.bundles.{min(shared)} has the name of a member; choose another")
        for member in self.members:
            if member not in methods or not methods[member].can_be_member:
                raise ValueError(
                    f"{where}.members: {_what_is(member, methods)}; name another method, or the feature under "
                    "stack.features"
                )

    def check_inputs(self, splits: Splits) -> None:
        for ready, url in self.bundles.items():
            check_ready(ready, url, splits)

    def with_threads(self, threads: int) -> Self:
        return self.replace(stack=self.stack.replace(gbdt=limited(self.stack.gbdt, threads)))

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="mixed")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        settings = self.stack.replace(seed=run.seed, gbdt=self.stack.gbdt.replace(seed=run.seed))
        folds = [run.without(settings.fold(k, run.splits.train, held_out=False)) for k in range(settings.folds)]
        members = {
            member: StackMember(
                bundle=run.model(member),
                folds=() if run.learns_elsewhere(member) else tuple(fold.model(member) for fold in folds),
            )
            for member in self.members
        }
        members |= {ready: StackMember(bundle=url) for ready, url in self.bundles.items()}
        StackedJob(out=out, splits=run.splits, stack=settings, members=members).run()


def _what_is(name: str, methods: Mapping[str, Method]) -> str:
    """The name of a method that cannot be built on, and its kind."""
    return f"{name!r} is {f'of kind {kind_of(type(methods[name]))}' if name in methods else 'unknown'}"


AnyMethod = Annotated[
    GBDTMethod
    | SemiMethod
    | NeuralMethod
    | InContextMethod
    | TunedMethod
    | CombinedMethod
    | EnsembleMethod
    | BlendMethod
    | SelfTrainedMethod
    | StackMethod
    | FeatureMethod,
    Field(discriminator="kind"),
]


def with_preset(preset: Preset, methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods, as in a config, with this preset for those that name none and have presets."""
    kinds = by_kind(AnyMethod)

    def filled(settings: Any) -> Any:
        kind = kinds.get(str(settings.get("kind"))) if isinstance(settings, Mapping) else None
        return settings if kind is None else kind.with_preset(preset, settings, methods)

    return {name: filled(given) for name, given in methods.items()}
