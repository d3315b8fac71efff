"""Print a config that comes with the jobs, to copy and edit; without a name, list all.

Into a file with `> my.yaml`, which `--config my.yaml` then reads:

  python -m jobs.config prepare-demo
"""

import re
from pathlib import Path

from jobs.cli import CONFIGS, Command, Job, main
from ltrscale.config import Config
from ltrscale.errors import InputError, suggestion


class ConfigJob(Config):
    """A config to print."""

    name: str | None = None
    """Its name in the list, or its path below jobs/configs; by default the list is printed."""


def _print(job: ConfigJob) -> None:
    if job.name is None:
        pages = [CONFIGS / folder / "README.md" for folder in ("start", "papers", "data", "results")]
        print("\n\n".join(map(_listed, pages)))
        return
    paths = {path.stem: path for path in CONFIGS.rglob("*.yaml")}
    name = Path(job.name).name.removesuffix(".yaml")
    if name not in paths:
        raise InputError(f"{job.name}: no such config; {suggestion(name, [*paths], 'the configs are')}")
    print(paths[name].read_text(), end="")


def _listed(page: Path) -> str:
    """The lines of a folder's page, without its links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", page.read_text()).replace("`", "").strip()


def _job() -> Job:
    return ConfigJob, _print


COMMAND = Command("config", _job, __doc__, argument="name")

if __name__ == "__main__":
    main(COMMAND)
