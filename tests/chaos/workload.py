"""The commands of a round, and the fingerprint of everything on which its outcome depends."""

import hashlib
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import ltrscale
from ltrscale.stages.runs import PACKAGES

CONFIGS = Path(__file__).with_name("configs")
_HERE, _CONFIGS_HERE = "ROUND", "FOLDER"
_REPOSITORY = Path(__file__).resolve().parents[2]


class Stage(NamedTuple):
    """A job of the chain, with its additional options under Ray."""

    name: str
    """Of its config, and of the job where that is not named."""
    under_ray: tuple[str, ...] = ()
    job: str = ""
    pipeline: bool = False
    """Whether its config names one of a pipeline, `NAME-pipeline.yaml`."""
    status: int = 0
    """The exit status with which it is done."""


STAGES = (
    Stage("prepare", ("--ray",)),
    Stage("pretrain", ("--workers", "2")),
    Stage("finetune"),
    Stage("tune"),
    Stage("score", ("--ray",)),
    Stage("evaluate"),
    Stage("weekly", ("--ray",), pipeline=True),
    Stage("weekly-refused", ("--ray",), job="weekly", pipeline=True, status=3),
)
WEEKLY = "weekly"
"""The directory below a round where models go into service."""


def command(stage: Stage, folder: Path, url: str, *, ray: bool) -> list[str]:
    """The command of a stage of a round; writes its configs.

    Args:
        stage: the stage.
        folder: an existing directory for the config.
        url: the directory of the round's outputs.
        ray: whether stages that can use Ray do.
    """
    names = [f"{stage.name}.yaml", *([f"{stage.name}-pipeline.yaml"] if stage.pipeline else [])]
    for name in names:
        text = (CONFIGS / name).read_text().replace(_HERE, url).replace(_CONFIGS_HERE, str(folder))
        (folder / name).write_text(text)
    words = [sys.executable, "-m", f"jobs.{stage.job or stage.name}", "--config", str(folder / names[0])]
    return [*words, *(stage.under_ray if ray else ())]


def chosen(names: Collection[str]) -> list[Stage]:
    """The stages with these names, in the order of the chain."""
    return [stage for stage in STAGES if stage.name in names]


def fingerprint(stages: Sequence[Stage], *, ray: bool) -> str:
    """A hash of the code, the configs and the versions of libraries: if it is equal, so are undisturbed runs."""
    digest = hashlib.sha256(f"{ray} {[(name, version(name)) for name in PACKAGES]} {stages}".encode())
    code = Path(ltrscale.__file__).parent.rglob("*.py")
    for path in sorted([*code, *CONFIGS.glob("*.yaml"), CONFIGS.with_name("compare.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
