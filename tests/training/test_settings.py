"""What optimizers need is loaded once, before their speed is measured."""

import subprocess
import sys

AFTER = """
import sys
import torch
from ltrscale.training.settings import OptimizerConfig, build_optimizer, load_optimizers

load_optimizers()
loaded = {*sys.modules}
for kind in ("adam", "adamw", "adagrad", "sgd"):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer([weight], OptimizerConfig(kind=kind, learning_rate=0.1))
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
print(len({*sys.modules} - loaded))
"""


def test_an_optimizer_loads_hardly_anything_after_load_optimizers() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20  # it is 800 without
