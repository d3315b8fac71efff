"""The docs name every method that a config may name, and only test files that exist."""

import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from ltrscale.derive.relabel import RelabelStepConfig
from ltrscale.experiments.methods.composed import AnyMethod
from ltrscale.ingest.inputs import SourceConfig
from ltrscale.models.choices import ContextConfig, EncoderConfig, NumbersConfig
from ltrscale.pretext.augment import AugmentConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.ranking.choices import LetorMetricConfig, MetricConfig
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.serving.export import AnyFormat
from ltrscale.training.ranking import DebiasConfig
from ltrscale.training.settings import ScheduleConfig
from ltrscale.trees.configs import GBDTConfig

ROOT = Path(__file__).resolve().parents[1]
METHODS = (ROOT / "docs" / "methods.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
DATA = (ROOT / "docs" / "data.md").read_text()
SERVING = (ROOT / "docs" / "serving.md").read_text()
SIMULATORS = (ROOT / "docs" / "simulators.md").read_text()


def table(title: str) -> str:
    """The rows of a section of the reference."""
    section = REFERENCE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("| "))


UNIONS = {
    "loss": (LossConfig, table("Ranking losses")),
    "method": (MethodConfig, table("Pretext objectives")),
    "augment": (AugmentConfig, METHODS),
    "encoder": (EncoderConfig, table("Encoders")),
    "numbers": (NumbersConfig, METHODS),
    "context": (ContextConfig, table("List contexts")),
    "metric": (MetricConfig, table("Metrics")),
    "letor metric": (LetorMetricConfig, table("Metrics of LETOR's script")),
    "debias": (DebiasConfig, METHODS),
    "schedule": (ScheduleConfig, METHODS),
    "gbdt": (GBDTConfig, METHODS),
    "step": (RelabelStepConfig, SIMULATORS),
    "pipeline": (AnyMethod, GUIDE),
    "source": (SourceConfig, DATA),
    "export": (AnyFormat, SERVING),
}


def kinds(annotation: object) -> set[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.model_fields["kind"].default}
    return {kind for part in typing.get_args(annotation) for kind in kinds(part)}


@pytest.mark.parametrize("name", UNIONS)
def test_every_kind_is_in_the_table(name: str) -> None:
    annotation, page = UNIONS[name]
    found = kinds(annotation)
    assert len(found) >= 2
    assert {kind for kind in found if not re.search(rf"`[^`\n]*\b{kind}\b[^`\n]*`", page)} == set()


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[^`]+)`", METHODS + REFERENCE)
    files = [f"{a}{name}{b}" for path in named for a, names, b in [split(path)] for name in names]
    assert len(files) > 15
    for file in files:
        assert (ROOT / file).exists(), file


def split(path: str) -> tuple[str, list[str], str]:
    """`a_{b,c}.py` is `a_b.py` and `a_c.py`."""
    match = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", path)
    return (match[1], match[2].split(","), match[3]) if match else (path, [""], "")
