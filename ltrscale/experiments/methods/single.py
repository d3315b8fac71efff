"""Methods that are not made of others: trees, networks, a reader of examples, and the order of one feature."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ltrscale.bundle import FeatureOrder
from ltrscale.config import overlay
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import Method, NetworkStudent, ReadingMethod, SeedRun, Student
from ltrscale.origin import digest, settings_of
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.training.combine import BlendConfig, BlendJob, CombineConfig, CombineJob
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.pretrain import PretrainConfig, PretrainJob
from ltrscale.training.settings import Preset, finetuning
from ltrscale.training.untrained import FeatureJob, InContextConfig, InContextJob
from ltrscale.trees.configs import GBDTConfig, LightGBMConfig
from ltrscale.trees.gbdt import AverageJob, EnsembleConfig, GBDTJob, LearningTrees, check_draws
from ltrscale.trees.semi import SemiConfig, SemiJob
from ltrscale.tuning.searched import FinetuneSearch, GBDTSearch
from ltrscale.tuning.space import label


class GBDTMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups."""

    kind: Literal["gbdt"] = "gbdt"
    gbdt: GBDTConfig = LightGBMConfig()
    """The library that grows the trees, with its settings."""
    ensemble: EnsembleConfig | None = None
    """Average several models that validation chooses; empty for one model."""

    @model_validator(mode="after")
    def _has_different_candidates(self) -> Self:
        if self.ensemble is not None:
            check_draws(self.gbdt)
        return self

    @classmethod
    def preset_settings(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The trees of a preset."""
        return {"gbdt": trees_of_preset(preset, given.get("gbdt"))}

    @property
    def is_one_model(self) -> bool:
        return self.ensemble is None

    @property
    def is_searchable(self) -> bool:
        return self.ensemble is None

    def check_differs(self, where: str) -> None:
        check_draws(self.gbdt, where=where)

    def with_threads(self, threads: int) -> Self:
        return self.replace(gbdt=limited(self.gbdt, threads))

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="trees", unlabelled="none")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        candidates = self.ensemble.candidates if self.ensemble else 1
        # distinct candidates per run; seeds of repeated runs are large, and libraries take 31 bits
        trees = self.gbdt.replace(seed=run.seed * candidates % 2**30)
        GBDTJob(out=out, splits=self.splits_in(run), gbdt=trees, ensemble=self.ensemble).run()

    def search_job(self, run: SeedRun, name: str) -> GBDTSearch:
        return GBDTSearch(splits=self.splits_in(run), gbdt=self.gbdt.replace(seed=run.seed))

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        AverageJob(out=out, bundles=tuple(bundles), splits=self.splits_in(run)).run()

    def takes(self, student: Student) -> bool:
        return isinstance(student, LearningTrees) and self.is_one_model and self.gbdt.goes_on

    def train_student(self, student: Student, run: SeedRun, name: str, scores: Splits, start: str, out: str) -> None:
        assert isinstance(student, LearningTrees)
        first = student.trees.replace(seed=run.seed, per_query=self.gbdt.per_query)
        GBDTJob(out=start, splits=scores, gbdt=first).run()
        trees = self.gbdt.replace(seed=run.seed)
        GBDTJob(out=out, splits=self.splits_in(run), gbdt=trees, start=start).run()


def limited(trees: GBDTConfig, threads: int) -> GBDTConfig:
    """The trees with a number of threads, if they would take all cores."""
    return trees.replace(num_threads=trees.num_threads or threads)


def trees_of_preset(preset: Preset, given: Any) -> dict[str, Any]:
    """A cell of HOU24's grid, with LightGBM's defaults otherwise; other libraries get only the inputs."""
    inputs = {"per_query": True} if preset == "hou24" else {}
    kind = given.get("kind", "lightgbm") if isinstance(given, Mapping) else "lightgbm"
    if kind != "lightgbm":
        return {"kind": kind, **inputs}
    stop = {"early_stopping_rounds": 20 if preset == "hou24" else None}  # LightGBM does not stop early by default
    grid = {"num_leaves": 31, "min_data_in_leaf": 20, "feature_fraction": 1, "num_trees": 100, "learning_rate": 0.1}
    return {"kind": kind, **grid, **stop, **inputs}


class SemiMethod(ReadingMethod):
    """Gradient boosted trees on the labelled groups, helped by the unlabelled ones."""

    kind: Literal["semi_gbdt"] = "semi_gbdt"
    semi: SemiConfig

    @classmethod
    def preset_settings(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """The trees, and settings of principal components and pseudo-labels if the method uses them."""
        semi = given.get("semi")
        semi = semi if isinstance(semi, Mapping) else {}
        settings: dict[str, Any] = {"gbdt": trees_of_preset(preset, semi.get("gbdt"))}
        if semi.get("first") is not None:
            settings["first"] = trees_of_preset(preset, semi["first"])
        if preset == "hou24":
            settings["pca_scaled"] = False
            if semi.get("pseudo_labels") is not None:
                settings["pseudo_labels"] = {"grades": 5, "bins": "even"}
        return {"semi": settings}

    def check_differs(self, where: str) -> None:
        check_draws(self.semi.gbdt, where=where)

    def with_threads(self, threads: int) -> Self:
        first = None if self.semi.first is None else limited(self.semi.first, threads)
        return self.replace(semi=self.semi.replace(gbdt=limited(self.semi.gbdt, threads), first=first))

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        used = [("PCA", self.semi.pca), ("pseudo-labels", self.semi.pseudo_labels)]
        return MethodTraits(family="trees", unlabelled=" + ".join(word for word, value in used if value is not None))

    def train(self, run: SeedRun, name: str, out: str) -> None:
        SemiJob(out=out, splits=self.splits_in(run), semi=self.semi.with_seed(run.seed)).run()


class FeatureMethod(FeatureOrder, Method):
    """The order of one feature, such as BM25: a baseline that learns nothing."""

    kind: Literal["feature"] = "feature"

    can_teach: ClassVar = False
    can_be_member: ClassVar = False

    def check_inputs(self, splits: Splits) -> None:
        self.among(select(splits.train, labelled=True).features)

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="feature")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        order = FeatureOrder(feature=self.feature, ascending=self.ascending)
        FeatureJob(out=out, splits=run.splits, order=order).run()


class NeuralMethod(ReadingMethod):
    """A network finetuned on the labelled groups, after pretraining or from random weights."""

    kind: Literal["neural"] = "neural"
    pretrain: PretrainConfig | None = None
    """Empty for the baseline without pretraining."""
    pretrained_as: str | None = None
    """Start from the pretrained encoder of this other method; it is pretrained once for both."""
    starts_from: str | None = None
    """Start from the ranker of this other method, such as one that has learnt clicks; `finetune.keep_head` keeps its
    head, too."""
    finetune: FinetuneConfig = FinetuneConfig()

    is_one_model: ClassVar = True

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        keys = {"pretrain": self.pretrain, "pretrained_as": self.pretrained_as, "starts_from": self.starts_from}
        origins = [key for key, origin in keys.items() if origin is not None]
        if len(origins) > 1:
            raise ValueError(f"{' and '.join(origins)} exclude each other; leave one of them out")
        if origins not in ([], ["pretrain"]) and self.leave_out:
            raise ValueError(f"{origins[0]} brings the features of its encoder; set leave_out at that method alone")
        return self

    @classmethod
    def preset_settings(cls, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
        """Pretraining, head and finetuning of a preset; a ValueError where the layers that are kept must be given."""
        finetune = given.get("finetune", {})
        if given.get("pretrained_as") is not None:
            if preset == "hou24" and isinstance(finetune, Mapping) and "projector_layers" not in finetune:
                raise ValueError(
                    "preset hou24 keeps the first projector layer of some methods; set finetune.projector_layers "
                    "beside pretrained_as: 1 for those of the SimCLR family, 0 for others"
                )
            return {"finetune": finetuning(preset, SimCLRRankConfig().kind)}
        if given.get("pretrain") is None:
            return {"finetune": finetuning(preset, None)}
        return {"pretrain": {"preset": preset}, "finetune": finetuning(preset, _pretext(given["pretrain"]))}

    @classmethod
    def with_preset(cls, preset: Preset, given: Mapping[str, Any], methods: Mapping[str, Any]) -> Mapping[str, Any]:
        settings = super().with_preset(preset, given, methods)
        other = methods.get(str(given.get("pretrained_as")))
        if settings["preset"] == preset and isinstance(other, Mapping):
            projector_layers = finetuning(preset, _pretext(other.get("pretrain")))["projector_layers"]
            return overlay({"finetune": {"projector_layers": projector_layers}}, settings)
        return settings

    @property
    def is_searchable(self) -> bool:
        return self.starts_from is None  # trials cannot start from a ranker

    def built_on(self) -> tuple[str, ...]:
        return () if self.starts_from is None else (self.starts_from,)

    def check(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        if self.starts_from is not None:
            self._check_start(where, name, methods)
            return
        other = self if self.pretrained_as is None else methods.get(self.pretrained_as)
        pretrain = other.pretrain if isinstance(other, NeuralMethod) else None
        if pretrain is None and self.pretrained_as is not None:
            raise ValueError(f"{where}.pretrained_as {self.pretrained_as!r} is not a method that pretrains")
        try:
            self.finetune.check_start(None if pretrain is None else pretrain.method.projector_layers)
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from error

    def _check_start(self, where: str, name: str, methods: Mapping[str, Method]) -> None:
        """Check that the rankers that it starts from are networks, without a cycle."""
        passed, foundations = [name], self.built_on()
        while foundations:
            if (other := foundations[0]) in passed:
                raise ValueError(
                    f"{where}.starts_from leads from {' to '.join(passed)} and back; let one start elsewhere"
                )
            passed.append(other)
            foundations = network(f"{where}.starts_from", other, methods).built_on()

    def keeping(self, production: str) -> Self:
        goals = self.finetune.goals
        if goals is None or not goals.keep:
            return self
        return self.replace(finetune=self.finetune.replace(goals=goals.replace(production=production)))

    def streams(self) -> Sequence[StreamConfig]:
        return [self.finetune.stream, *([self.pretrain.stream] if self.pretrain else [])]

    def left_out(self, methods: Mapping[str, Method]) -> frozenset[str]:
        """The features left out by it or by the method that it starts from."""
        other = methods.get(self.pretrained_as or self.starts_from or "")
        return other.left_out(methods) if isinstance(other, NeuralMethod) else frozenset(self.leave_out)

    def encoder(self, name: str, methods: Mapping[str, Method]) -> str | None:
        return self.pretrained_as if self.pretrain is None else name

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        if self.starts_from is not None:
            first = methods[self.starts_from].about(methods)
            return MethodTraits(family=first.family, tuned=first.tuned)
        if self.pretrained_as is not None:
            of_encoder = methods[self.pretrained_as].about(methods)
        elif self.pretrain is None:
            return MethodTraits(family="not pretrained")
        else:
            augment = label(self.pretrain.augment.model_dump(mode="json"))
            of_encoder = MethodTraits(family="pretrained", pretext=self.pretrain.method.kind, augment=augment)
        head = "LP" if self.finetune.head.layers == 1 else "MP"
        return of_encoder.replace(strategy="FF" if self.finetune.epochs else head)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        if self.starts_from is None:
            start = pretrained(run, name)
        else:
            elsewhere = run.encoders is not None and run.learns_elsewhere(self.starts_from)
            first = run.encoders if run.encoders is not None and elsewhere else run
            start = first.model(self.starts_from)
        _finetune(self.finetune, start, out, self.splits_in(run), run)

    def search_job(self, run: SeedRun, name: str) -> FinetuneSearch:
        return FinetuneSearch(
            splits=self.splits_in(run),
            finetune=self.finetune.replace(seed=run.seed),
            pretrained=pretrained(run, name),
            workers=run.workers,
        )

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        settings = CombineConfig(how="mean", seed=run.seed)
        CombineJob(out=out, bundles=tuple(bundles), splits=run.splits, combine=settings, workers=run.workers).run()

    def takes(self, student: Student) -> bool:
        return isinstance(student, NetworkStudent)

    def train_student(self, student: Student, run: SeedRun, name: str, scores: Splits, start: str, out: str) -> None:
        assert isinstance(student, NetworkStudent)
        encoder = pretrained(run, name)
        _finetune(student.finetuning(self.finetune), encoder, start, scores, run)
        head_epochs = self.finetune.head_epochs if encoder else 0  # as in training the method itself
        last = self.finetune.replace(keep_head=True, heads=1, probe_epochs=0, head_epochs=head_epochs)
        _finetune(last, start, out, self.splits_in(run), run)


def network(where: str, name: str, methods: Mapping[str, Method]) -> NeuralMethod:
    """The neural method of this name; a ValueError that starts with `where` if it is none."""
    method = methods.get(name)
    if not isinstance(method, NeuralMethod):
        raise ValueError(f"{where}: {name!r} is not a neural method")
    return method


def pretrained(run: SeedRun, name: str) -> str | None:
    """Pretrain the encoder that a neural method starts from, if there is one; returns its bundle."""
    method = run.methods[name]
    assert isinstance(method, NeuralMethod)
    if run.encoders is not None:
        return pretrained(run.encoders, name)
    if method.pretrained_as is not None:
        return pretrained(run, method.pretrained_as)
    if method.pretrain is None:
        return None
    out, settings = run.place(name, "pretrained"), method.pretrain.replace(seed=run.seed)
    PretrainJob(out=out, train=method.splits_in(run).train, pretrain=settings, workers=run.workers).run()
    return out


def sharing_encoders(methods: Mapping[str, Method]) -> dict[str, Method]:
    """The methods, where those with the same pretraining start from the encoder of the first one."""
    owners: dict[str, str] = {}
    shared = dict(methods)
    for name, method in methods.items():
        if isinstance(method, NeuralMethod) and method.pretrain is not None:
            owner = owners.setdefault(digest([settings_of(method.pretrain), sorted(method.leave_out)]), name)
            if owner != name:
                shared[name] = NeuralMethod(pretrained_as=owner, finetune=method.finetune)
    return shared


def _finetune(settings: FinetuneConfig, start: str | None, out: str, splits: Splits, run: SeedRun) -> None:
    settings = settings.replace(seed=run.seed)
    FinetuneJob(out=out, pretrained=start, splits=splits, finetune=settings, workers=run.workers).run()


def _pretext(pretrain: Any) -> str:
    """The kind of pretext method in pretraining settings, or the default."""
    method = pretrain.get("method", {}) if isinstance(pretrain, Mapping) else {}
    return str(method.get("kind", SimCLRRankConfig().kind) if isinstance(method, Mapping) else SimCLRRankConfig().kind)


class InContextMethod(ReadingMethod):
    """A network that was pretrained on synthetic problems ranks after reading some labelled groups; none is trained.

    It takes a moment and has nothing to tune: made for some tens to some hundreds of labelled groups with numeric
    features. Runs with other seeds read other samples; where all groups fit into one they are the same.
    """

    kind: Literal["in_context"] = "in_context"
    in_context: InContextConfig = InContextConfig()

    is_one_model: ClassVar = True

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="in context")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        reading = self.in_context.reading.replace(seed=run.seed)
        settings = self.in_context.replace(reading=reading)
        InContextJob(out=out, splits=self.splits_in(run), in_context=settings).run()

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        named = {f"reading-{i}": url for i, url in enumerate(bundles)}
        BlendJob(out=out, splits=self.splits_in(run), bundles=named, blend=BlendConfig(weights="equal")).run()
