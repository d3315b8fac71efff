"""Fitting the transform on a data set: any number of processes gives the same bits, and it is fitted once."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import wait_until

from ltrscale.data.dataset.manifest import Feature
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.plan import Part, Run, parts_of, run_here
from ltrscale.draws import splitmix64
from ltrscale.errors import InputError, UnavailableError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform, TransformConfig, fit_transform, make_transform
from ltrscale.models.fitting import FeatureStatistics
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.training import fitting
from ltrscale.training.fitting import fit, fitted, sample_inputs

CPUS = 4
CONFIGS = (
    TransformConfig(discrete_up_to=4),
    TransformConfig(numeric="quantile_normal", sample=900, quantiles=33, max_vocabulary=40),
    TransformConfig(numeric="standard", per_query=True),
)


def network_config(transform: TransformConfig = CONFIGS[0]) -> NetworkConfig:
    return NetworkConfig(transform=transform)


@pytest.fixture(scope="module")
def features_NF() -> Tensor:
    """All documents of the data set, in order."""
    rng = np.random.default_rng(0)
    n = 6000
    x_NF = np.stack([np.exp(rng.normal(size=n)), rng.normal(size=n), rng.integers(0, 4, n), rng.zipf(1.3, n)], 1)
    x_NF[:, 3] = x_NF[:, 3].clip(max=(1 << 24) - 1)
    x_NF[rng.random((n, 4)) < 0.1] = np.nan
    return torch.from_numpy(x_NF.astype(np.float32))


@pytest.fixture(scope="module")
def selection(features_NF: Tensor, write_dataset: Callable[..., str]) -> Selection:
    """40 row groups; a third of the groups have labels, which must not matter."""
    kinds = ["numeric"] * 3 + ["categorical"]
    features = [Feature.model_validate({"name": f"f{i}", "kind": kind}) for i, kind in enumerate(kinds)]
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.choice(np.arange(1, len(features_NF)), 599, replace=False))
    groups = [
        (x_LF, np.zeros(len(x_LF), np.float32) if i % 3 else None)
        for i, x_LF in enumerate(np.split(features_NF.numpy(), cuts))
    ]
    periods = {f"p{i:02}": groups[15 * i : 15 * i + 15] for i in range(40)}
    return select(Split(data=(write_dataset(periods, features),)), labelled=False)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "parts_of", partial(parts_of, values=1500))


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches per part; processes of a cluster do not inherit this patch."""
    monkeypatch.setattr(fitting, "_DOCS_PER_BATCH", 100)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The float64 moments of each fit; the float32 transform would hide differences."""
    seen: list[bytes] = []

    def make(statistics: FeatureStatistics, config: TransformConfig, *, bins: int) -> FeatureTransform:
        seen.append(b"".join(values_F.tobytes() for values_F in statistics.moments))
        return make_transform(statistics, config, bins=bins)

    monkeypatch.setattr(fitting, "make_transform", make)
    return seen


def assert_same_bits(one: FeatureTransform, other: FeatureTransform) -> None:
    for name, value in one.state_dict().items():
        assert value.numpy().tobytes() == other.state_dict()[name].numpy().tobytes(), name


@pytest.mark.usefixtures("_small_parts", "_small_batches")
@pytest.mark.parametrize("config", CONFIGS)
def test_parts_give_what_all_documents_at_once_give(
    selection: Selection, features_NF: Tensor, config: TransformConfig
) -> None:
    assert len([*parts_of(selection, values=1500)]) > 10
    actual = fit(selection, network_config(config)).state_dict()
    expected = fit_transform([features_NF], [f.kind for f in selection.features], config).state_dict()
    for name, value in expected.items():
        rounding = 1e-6 if name in ("mean_F", "scale_F") else 0
        torch.testing.assert_close(actual[name], value, rtol=rounding, atol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("_small_parts", "_small_batches")
@pytest.mark.parametrize("config", CONFIGS)
def test_the_marginals_are_documents_as_the_encoder_sees_them(selection: Selection, config: TransformConfig) -> None:
    transform = fit(selection, network_config(config))
    sample_SF = sample_inputs(selection, transform, size=300)
    all_NF = torch.cat([transform(groups.features_NF, groups.offsets_Q1) for groups in iterate(selection)])
    assert sample_SF.shape == (300, 4)
    numbers_N = np.arange(len(all_NF), dtype=np.uint64)
    lowest_S = np.argsort(splitmix64(np.zeros_like(numbers_N), numbers_N))[:300]
    torch.testing.assert_close(sample_SF, all_NF[lowest_S], rtol=1e-5, atol=1e-5)
    everything_SF = sample_inputs(selection, transform, size=6000)
    torch.testing.assert_close(everything_SF.sort(0).values, all_NF.sort(0).values, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster", "_small_parts")
def test_any_number_of_tasks_gives_the_same_bits(selection: Selection, moments: list[bytes]) -> None:
    for config in CONFIGS:
        here = fit(selection, network_config(config))
        marginals_SF = sample_inputs(selection, here, size=300)
        for at_once in (1, CPUS):
            run = partial(run_with_ray, read_on={"reader": CPUS / at_once})
            assert_same_bits(fit(selection, network_config(config), run=run), here)
            assert torch.equal(sample_inputs(selection, here, size=300, run=run), marginals_SF)
        assert len(moments) == 3
        assert len(set(moments)) == 1
        moments.clear()


def first_ends_after_another(folder: str, part: Part) -> int:
    """The first part waits until another has ended: for ever, if no later part is worked on meanwhile."""
    wait_until(lambda: part.first > 0 or any(Path(folder).iterdir()))
    Path(folder, str(part.first)).touch()
    return part.first


def fails_at(first: int, error: Exception, folder: str, part: Part) -> int:
    if part.first == first:
        raise error
    Path(folder, str(part.first)).touch()
    return part.first


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_results_come_in_order_and_tasks_stay_near(selection: Selection, tmp_path: Path) -> None:
    parts = [*parts_of(selection, values=1)]
    assert len(parts) == 40
    ended, begun = tmp_path / "ended", tmp_path / "begun"
    ended.mkdir()
    begun.mkdir()
    results = list(run_with_ray(partial(first_ends_after_another, str(ended)), parts))
    assert results == [part.first for part in parts]
    left = run_with_ray(partial(fails_at, -1, ValueError(), str(begun)), parts)
    assert next(left) == 0
    time.sleep(0.5)
    assert len(list(begun.iterdir())) <= 2 * CPUS + 1
    left.close()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "error", [InputError("x is damaged; make it again"), UnavailableError("no answer"), ValueError("ours")]
)
def test_what_a_task_raises_comes_through(selection: Selection, tmp_path: Path, error: Exception) -> None:
    parts = [*parts_of(selection, values=1)]
    results = run_with_ray(partial(fails_at, parts[7].first, error, str(tmp_path)), parts)
    with pytest.raises(type(error), match=str(error)) as raised:
        list(results)
    if not isinstance(error, ValueError):
        assert str(raised.value) == str(error)


@pytest.mark.parametrize("run", [run_here, pytest.param(run_with_ray, marks=pytest.mark.ray)])
def test_a_missing_file_is_named(write_dataset: Callable[..., str], request: pytest.FixtureRequest, run: Run) -> None:
    if run is run_with_ray:
        request.getfixturevalue("ray_cluster")
    groups = [(np.ones((2, 1), np.float32), None)]
    split = Split(data=(write_dataset({"a": groups, "b": groups}, [Feature(name="f")]),))
    selection = select(split, labelled=False)
    Path(selection.row_groups[1].file.url).unlink()
    with pytest.raises(InputError, match=r"^\S*period=b/part-00000-[\w-]+\.parquet: no such file"):
        fit(selection, network_config(), run=run)


def never(*_: Any) -> Iterator[Any]:
    raise AssertionError("it is fitted again")


def test_what_is_fitted_once_is_read_the_next_time(
    selection: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_FIT_BYTES", 0)  # as another process, which remembers none
    url = str(tmp_path / "transform")
    for config in CONFIGS:  # each takes the place of the one before
        first = fitted(selection, network_config(config), url)
        again = fitted(selection, network_config(config), url, run=never)
        assert_same_bits(first, again)
        assert_same_bits(first, fit(selection, network_config(config)))
        assert again.config == config
        assert again.kinds == first.kinds
    other_encoder = NetworkConfig.model_validate({"transform": CONFIGS[-1].model_dump(), "encoder": {"width": 8}})
    fitted(selection, other_encoder, url, run=never)
    with pytest.raises(AssertionError, match="fitted again"):
        fitted(selection, network_config(), url, run=never)


def test_a_process_fits_what_several_networks_share_once(
    selection: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_fits", {})
    first = fitted(selection, network_config(CONFIGS[0]), str(tmp_path / "a"))
    expected = {name: values.clone() for name, values in first.state_dict().items()}
    for values in first.state_dict().values():
        values.zero_()
    again = fitted(selection, network_config(CONFIGS[0]), str(tmp_path / "b"), run=never)
    assert all(torch.equal(values, expected[name]) for name, values in again.state_dict().items())
    assert_same_bits(fitted(selection, network_config(CONFIGS[0]), str(tmp_path / "b"), run=never), again)
    for config in CONFIGS[1:]:
        with pytest.raises(AssertionError, match="fitted again"):
            fitted(selection, network_config(config), str(tmp_path / "c"), run=never)
    monkeypatch.setattr(fitting, "_FIT_BYTES", 0)  # vocabularies may be large
    fitted(selection, network_config(CONFIGS[1]), str(tmp_path / "d"))
    with pytest.raises(AssertionError, match="fitted again"):
        fitted(selection, network_config(CONFIGS[1]), str(tmp_path / "e"), run=never)


def test_a_transform_of_other_data_is_not_taken(selection: Selection, tmp_path: Path) -> None:
    url = str(tmp_path / "transform")
    fitted(selection, network_config(), url)
    data = Path(selection.row_groups[0].file.url).parents[1]
    fewer = select(Split(data=(str(data),), periods=("p00..p20",)), labelled=False)
    assert_same_bits(fitted(fewer, network_config(), url), fit(fewer, network_config()))


def test_a_damaged_transform_is_fitted_again(
    selection: Selection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "transform")
    made = fitted(selection, network_config(), url)
    path = tmp_path / "transform" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert_same_bits(fitted(selection, network_config(), url), made)
    assert "are missing or cut short" in caplog.text
    assert_same_bits(fitted(selection, network_config(), url, run=never), made)
