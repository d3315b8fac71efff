"""A compiled encoder computes what it computes otherwise, at every length of a batch, and is compiled once."""

import pytest
import torch
from small_trainers import make_trainer, run_epochs

from ltrscale.training.phases import compile_encoders


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The .grad:UserWarning")  # torch's own
def test_a_compiled_run_is_the_same_run_and_compiles_no_length_anew(synthetic_dataset: str) -> None:
    plain, compiled = (make_trainer(synthetic_dataset, "simclr_rank") for _ in range(2))
    names = list(compiled.model.state_dict())
    compile_encoders(compiled.model)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
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
