"""Presets: their values, and that a config overrides them."""

import pytest

from ltrscale.config import dump, kind_of, load, members
from ltrscale.models.encoders import ResNetConfig
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.choices import FeatureMethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import SimSiamConfig
from ltrscale.training.pretrain import PretrainConfig
from ltrscale.training.settings import ConstantConfig, StepDecayConfig, preset

METHODS = [kind_of(cls) for cls in members(FeatureMethodConfig)]
SMALL_BATCH = {
    "simclr",
    "scarf",
    "dacl",
    *(kind_of(cls) for cls in members(FeatureMethodConfig) if cls.contrasts_batch),
}


def config(**values: object) -> PretrainConfig:
    return PretrainConfig.model_validate(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "hou24"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_every_preset_and_it_reads_back_the_same(name: str, method: str, tmp_path: object) -> None:
    made = config(preset=name, method={"kind": method})
    assert made.method.kind == method
    assert made.epochs == 300
    assert (made.optimizer.kind, made.optimizer.learning_rate, made.optimizer.clip_norm) == ("adam", 5e-4, None)
    assert made.augment == ZeroingConfig(probability=0.1), "the paper's, whatever our default is"
    encoder = made.network.encoder
    assert isinstance(encoder, ResNetConfig)
    assert encoder.blocks == 3
    assert made.stream.docs_per_batch == (2000 if method in SMALL_BATCH else 200_000)
    assert config(**made.model_dump()) == made
    path = f"{tmp_path}/config.yaml"
    with open(path, "w") as file:  # noqa: PTH123
        file.write(dump(made))
    assert load(PretrainConfig, path) == made
    assert preset(name, method)["method"]["kind"] == method  # type: ignore[arg-type]


def test_hou24_is_the_authors_code() -> None:
    rank, siam = (config(preset="hou24", method={"kind": kind}) for kind in ("simclr_rank", "simsiam"))
    # twice the authors' 1e-3 and 1e-4, because our losses are sums over two views and theirs are means
    for made, decay in ((rank, 2e-3), (siam, 2e-4)):
        encoder = made.network.encoder
        assert (encoder.width, encoder.blocks, encoder.activation, encoder.dropout) == (136, 3, "gelu", 0.1)
        assert (encoder.last_activation, encoder.input_bias) == ("relu", False)
        assert (made.network.transform.numeric, made.network.transform.per_query) == ("none", True)
        assert made.optimizer.schedule == StepDecayConfig(every=20, factor=0.9)
        assert (made.optimizer.weight_decay, made.optimizer.clip_norm) == (decay, None)
    assert isinstance(rank.method, SimCLRRankConfig)
    assert rank.method.temperature == 0.01
    assert (rank.method.projector.layers, rank.method.projector.output, rank.method.projector.bias) == (3, 64, True)
    assert isinstance(siam.method, SimSiamConfig)
    assert (siam.method.projector.batch_norm, siam.method.projector.bias) == (True, False)
    assert (siam.method.bottleneck, siam.method.predictor_bias) == (34, True)


def test_what_a_method_has_of_its_own() -> None:
    def made(name: str, kind: str) -> PretrainConfig:
        return config(preset=name, method={"kind": kind})

    assert [made(name, "scarf").method.fixed_count for name in ("paper", "hou24")] == [True, False]
    assert [made(name, "scarf").method.temperature for name in ("paper", "hou24")] == [1.0, 0.01]
    assert [made(name, "subtab").method.within_groups for name in ("paper", "hou24")] == [True, True]
    assert [len(made(name, "dacl").method.forms) for name in ("paper", "hou24")] == [3, 2]
    subtab = [made(name, "subtab").method for name in ("paper", "hou24")]
    assert [(m.contrast, m.distance, m.noise, m.rate, m.decoder.layers) for m in subtab] == [
        (1, 1, "swap", 0.3, 2),
        (0, 0, "zero", 0.15, 1),
    ]
    assert {made("hou24", kind).optimizer.weight_decay for kind in ("scarf", "vime", "subtab")} == {1e-3}
    whole, window = (made(name, "simclr_sample").stream.window for name in ("hou24", "paper"))
    assert whole > 1000 * window
    streams = {kind: [made(name, kind).stream.streams for name in ("paper", "hou24")] for kind in METHODS}
    assert streams == {kind: [1, 1] if kind in SMALL_BATCH else [8, 1] for kind in METHODS}


def test_a_config_stands_over_its_preset_key_by_key() -> None:
    made = config(
        preset="hou24",
        method={"temperature": 0.5},
        network={"encoder": {"width": 32}},
        optimizer={"schedule": {"kind": "constant"}},
        epochs=3,
    )
    assert made.method.temperature == 0.5
    assert made.method.projector.output == 64
    assert (made.network.encoder.width, made.network.encoder.activation) == (32, "gelu")
    assert made.optimizer.schedule == ConstantConfig()
    assert made.optimizer.weight_decay == 2e-3
    assert made.epochs == 3
    other = config(preset="hou24", network={"encoder": {"kind": "mlp", "hidden": [8]}})
    assert other.network.encoder.kind == "mlp"


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ValueError, match="'paper' or 'hou24'"):
        config(preset="hou23")
