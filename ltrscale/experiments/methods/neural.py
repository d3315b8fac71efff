"""Networks as methods of a pipeline: one that is trained, and one that reads labelled groups as examples."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import model_validator

from ltrscale.config import overlay
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.evaluation.studies.traits import MethodTraits
from ltrscale.experiments.methods.base import Method, ReadingMethod, SeedRun
from ltrscale.experiments.methods.students import NetworkStudent, Student
from ltrscale.origin import digest, settings_of
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.training.combine import BlendConfig, BlendJob, CombineConfig, CombineJob
from ltrscale.training.finetune import FinetuneConfig, FinetuneJob
from ltrscale.training.pretrain import PretrainConfig, PretrainJob
from ltrscale.training.settings import Preset, finetuning
from ltrscale.training.untrained import InContextConfig, InContextJob
from ltrscale.tuning.searched import FinetuneSearch
from ltrscale.tuning.space import label


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
    def is_one_model(self) -> bool:
        return True

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

    @property
    def is_one_model(self) -> bool:
        return True

    def about(self, methods: Mapping[str, Method]) -> MethodTraits:
        return MethodTraits(family="in context")

    def train(self, run: SeedRun, name: str, out: str) -> None:
        reading = self.in_context.reading.replace(seed=run.seed)
        settings = self.in_context.replace(reading=reading)
        InContextJob(out=out, splits=self.splits_in(run), in_context=settings).run()

    def average(self, run: SeedRun, bundles: Sequence[str], out: str) -> None:
        named = {f"reading-{i}": url for i, url in enumerate(bundles)}
        BlendJob(out=out, splits=self.splits_in(run), bundles=named, blend=BlendConfig(weights="equal")).run()
