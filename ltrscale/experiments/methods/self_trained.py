"""A student of its own method as a method of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Split, with_periods_named
from ltrscale.data.stream.batches import StreamConfig
from ltrscale.errors import InputError
from ltrscale.evaluation.studies.study import MethodTraits
from ltrscale.experiments.methods.base import AnyMethod, SeedRun
from ltrscale.experiments.methods.students import NetworkStudent, Student
from ltrscale.scoring.score import ScoreJob


class SelfTrainedMethod(AnyMethod):
    """A student that learns the mean score of several runs of a method on all training groups, then the labels.

    The groups whose labels are in use teach the runs, and the student in the end; no other label is read.
    """

    kind: Literal["self_trained"] = "self_trained"
    of: str
    """Name of the method whose runs teach: any but stacks, self-trained methods and orders of a feature."""
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
        """The method that teaches."""
        return (self.of,)

    def check(self, where: str, name: str, methods: Mapping[str, AnyMethod]) -> None:
        """Check that the teacher can teach, and that the student learns scores and labels with the same library."""
        if self.of not in methods or not methods[self.of].can_teach:
            raise ValueError(
                f"{where}.of: {self.of!r} is unknown, a stack, self-trained or of kind feature; name another method"
            )
        if self.runs > 1:
            methods[self.of].check_differs(f"{where}.runs")
        alike = methods.get(self._alike)
        if alike is None or not alike.takes(self.student):
            raise ValueError(
                f"{where}.student of kind {self.student.kind} is trained as {self._alike!r}, which is not "
                f"{self.student.needs}; name one as student_as, or choose another kind"
            )

    def streams(self) -> Sequence[StreamConfig]:
        """That of a student that is a network."""
        return self.student.streams()

    def about(self, methods: Mapping[str, AnyMethod]) -> MethodTraits:
        """By the families of teacher and student."""
        teacher, student = (methods[name].about(methods).family for name in (self.of, self._alike))
        if student == "trees":
            return MethodTraits(family="trees" if teacher == "trees" else "mixed")
        return MethodTraits(family="pretrained" if "pretrained" in (teacher, student) else student)

    def train(self, run: SeedRun, name: str, out: str) -> None:
        """Let runs of the teacher score all training groups; the student learns the scores, then the labels."""
        alike = run.methods[self._alike]
        labels = alike.splits_in(run)
        scored = self._scored(run, name, labels.train)
        scores = labels.replace(train={**scored.model_dump(), "leave_out": labels.train.leave_out})
        alike.train_student(self.student, run, self._alike, scores, run.place(name, "student"), out)

    def _scored(self, run: SeedRun, name: str, split: Split) -> Split:
        """The groups of a training split, or a sample of them, with the mean scores of the runs as labels."""
        train, scores = with_periods_named(split), run.place(name, "scores")
        if len(train.data) > 1:
            raise InputError(f"{name} learns scores of one data set, train has {', '.join(train.data)}; name one")
        bundles = tuple(run.repeated(self.of, self.runs))
        ScoreJob(out=scores, bundle=bundles, data=train.data[0], periods=train.periods, layout="scores").run()
        everything = Split(data=train.data, periods=train.periods, scores=scores, labelled_seed=train.labelled_seed)
        share = 1.0 if self.groups is None else self.groups / select(everything, labelled=True).n_groups
        return everything.replace(labelled_fraction=min(1.0, share))

    @property
    def _alike(self) -> str:
        """The method whose settings train the student on the labels."""
        return self.student_as or self.of
