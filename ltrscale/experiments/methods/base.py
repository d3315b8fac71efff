"""What every method of a pipeline says of itself and does, and the run in which methods are trained with one seed."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ltrscale.config import Config
from ltrscale.data.dataset.labelled import Fold
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.draws import mix
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.students import Student
from ltrscale.runtime.workers import WorkersConfig
from ltrscale.storage import join
from ltrscale.training.presets import Preset
from ltrscale.tuning.searched import Searched


class AnyMethod(Config):
    """A method of a pipeline; a kind overrides what it does otherwise."""

    is_network: ClassVar[bool] = False
    """Whether the model is one network, which starts from an encoder or a ranker and may be combined."""
    can_teach: ClassVar[bool] = True
    """Whether a self-trained method may learn its scores."""
    can_be_member: ClassVar[bool] = True
    """Whether a stack may have it as a member."""

    @property
    def is_one_model(self) -> bool:
        """Whether it makes one network or one model of trees: those can be refitted, and averaged over runs."""
        return False

    @property
    def is_searchable(self) -> bool:
        """Whether a search may vary its settings."""
        return False

    @property
    def labels_from(self) -> str | None:
        """The entry of the pipeline's `learn_from` whose labels it learns; None for those of `splits`."""
        return None

    def built_on(self) -> tuple[str, ...]:
        """The methods of the same run that it needs trained."""
        return ()

    def check(self, where: str, name: str, methods: Mapping[str, "AnyMethod"]) -> None:
        """Check that it builds on existing methods of the right kind.

        Args:
            where: its place in the config, for errors.
            name: its own.
            methods: all of the run, by name.

        Raises:
            ValueError: it does not; the message begins with the place.
        """

    def check_differs(self, where: str) -> None:
        """Check that runs with other seeds give other models.

        Raises:
            ValueError: they do not.
        """

    def check_features(self, splits: Splits) -> None:
        """Check that the features that it names exist.

        Raises:
            InputError: one does not.
        """

    def streams(self) -> Sequence[StreamConfig]:
        """The streams of data that its stages read."""
        return ()

    def splits_in(self, run: "SeedRun") -> Splits:
        """The splits that it learns from."""
        return run.splits

    def left_out(self, methods: Mapping[str, "AnyMethod"]) -> frozenset[str]:
        """The features that it leaves out, itself or through the method that it starts from."""
        return frozenset()

    def projector_layers(self) -> int | None:
        """Hidden layers of the projector that it pretrains; None if it does not pretrain."""
        return None

    def pretraining(self) -> Config | None:
        """All that determines the encoder that it pretrains; None if it does not pretrain."""
        return None

    def starting_as(self, other: str) -> Self:
        """The method with the encoder of another one, which pretrains in the same way."""
        return self

    def encoder(self, name: str, methods: Mapping[str, "AnyMethod"]) -> str | None:
        """The method whose pretrained encoder it starts from itself; None without one."""
        return None

    def with_threads(self, threads: int) -> Self:
        """The method, with this number of threads for trees that would take all cores."""
        return self

    @classmethod
    def with_preset(cls, preset: Preset, given: Mapping[str, Any], methods: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings as in a config with this preset, if the kind has presets and they name none.

        Args:
            preset: of all methods of a comparison.
            given: the settings.
            methods: those of all methods, by name.
        """
        return given

    @abstractmethod
    def about(self, methods: Mapping[str, "AnyMethod"]) -> MethodTraits:
        """The method as the tables of a study sort it."""

    @abstractmethod
    def train(self, run: "SeedRun", name: str, out: str) -> None:
        """Train it with the seed and the labelled groups of a run, and commit its bundle in `out`."""

    def pretrained(self, run: "SeedRun", name: str) -> str | None:
        """Pretrain the encoder that it starts from, if there is one; returns its bundle."""
        return None

    def search_job(self, run: "SeedRun", name: str) -> Searched:
        """The job whose settings a search varies, of a method that is searchable."""
        raise NotImplementedError

    def average(self, run: "SeedRun", bundles: Sequence[str], out: str) -> None:
        """Commit the mean of runs of a method that makes one model."""
        raise NotImplementedError

    def takes(self, student: Student) -> bool:
        """Whether it can train this student."""
        return False

    def train_student(self, student: Student, run: "SeedRun", name: str, scores: Splits, start: str, out: str) -> None:
        """Train a student that it takes on scores, and then on its own labels.

        Args:
            student: how the scores are learnt.
            run: which trains.
            name: its own.
            scores: the splits with a teacher's scores as labels of the training groups.
            start: directory of what has learnt the scores.
            out: directory of what has learnt the labels, too.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SeedRun:
    """All methods trained with one seed; the methods that a method builds on are trained first, and nothing twice.

    Args:
        methods: by name.
        splits: with the seed's sample of labelled groups.
        seed: replaces the seeds of the stages.
        workers: data-parallel workers of the neural stages.
        out: directory for everything: `METHOD/model`, `METHOD/pretrained`, `METHOD/scores`, `METHOD/student`,
            `METHOD/search`, `folds/K-of-N/METHOD/model`, `runs/K/METHOD/model`.
        encoders: the run that pretrains for this one; empty to pretrain here. Encoders see no labels, so those of one
            run serve all folds, all further runs and all samples of labelled groups.
    """

    methods: Mapping[str, AnyMethod]
    splits: Splits
    seed: int
    workers: WorkersConfig
    out: str
    encoders: "SeedRun | None" = None
    learn_from: Mapping[str, Splits] = field(default_factory=dict)
    """Other labels than those of `splits`, by name; samples and folds of `splits` leave them as they are."""
    searches: "SeedRun | None" = None
    """The run whose searches find the settings of this one, which repeats it; empty to search here."""

    def model(self, name: str) -> str:
        """Train a method; returns its bundle's directory."""
        out = self.place(name, "model")
        self.methods[name].train(self, name, out)
        return out

    def pretrained(self, name: str) -> str | None:
        """The pretrained encoder that a method starts from."""
        if self.encoders is not None:
            return self.encoders.pretrained(name)
        return self.methods[name].pretrained(self, name)

    def place(self, *names: str) -> str:
        """A directory of the run."""
        return join(self.out, *names)

    def learns_elsewhere(self, name: str) -> bool:
        """Whether a method, and what it starts from, learns from `learn_from` alone."""
        method = self.methods[name]
        return method.labels_from is not None and all(map(self.learns_elsewhere, method.built_on()))

    def without(self, fold: Fold) -> "SeedRun":
        """The run on all labelled groups except those of a fold."""
        out = self.place("folds", f"{fold.number}-of-{fold.of}")
        train = {**self.splits.train.model_dump(), "fold": fold.model_dump()}
        return replace(
            self, splits=self.splits.replace(train=train), out=out, encoders=self.encoders or self, searches=None
        )

    def repeated(self, name: str, number: int) -> list[str]:
        """Models of a method: its own, and more with other seeds, from the same pretrained encoder and search."""
        further = [
            replace(
                self,
                seed=mix("run", self.seed, repeat) % 2**31,
                out=self.place("runs", str(repeat)),
                encoders=self.encoders or self,
                searches=self.searches or self,
            )
            for repeat in range(1, number)
        ]
        return [run.model(name) for run in (self, *further)]
