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
_HERE = "ROUND"
_REPOSITORY = Path(__file__).resolve().parents[2]


class Stage(NamedTuple):
    """A job of the chain, with its additional options under Ray."""

    name: str
    under_ray: tuple[str, ...] = ()


STAGES = (
    Stage("prepare", ("--ray",)),
    Stage("pretrain", ("--workers", "2")),
    Stage("finetune"),
    Stage("tune"),
    Stage("score", ("--ray",)),
    Stage("evaluate"),
)


def command(stage: Stage, folder: Path, url: str, *, ray: bool) -> list[str]:
    """The command of a stage of a round; writes its config.

    Args:
        stage: the stage.
        folder: an existing directory for the config.
        url: the directory of the round's outputs.
        ray: whether stages that can use Ray do.
    """
    path = folder / f"{stage.name}.yaml"
    path.write_text((CONFIGS / path.name).read_text().replace(_HERE, url))
    return [sys.executable, "-m", f"jobs.{stage.name}", "--config", str(path), *(stage.under_ray if ray else ())]


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
