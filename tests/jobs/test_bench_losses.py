"""The benchmark of losses has every loss that a config may name."""

import pytest
from variations import kind_of

from jobs.bench import losses
from ltrscale.config import members
from ltrscale.ranking.choices import LossConfig

KINDS = [kind_of(cls) for cls in members(LossConfig)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_timed_beside_its_padded_form_if_it_has_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_memory", lambda *_: None)  # a process each
    row = losses.measure(kind, groups=4)[0]
    assert row.name.startswith(f"{kind}, ")
    assert row.ours.endswith(" us/doc")
    assert (row.ratio is not None) == bool(row.peer) == (kind in losses.PEERS)


def test_every_padded_form_is_of_a_loss_that_is_there() -> None:
    assert set(losses.PEERS) <= set(KINDS)
