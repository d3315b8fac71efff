"""Storing and showing results: `metrics.json`, a page in Markdown and a picture, alike for all kinds of results."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.evaluation.summarise import Summary

REPORT = "report.md"


class Findings(Config):
    """The results of a stage, in the form that it commits."""

    called: ClassVar[str]
    """Name in messages, with its article."""
    made_by_job: ClassVar[str]
    file: ClassVar[str] = "metrics.json"

    @classmethod
    def read(cls, url: str) -> Self:
        """Read the results that are committed in a directory.

        Raises:
            InputError: none are committed there, or the file does not fit.
        """
        manifest = storage.read_manifest(url)
        if manifest is None:
            what = cls.called.partition(" ")[2]
            raise InputError(f"{url}: no {what} is committed there; make it with {cls.made_by_job}")
        try:
            return cls.model_validate_json(storage.read_verified(url, cls.file, manifest))
        except ValueError as error:
            where = storage.join(url, cls.file)
            raise InputError(f"{where}: not {cls.called} ({error}); make it again with {cls.made_by_job}") from error

    def to_json(self) -> str:
        """The text of the file."""
        return self.model_dump_json(indent=1) + "\n"


def write_report(
    commit: storage.Commit,
    found: Findings,
    *,
    page: str,
    picture: str,
    plot: Callable[[Any, Path], None],
    also: Mapping[str, str] | None = None,
) -> None:
    """Write the files of a report to a commit.

    Args:
        commit: commit of the directory.
        found: the results.
        page: text of `report.md`.
        picture: file name of the picture.
        plot: draws the picture.
        also: texts of other files, by name.
    """
    with commit.file(picture) as path:
        plot(found, path)
    for name, text in {**(also or {}), found.file: found.to_json(), REPORT: page}.items():
        with commit.file(name) as path:
            path.write_text(text, encoding="utf-8")


def print_report(url: str, tables: Sequence[str]) -> None:
    """Write the tables of a committed report and its place to standard output."""
    sys.stdout.write("\n\n".join([*tables, storage.join(url, REPORT)]) + "\n")


def bullets(lines: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def rows_of_methods(
    methods: Sequence[str], *, panels: int, width: float, rest: float = 1.6
) -> tuple[Figure, list[Axes]]:
    """An empty figure with a row for each method, from the top, in panels side by side.

    Args:
        methods: names of the methods.
        panels: number of panels.
        width: width of the figure, in inches.
        rest: height of the figure without the rows, in inches.
    """
    figure = Figure(figsize=(width, rest + 0.36 * len(methods)), layout="constrained")
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].set_ylim(len(methods) - 0.5, -0.5)
    for each in axes:
        each.grid(axis="x", alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_interval(axes: Axes, row: int, summary: Summary, colour: str) -> None:
    """Draw a mean as a dot on the line of its interval; nothing if either is undefined."""
    if summary.mean is not None and summary.low is not None and summary.high is not None:
        axes.plot([summary.low, summary.high], [row, row], color=colour, linewidth=2)
        axes.plot(summary.mean, row, "o", color=colour)


def save_picture(figure: Figure, path: Path) -> None:
    """Save a figure as PNG, whose bytes do not depend on the version of the software."""
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
