"""Runs the scripts of cluster/ as a user does."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_script(
    name: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script of cluster/ from a folder outside the checkout."""
    return subprocess.run(
        [sys.executable, str(ROOT / "cluster" / name), *arguments],
        cwd="/",
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


def exported_environment(printed: str) -> dict[str, str]:
    """The environment that `eval` of the printed lines sets; checks that they are exports only."""
    lines = printed.splitlines()
    assert all(re.fullmatch(r"export [A-Z_]+=\S+", line) for line in lines), printed
    return dict(shlex.split(line)[1].split("=", 1) for line in lines)


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
