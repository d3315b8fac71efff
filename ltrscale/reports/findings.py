"""The results of an analysis: committed as `metrics.json` beside the report that shows them, read, and printed."""

import sys
from collections.abc import Mapping
from typing import ClassVar, Self

from ltrscale import storage
from ltrscale.config import Config
from ltrscale.errors import InputError
from ltrscale.reports.document import Document
from ltrscale.reports.markdown import REPORT, files, terminal


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
    commit: storage.Commit, found: Findings, document: Document, *, also: Mapping[str, str] | None = None
) -> None:
    """Write results, and the document that shows them, to a commit.

    Args:
        commit: commit of the directory.
        found: the results.
        document: what `report.md` has.
        also: texts of other files, by name.
    """
    texts = {name: text.encode() for name, text in {**(also or {}), found.file: found.to_json()}.items()}
    write_files(commit, texts | files(document))


def write_files(commit: storage.Commit, contents: Mapping[str, bytes]) -> None:
    """Write files of these names to a commit."""
    for name, content in contents.items():
        with commit.file(name) as path:
            path.write_bytes(content)


def print_report(url: str, document: Document) -> None:
    """Write what a committed report opens with, and its place, to standard output."""
    sys.stdout.write(f"{terminal(document)}\n\n{storage.join(url, REPORT)}\n")
