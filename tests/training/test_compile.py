"""Compiled parts compute what they compute otherwise, at every length of a batch, and are compiled once, each whole."""

from collections.abc import Iterator

import pytest
import torch
from small_trainers import make_trainer, run_epochs

from jobs.bench.compiled import bytes_compiled
from jobs.bench.device import lists, plain_transform
from ltrscale.batch import QueryGroups
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.layers import Dropout
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig, simclr_rank
from ltrscale.pretext.objective import Pretrainer
from ltrscale.training.loop import Trainer
from ltrscale.training.phases import compile_parts
from ltrscale.training.settings import Precision

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(  # torch's own
        "ignore:`torch.jit:DeprecationWarning",
        "ignore:The .grad:UserWarning",
        "ignore:.*should not be instantiated:DeprecationWarning",
    ),
]


@pytest.fixture(autouse=True)
def whole_graphs() -> Iterator[None]:
    """Forget what was compiled before, and refuse to leave a graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        yield
    assert not torch._dynamo.utils.counters["graph_break"]


def without_dropout(trainer: Trainer) -> Trainer:
    """The same trainer; compiled code draws its dropout in its own way."""
    for module in trainer.model.modules():
        if isinstance(module, Dropout):
            module.probability = 0.0
    return trainer


@pytest.mark.nightly
def test_a_compiled_run_is_the_same_run_and_compiles_no_length_anew(synthetic_dataset: str) -> None:
    plain, compiled = (without_dropout(make_trainer(synthetic_dataset, "simclr_rank")) for _ in range(2))
    names = list(compiled.model.state_dict())
    compile_parts(compiled.model)
    results = run_epochs(compiled, 1)
    expected = run_epochs(plain, 1)
    assert len({result.documents for result in results}) > 2  # batches of several lengths
    for result, other in zip(results, expected, strict=True):
        assert result.documents == other.documents
        assert result.loss == pytest.approx(other.loss, rel=1e-9)
        assert result.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-9)
    assert list(compiled.model.state_dict()) == names
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.nightly
def test_the_compiled_contrast_is_the_same_and_compiles_no_length_anew() -> None:
    for length in (7, 9):
        groups = QueryGroups.concat([lists(3, length), lists(1, 1)])
        parts = []
        for compiled in (True, False):
            draws = torch.Generator().manual_seed(length)
            z_2ND = torch.randn(2, groups.n_documents, 16, generator=draws).requires_grad_()
            loss_N = simclr_rank(*z_2ND, groups.offsets_Q1, temperature=0.1, compiled=compiled)
            loss_N.sum().backward()
            parts.append((loss_N.detach(), z_2ND.grad))
        for value, expected in zip(*parts, strict=True):
            assert (value - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "kilobytes"), [("float32", 205), ("bf16", 114)])
def test_parts_of_a_compiled_step_are_whole_graphs_that_move_few_bytes(precision: Precision, kilobytes: float) -> None:
    network = NetworkConfig.model_validate({"encoder": {"kind": "resnet"}})
    net = Pretrainer(plain_transform(), network, SimCLRRankConfig(), ZeroingConfig())
    moved = bytes_compiled(net, lists(64), precision)
    assert moved <= 1e3 * kilobytes
