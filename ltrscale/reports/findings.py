"""The results of an analysis, committed with their report: `metrics.json` and a Markdown document."""

import sys
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import pyarrow as pa
import pyarrow.parquet as pq

from ltrscale import storage
from ltrscale.config import Operational, Strict
from ltrscale.errors import InputError
from ltrscale.reports.document import Document
from ltrscale.reports.render import REPORT, files, terminal
from ltrscale.stages.stage import Stage


class Findings(Strict):
    """The results of a stage, as committed."""

    called: ClassVar[str]
    """Name in messages, with its article."""
    made_by_job: ClassVar[str]
    file: ClassVar[str] = "metrics.json"

    @classmethod
    def read(cls, url: str) -> Self:
        """Read the results committed in a directory; raises `InputError` if there are none, or they do not fit."""
        manifest = storage.read_manifest(url)
        if manifest is None:
            kind = cls.called.partition(" ")[2]
            raise InputError(f"{url}: no {kind} is committed there; make it with {cls.made_by_job}")
        try:
            return cls.model_validate_json(storage.read_verified(url, cls.file, manifest))
        except ValueError as error:
            file_url = storage.join(url, cls.file)
            raise InputError(
                f"{file_url}: not {cls.called} ({error}); delete the directory and make it again with {cls.made_by_job}"
            ) from error


def write_report(commit: storage.Commit, findings: Findings, document: Document | None = None) -> None:
    """Write to a commit: results, and the document that shows them."""
    pages = {} if document is None else files(document)
    commit.write({findings.file: f"{findings.model_dump_json(indent=1)}\n".encode(), **pages})


def commit_report(
    out: str,
    findings: Findings,
    document: Document | None = None,
    *,
    made_by: Mapping[str, Any],
    tables: Mapping[str, pa.Table] | None = None,
) -> None:
    """Commit results, the document that shows them, and tables in Parquet by file name to a directory."""
    with storage.Commit(out) as commit:
        for name, rows in (tables or {}).items():
            with commit.file(name) as path:
                pq.write_table(rows, path)
        write_report(commit, findings, document)
        commit.finish({"made_by": made_by})


def print_report(url: str, document: Document) -> None:
    """Print a committed report's opening and its location."""
    sys.stdout.write(f"{terminal(document)}\n\n{storage.join(url, REPORT)}\n")


class ReportStage(Stage):
    """A stage that commits findings with a report."""

    out: Operational[str]
    """Directory of the report."""

    @abstractmethod
    def page(self) -> Document:
        """The report of the committed findings."""

    def run(self, *, show: bool = True) -> bool:
        """Make the output, and print the report's opening if `show` is set."""
        ran = super().run()
        if show:
            print_report(self.out, self.page())
        return ran
