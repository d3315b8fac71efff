"""Fitting the transform on a data set: any number of processes gives the same bits, and it is fitted once.

Pretraining finds the features that name a document, masks them, and warns where the contrast is solved.
"""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import named_documents
import numpy as np
import pytest
import torch
from small_trainers import pretrain
from torch import Tensor
from waiting import wait_until

from ltrscale import bundle
from ltrscale.data.dataset.manifest import Feature, open_dataset
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, Run, parts_of, run_here, spread
from ltrscale.draws import splitmix64
from ltrscale.errors import InputError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform, TransformConfig, fit_transform, make_transform
from ltrscale.models.fitting import FeatureStatistics
from ltrscale.runtime.on_ray import run_with_ray
from ltrscale.training import network
from ltrscale.training.network import fit, fitted, sample_inputs
from ltrscale.training.pretrain import PretrainConfig


@pytest.fixture
def data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.INFO, "ltrscale")
    return named_documents.make(tmp_path)


def run(config: PretrainConfig, data: str, out: Path) -> list[dict[str, Any]]:
    """The records of the epochs."""
    records: list[dict[str, Any]] = []
    pretrain(config, Split(data=(data,)), str(out), origin={}, report=lambda r: records.append(dict(r)))
    return [record for record in records if "epoch" in record]


def test_preparation_and_pretraining_name_what_identifies_a_document(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    prepared, suspect = [m for m in messages if "unique within its query" in m]
    assert "query: c_id for 100% of the documents; pretraining hides these categories by itself" in prepared
    assert "query: f_place for 100% of the documents; exclude what is an id" in suspect
    manifest = open_dataset(data).manifest
    shares = {f.name: s.unique_in_group for f, s in zip(manifest.features, manifest.summaries, strict=True)}
    assert manifest.grouped == manifest.counts().documents
    assert (shares["f_age"], shares["f_place"], shares["c_id"]) == (None, 1, 1)
    assert 0 < (shares["c_os"] or 0) < 0.3
    run(named_documents.config(epochs=1, columns={}), data, tmp_path / "out")
    (found,) = [m for m in caplog.messages if "pretraining: c_id" in m]
    assert "for 100% of the documents" in found
    assert "the views hide it at a rate of 0.8, so nothing needs doing" in found
    (number,) = [m for m in caplog.messages if "pretraining: f_place is a whole number" in m]
    assert "pretrain.mask.columns={f_place: 1}" in number
    caplog.clear()
    run(named_documents.config(epochs=1, columns={"f_place": 0}), data, tmp_path / "answered")
    assert not [m for m in caplog.messages if "f_place" in m]
    assert bundle.load(str(tmp_path / "out")).config["mask"] == {
        "numbers": 0,
        "categories": 0,
        "columns": {"c_id": 0.8},
        "identifying": 0,
    }


@pytest.mark.slow
def test_an_unmasked_id_solves_the_contrast_with_one_warning_and_a_masked_one_does_not(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solved = run(named_documents.config(epochs=70, identifying=0), data, tmp_path / "solved")
    (warning,) = [m for m in caplog.messages if "the contrast is solved" in m]
    assert "jobs.explain" in warning
    assert "stop a long one" in warning
    assert [m for m in caplog.messages if "c_id is unique" in m and "set pretrain.mask.identifying=0.8 to hide it" in m]
    caplog.clear()
    sound = run(named_documents.config(), data, tmp_path / "sound")
    assert not [m for m in caplog.messages if "the contrast is solved" in m]
    assert solved[-1]["accuracy"] > 0.9
    assert solved[-1]["loss_left"] < 0.25 < sound[-1]["loss_left"]


@pytest.mark.slow
def test_a_solved_contrast_between_subsets_is_warned_of_too(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subtab = {"kind": "subtab", "within_groups": True, "subsets": 2, "overlap": 0.75, "rate": 0}

    def warnings(**mask: float) -> list[str]:
        caplog.clear()
        config = named_documents.config(epochs=25, columns={"f_*": 1}, **mask).replace(method=subtab)
        assert run(config, data, tmp_path / str(mask))[-1]["loss_left"] is None
        return [message for message in caplog.messages if "the contrast is solved" in message]

    (warning,) = warnings(identifying=0)
    assert "pretrain.method.overlap" in warning
    assert "jobs.explain" not in warning  # which does not examine SubTab
    assert warnings() == []


def test_only_the_mask_that_acts_changes_the_weights(data: str, tmp_path: Path) -> None:
    masks: dict[str, dict[str, Any]] = {
        "none": {"identifying": 0},
        "zero": {"identifying": 0, "columns": {"f_place": 1, "c_os": 0.0}},
        "named": {"identifying": 0, "columns": {"f_place": 1, "c_id": 0.8}},
        "found": {},
    }
    for name, mask in masks.items():
        run(named_documents.config(epochs=1, **mask), data, tmp_path / name)
    of = {name: bundle.load(str(tmp_path / name)).content for name in masks}
    assert of["none"] == of["zero"] != of["named"] == of["found"]


def test_an_unknown_feature_is_refused_before_training(data: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pretrain\.mask\.columns: .*'c_ids'; the nearest is 'c_id'"):
        run(named_documents.config(columns={"c_ids": 0.5}), data, tmp_path / "out")


def test_a_sample_has_whole_row_groups_at_equal_distances(data: str) -> None:
    whole = select(Split(data=(data,)), labelled=False)
    assert len(whole.row_groups) >= 60
    assert spread(whole, documents=10**9).row_groups == whole.row_groups
    half = spread(whole, documents=whole.n_documents // 2)
    places = [whole.row_groups.index(row_group) for row_group in half.row_groups]
    assert {b - a for a, b in pairwise(places)} <= {1, 2}
    assert abs(half.n_documents - whole.n_documents / 2) < 0.1 * whole.n_documents
    assert len(spread(whole, documents=1).row_groups) == 1


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
    monkeypatch.setattr(network, "parts_of", partial(parts_of, values=1500))


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches per part; processes of a cluster do not inherit this patch."""
    monkeypatch.setattr(network, "_DOCS_PER_BATCH", 100)


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The float64 moments of each fit; the float32 transform would hide differences."""
    seen: list[bytes] = []

    def make(statistics: FeatureStatistics, config: TransformConfig, *, bins: int) -> FeatureTransform:
        seen.append(b"".join(values_F.tobytes() for values_F in statistics.moments))
        return make_transform(statistics, config, bins=bins)

    monkeypatch.setattr(network, "make_transform", make)
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
@pytest.mark.parametrize("error", [InputError("file x is damaged; make it again"), ValueError("ours")])
def test_what_a_task_raises_comes_through(selection: Selection, tmp_path: Path, error: Exception) -> None:
    parts = [*parts_of(selection, values=1)]
    results = run_with_ray(partial(fails_at, parts[7].first, error, str(tmp_path)), parts)
    with pytest.raises(type(error), match=str(error)) as raised:
        list(results)
    if isinstance(error, InputError):
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
    monkeypatch.setattr(network, "_FIT_BYTES", 0)  # as another process, which remembers none
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
    monkeypatch.setattr(network, "_fits", {})
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
    monkeypatch.setattr(network, "_FIT_BYTES", 0)  # vocabularies may be large
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
