"""Schedules against torch's own, and the optimizers that configs name."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ltrscale.training.settings import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    OptimizerConfig,
    ScheduleConfig,
    StepDecayConfig,
    build_optimizer,
)

SCHEDULES: list[ScheduleConfig] = [
    ConstantConfig(),
    StepDecayConfig(every=3, factor=0.5),
    InverseSqrtConfig(after=5),
    CosineConfig(warmup=0.2, final=0.1),
    InverseSqrtConfig(after=5, scale=1),
]


def rate(schedule: ScheduleConfig, done: float, epochs: int = 20) -> float:
    return 0.3 * schedule.share(done, epochs)


def test_step_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for epoch in range(12):
        assert rate(SCHEDULES[1], epoch + 0.9) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_cosine_is_that_of_torch_after_a_linear_rise() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = lr_scheduler.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.03)
    assert [rate(SCHEDULES[3], done) for done in (0, 1, 2, 3)] == pytest.approx([0, 0.075, 0.15, 0.225])
    for epoch in range(17):
        assert rate(SCHEDULES[3], 4 + epoch) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_inverse_square_root() -> None:
    assert rate(SCHEDULES[2], 0) == rate(SCHEDULES[2], 5) == 0.3
    assert rate(SCHEDULES[2], 20) == pytest.approx(0.15)
    assert rate(SCHEDULES[2], 7.5) == pytest.approx(0.3 / math.sqrt(1.5))


def test_inverse_square_root_with_a_scale_is_that_of_the_authors_of_rankformer() -> None:
    for epoch in range(5, 20):  # their rate of epoch t, counted from 0, is (t - 19)^-.5 from the 20th on; here the 5th
        assert rate(SCHEDULES[4], epoch) == pytest.approx(0.3 * (epoch - 4) ** -0.5)
    assert rate(SCHEDULES[4], 0) == rate(SCHEDULES[4], 4.9) == 0.3
    for done in (0, 3, 5, 6.5, 18):
        same = InverseSqrtConfig(after=5, scale=5)
        assert rate(same, done) == pytest.approx(rate(SCHEDULES[2], done))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_no_rate_exceeds_the_full_one_or_is_negative(schedule: ScheduleConfig) -> None:
    rates = [rate(schedule, step / 7) for step in range(141)]
    assert max(rates) == pytest.approx(0.3)
    assert min(rates) >= 0


def test_optimizers_have_their_settings() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    optim = torch.optim
    kinds = {"adam": optim.Adam, "adamw": optim.AdamW, "adagrad": optim.Adagrad, "sgd": optim.SGD}
    for kind, expected in kinds.items():
        config = OptimizerConfig(kind=kind, learning_rate=0.2, weight_decay=0.01, momentum=0.7)
        optimizer = build_optimizer(parameters, config)
        assert type(optimizer) is expected
        assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.2, 0.01)
        assert optimizer.defaults.get("momentum", 0.7) == 0.7
