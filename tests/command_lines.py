"""Command lines of jobs, in this process: a new one takes seconds to import the libraries."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_here(job: str, *words: str, cwd: Path = ROOT) -> CompletedProcess[str]:
    """What `python -m jobs.JOB` with these words leaves: its status and both outputs."""
    status, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [f"jobs.{job}", *words])
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.delitem(sys.modules, f"jobs.{job}", raising=False)
        try:
            runpy.run_module(f"jobs.{job}", run_name="__main__")
        except SystemExit as ended:
            status = int(ended.code or 0)
    return CompletedProcess([job, *words], status, out.getvalue(), err.getvalue())
