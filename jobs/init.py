"""Look at a log and write commented configs that run: prepare.yaml; with labels and times pipeline, study and weekly.

Uses of columns are guessed from names and values; name those that are guessed wrong:

  python -m jobs.init logs/shop.csv --out shop --set label=purchased

Without a log it lists the configs that come with the jobs, and with `--example`
it prints one, to copy and edit:

  python -m jobs.init --example prepare-demo
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cli import CONFIGS, Command, Job, main
from ltrscale.errors import InputError, suggestion

if TYPE_CHECKING:
    from ltrscale.experiments.first.init import InitJob


def _run(job: "InitJob") -> None:
    if job.example is not None and job.file is not None:
        raise InputError("example: a log to look at is named too; name one of both")
    if job.example is not None:
        print(_example(job.example), end="")
    elif job.file or job != type(job)():
        job.run()
    else:
        pages = [CONFIGS / folder / "README.md" for folder in ("start", "papers", "data", "results")]
        print("\n\n".join(map(_listed, pages)))


def _example(given: str) -> str:
    """The text of a config that comes with the jobs."""
    paths = {path.stem: path for path in CONFIGS.rglob("*.yaml")}
    name = Path(given).name.removesuffix(".yaml")
    if name not in paths:
        raise InputError(f"{given}: no such config; {suggestion(name, [*paths], 'the configs are')}")
    return paths[name].read_text()


def _listed(page: Path) -> str:
    """The lines of a folder's page, without its links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", page.read_text()).replace("`", "").strip()


def _job() -> Job:
    from ltrscale.experiments.first.init import InitJob

    return InitJob, _run


COMMAND = Command("init", _job, __doc__, flags="out example", argument="file")

if __name__ == "__main__":
    main(COMMAND)
