"""FeatureTransform against scikit-learn, and its laws: any batching, finite outputs, the same once rebuilt."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import encoders as reference
from sklearn.preprocessing import QuantileTransformer, StandardScaler
from torch import Tensor

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups, standardise_groups, to_offsets
from ltrscale.errors import InputError
from ltrscale.models.features import (
    FeatureKind,
    FeatureTransform,
    TransformConfig,
    _hashed_row,
    _signed_log1p,
    expected_sharing,
    fit_transform,
    sharing,
)

METHODS = ["none", "log1p", "standard", "log1p_standard", "quantile_normal"]
FAR = 1e30


def heavy_tailed(n: int = 3000, seed: int = 0) -> Tensor:
    """Raw features like those of logs: long tails, shifts, small scales, a fifth of the values missing."""
    generator = torch.Generator().manual_seed(seed)
    x_NF = torch.randn(n, 5, generator=generator)
    x_NF = torch.stack([x_NF[:, 0].exp() * 100, -x_NF[:, 1].exp(), x_NF[:, 2], x_NF[:, 3] + 50, x_NF[:, 4] * 1e-6], 1)
    x_NF[torch.rand(n, 5, generator=generator) < 0.2] = math.nan
    return x_NF


def fit(x_NF: Tensor, numeric: str, **settings: float) -> FeatureTransform:
    config = TransformConfig.model_validate({"numeric": numeric, **settings})
    return fit_transform([x_NF], ["numeric"] * x_NF.shape[1], config)


@pytest.mark.parametrize("numeric", ["standard", "log1p_standard"])
def test_standardisation_agrees_with_scikit_learn(numeric: str) -> None:
    x_NF, new_NF = heavy_tailed(), heavy_tailed(seed=1)
    before = _signed_log1p if numeric == "log1p_standard" else torch.clone
    scaler = StandardScaler().fit(before(x_NF).double().numpy())
    expected_NF = np.nan_to_num(scaler.transform(before(new_NF).double().numpy()))
    actual_NF = fit(x_NF, numeric, clip=FAR)(new_NF)
    assert actual_NF.dtype == torch.float32
    np.testing.assert_allclose(actual_NF.numpy(), expected_NF, rtol=1e-4, atol=1e-4)
    clipped_NF = fit(x_NF, numeric, clip=1.5)(new_NF)
    np.testing.assert_allclose(clipped_NF.numpy(), expected_NF.clip(-1.5, 1.5), rtol=1e-4, atol=1e-4)
    assert (clipped_NF == 1.5).any()


@pytest.mark.parametrize("quantiles", [10, 256, 5000])
def test_quantile_map_agrees_with_scikit_learn(quantiles: int) -> None:
    x_NF, new_NF = heavy_tailed(), heavy_tailed(seed=1)
    actual_NF = fit(x_NF, "quantile_normal", quantiles=quantiles)(new_NF)
    oracle = QuantileTransformer(n_quantiles=min(quantiles, 2000), output_distribution="normal", subsample=None)
    for feature in range(x_NF.shape[1]):
        column = x_NF[:, feature]
        oracle.set_params(n_quantiles=min(quantiles, int((~column.isnan()).sum())))
        oracle.fit(column[~column.isnan(), None].double().numpy())
        expected_N = oracle.transform(new_NF[:, feature, None].double().numpy())[:, 0]
        inside_N = np.abs(expected_N) < 2.5  # in the tails float32 rounds what scikit-learn does not
        difference_N = np.abs(actual_NF[:, feature].numpy() - expected_N)
        assert inside_N.mean() > 0.7
        assert difference_N[inside_N].max() < (1e-3 if quantiles <= 256 else 0.02)
        missing_N = new_NF[:, feature].isnan()
        assert not actual_NF[missing_N, feature].any()


def test_quantile_map_gives_a_normal_distribution_and_keeps_order() -> None:
    x_NF = heavy_tailed(20_000)
    z_NF = fit(x_NF, "quantile_normal")(x_NF)
    for x_N, z_N in zip(x_NF.T, z_NF.T, strict=True):
        seen_N = ~x_N.isnan()
        order = x_N[seen_N].argsort()
        assert (z_N[seen_N][order].diff() >= 0).all()
        assert abs(float(z_N[seen_N].mean())) < 0.02
        assert abs(float(z_N[seen_N].std()) - 1) < 0.05


def test_tied_values_take_the_middle_of_their_block() -> None:
    x_NF = torch.tensor([0.0] * 60 + [1.0] * 40)[:, None]
    transform = fit(x_NF, "quantile_normal", quantiles=101)
    middle = torch.special.ndtri(torch.tensor([0.30, 0.80])).tolist()
    assert transform(torch.tensor([[0.0], [1.0]]))[:, 0].tolist() == pytest.approx(middle, abs=0.02)
    ends = transform(torch.tensor([[-0.001], [1.001]]))[:, 0]
    assert ends.tolist() == pytest.approx([-5.2, 5.2], abs=0.05)


@pytest.mark.parametrize("numeric", METHODS)
def test_batches_do_not_matter(numeric: str) -> None:
    x_NF = heavy_tailed(500)
    codes_N1 = torch.arange(500)[:, None] % 7 * 1000.0
    x_NF = torch.cat([x_NF, codes_N1], 1)
    kinds = ["numeric"] * 5 + ["categorical"]
    config = TransformConfig.model_validate({"numeric": numeric, "sample": 100})
    whole = fit_transform([x_NF], kinds, config).state_dict()
    parts = fit_transform(x_NF.split([1, 0, 250, 249]), kinds, config).state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-6, atol=0)
    again = fit_transform([x_NF], kinds, config).state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_the_sample_is_uniform_and_exact_when_it_holds_everything() -> None:
    n = 20_000
    x_N1 = torch.arange(n).float()[:, None]
    exact = fit(x_N1, "quantile_normal", quantiles=5, sample=n).quantiles_FK
    assert exact.tolist() == [[0, 4999.75, 9999.5, 14999.25, 19999]]
    config = TransformConfig(numeric="quantile_normal", quantiles=11, sample=2000)
    sampled_K = fit_transform(x_N1.split(700), ["numeric"], config).quantiles_FK[0] / n
    error_K = (sampled_K - torch.linspace(0, 1, 11)).abs()
    assert 0 < float(error_K.max()) < 4 * 0.5 / math.sqrt(2000)


numbers = st.sampled_from(
    [math.nan, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 1e38, -3.4e38, 3.4e38, 16777215.0]
) | st.floats(width=32, allow_infinity=False)
matrices = st.integers(1, 4).flatmap(
    lambda f: st.lists(st.lists(numbers, min_size=f, max_size=f), min_size=1, max_size=6)
)


@pytest.mark.slow
@pytest.mark.parametrize("numeric", METHODS)
@given(seen=matrices, new=matrices)
def test_outputs_are_finite(numeric: str, seen: list[list[float]], new: list[list[float]]) -> None:
    width = min(len(seen[0]), len(new[0]))
    transform = fit(torch.tensor(seen)[:, :width], numeric, quantiles=7)
    x_NF = transform(torch.tensor(new)[:, :width])
    assert x_NF.isfinite().all()
    bound = {"standard": 10.0, "log1p_standard": 10.0, "quantile_normal": 5.3}.get(numeric, math.inf)
    assert (x_NF.abs() <= bound).all()


@pytest.mark.parametrize("numeric", METHODS)
def test_constant_and_missing_features(numeric: str) -> None:
    x_NF = torch.tensor([[0.1, math.nan], [0.1, math.nan], [math.nan, math.nan]])
    transform = fit(x_NF, numeric)
    kept = {"none": 0.1, "log1p": math.log1p(0.1)}.get(numeric, 0.0)
    assert transform(x_NF)[:, 0].tolist() == pytest.approx([kept] * 3)
    assert transform(x_NF)[:, 1].tolist() == [0.0] * 3
    if numeric == "standard":
        assert transform(torch.tensor([[1.1, 2.0]]))[0].tolist() == pytest.approx([1.0, 2.0])


def test_rounding_of_a_constant_is_not_amplified() -> None:
    value = 1e8
    x_NF = torch.full((1000, 1), value)
    x_NF[0] = torch.nextafter(torch.tensor(value), torch.tensor(2e8))
    assert fit(x_NF, "standard")(x_NF).abs().max() <= 8


@pytest.mark.parametrize("numeric", ["none", "log1p"])
def test_missing_values_become_the_training_mean(numeric: str) -> None:
    x_NF = torch.tensor([[1.0], [3.0], [math.nan]])
    before = _signed_log1p if numeric == "log1p" else torch.clone
    mean = float(before(x_NF[:2]).mean())
    assert fit(x_NF, numeric)(torch.tensor([[math.nan]])).item() == pytest.approx(mean)


def test_categories_are_numbered_and_unknown_ones_are_zero() -> None:
    x_NF = torch.tensor([[30.0, 1.0, 5.0], [10.0, 2.0, math.nan], [30.0, math.nan, math.nan], [16777215.0, 3.0, 5.0]])
    transform = fit_transform([x_NF], ["categorical", "numeric", "categorical"], TransformConfig(numeric="none"))
    assert transform.cardinalities == (4, 2)
    assert transform.numeric_F.tolist() == [False, True, False]
    new_NF = torch.tensor([[10.0, 0.0, 6.0], [30.0, 0.0, 5.0], [math.nan, 0.0, 4.0], [16777215.0, 0.0, math.nan]])
    assert transform(new_NF).tolist() == [[1, 0, 0], [2, 0, 1], [0, 0, 0], [3, 0, 0]]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(1, 12), st.integers(1, 50))
def test_the_most_frequent_codes_are_kept(codes: list[int], limit: int, batch: int) -> None:
    x_N1 = torch.tensor(codes).float()[:, None]
    transform = fit_transform(x_N1.split(batch), ["categorical"], TransformConfig(max_vocabulary=limit))
    by_frequency = sorted(set(codes), key=lambda code: (-codes.count(code), code))
    assert transform.codes_V.tolist() == sorted(by_frequency[:limit])
    place = {code: i + 1 for i, code in enumerate(sorted(by_frequency[:limit]))}
    assert transform(x_N1)[:, 0].tolist() == [place.get(code, 0) for code in codes]


def test_a_category_without_any_value_is_unknown() -> None:
    transform = fit_transform([torch.full((2, 1), math.nan)], ["categorical"], TransformConfig())
    assert transform.cardinalities == (1,)
    assert transform(torch.tensor([[3.0], [math.nan]])).tolist() == [[0.0], [0.0]]


def many_and_few_codes(n: int = 500) -> Tensor:
    """Two categories, of n codes and of four, and a number between them; of the first some are missing."""
    x_NF = torch.stack([torch.arange(n) * 33_000.0, torch.randn(n), torch.arange(n) % 4.0], 1)
    x_NF[::50, 0] = math.nan
    return x_NF


@pytest.mark.parametrize("batch", [7, 500])
def test_only_a_category_of_more_codes_than_the_vocabulary_is_hashed(batch: int) -> None:
    x_NF, config = many_and_few_codes(), TransformConfig(max_vocabulary=400, hash_rows=1000)
    kinds: list[FeatureKind] = ["categorical", "numeric", "categorical"]
    transform = fit_transform(x_NF.split(batch), kinds, config)
    assert (transform.cardinalities, transform.hashed) == ((1001, 5), (0,))
    row_N, _, place_N = transform(x_NF).T
    assert place_N.tolist() == [i % 4 + 1 for i in range(500)]
    known_N = torch.arange(500) % 50 != 0
    assert row_N[~known_N].tolist() == [0] * 10  # what is missing has a row that no code has
    assert 1 <= row_N[known_N].min() < row_N.max() <= 1000
    assert (row_N == row_N.round()).all()
    never_met = torch.tensor([[5.0, 0, 9], [-1, 0, 0], [2.0**24, 0, 0], [math.inf, 0, 0]])
    rows = transform(never_met)[:, [0, 2]].tolist()
    assert rows[0][0] >= 1
    assert [rows[0][1], *(row[0] for row in rows[1:])] == [0, 0, 0, 0]
    rebuilt = FeatureTransform.from_state(transform.state_dict(), config)
    assert torch.equal(rebuilt(x_NF), transform(x_NF))
    plain = TransformConfig(max_vocabulary=400)
    assert fit_transform([x_NF], kinds, plain).cardinalities == (401, 5)
    assert "hashed_F" not in fit_transform([x_NF], kinds, plain).state_dict()
    with pytest.raises(ValueError, match="one of another transform"):
        FeatureTransform.from_state(transform.state_dict(), plain)


def test_a_row_depends_on_its_code_alone() -> None:
    codes = [0.0, 1.0, 2.0, 2**24 - 1.0]
    rows = [7_416_998, 330_234, 9_494_827, 8_848_762]
    assert _hashed_row(torch.tensor(codes), 10_000_019).tolist() == rows
    p = 2**24 + 43  # in Python's integers, which cannot overflow
    mixed = [pow(pow(int(code) + 11_400_715, 3, p) + 7_046_029, 3, p) for code in codes]
    assert [value % 10_000_019 + 1 for value in mixed] == rows


@cache
def shuffled_codes() -> Tensor:
    """All codes in random order, which takes half a second."""
    return torch.randperm(1 << 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@given(st.integers(1000, 200_000), st.integers(10, 3_000_000), st.sampled_from(["random", "runs", "steps"]))
def test_as_many_codes_share_a_row_as_expected(n: int, rows: int, order: str) -> None:
    codes = {
        "random": shuffled_codes()[rows:][:n],
        "runs": torch.arange(n) + n,
        "steps": torch.arange(n) * ((1 << 24) // n),
    }
    expected = expected_sharing(n, rows)
    found = sharing(codes[order].float(), rows)
    error = math.sqrt(max(expected * (1 - expected), 1 / n) / n)  # codes that share come in twos: twice the variance
    assert abs(found - expected) <= 6 * math.sqrt(2) * error


@pytest.mark.parametrize("numeric", METHODS)
def test_the_state_rebuilds_the_transform(numeric: str) -> None:
    x_NF = torch.cat([heavy_tailed(200), torch.arange(200)[:, None] % 9.0], 1)
    config = TransformConfig.model_validate({"numeric": numeric, "quantiles": 20})
    transform = fit_transform([x_NF], ["numeric"] * 5 + ["categorical"], config)
    rebuilt = FeatureTransform.from_state(transform.state_dict(), config)
    assert torch.equal(rebuilt(x_NF), transform(x_NF))
    assert rebuilt.cardinalities == transform.cardinalities
    assert not list(rebuilt.parameters())


def test_inputs_do_not_change_and_may_have_no_document() -> None:
    x_NF = torch.tensor([[1.0, 7.0], [math.nan, 8.0]])
    copy_NF = x_NF.clone()
    for numeric in METHODS:
        transform = fit_transform(
            [x_NF], ["numeric", "categorical"], TransformConfig.model_validate({"numeric": numeric})
        )
        assert transform(x_NF)[:, 1].tolist() == [1.0, 2.0]
        assert transform(x_NF[:0]).shape == (0, 2)
        assert torch.equal(x_NF.nan_to_num(9), copy_NF.nan_to_num(9))


def test_fitting_on_no_document_is_an_error() -> None:
    with pytest.raises(InputError, match="no document to fit it on"):
        fit_transform([torch.zeros(0, 2)], ["numeric", "numeric"], TransformConfig())


LENGTHS = (3, 0, 1, 40, 2)


def in_groups(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Heavy-tailed documents in groups, some empty or single; the fifth column is constant in each group."""
    offsets_Q1 = to_offsets(torch.tensor(LENGTHS))
    x_NF = heavy_tailed(sum(LENGTHS), seed)
    x_NF[:, 4] = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) * 0.1
    return x_NF, offsets_Q1


@pytest.mark.parametrize("numeric", METHODS)
def test_per_query_standardises_what_the_numeric_map_gives(numeric: str) -> None:
    x_NF, offsets_Q1 = in_groups()
    plain, per_query = fit(x_NF, numeric), fit(x_NF, numeric, per_query=True)
    actual_NF = per_query(x_NF, offsets_Q1)
    assert actual_NF.dtype == torch.float32
    for before_N, actual_N in zip(plain(x_NF).T, actual_NF.T, strict=True):
        expected = reference.standardise([part.tolist() for part in before_N.split(LENGTHS)])
        assert actual_N.tolist() == pytest.approx([x for group in expected for x in group], abs=1e-4)
    with pytest.raises(ValueError, match="needs the offsets"):
        per_query(x_NF)
    assert torch.equal(plain(x_NF, offsets_Q1), plain(x_NF))


def test_per_query_depends_on_the_group_only_and_on_no_order() -> None:
    x_NF, offsets_Q1 = in_groups()
    transform = fit(x_NF, "log1p_standard", per_query=True)
    whole_NF = transform(x_NF, offsets_Q1)
    alone = [transform(part, torch.tensor([0, len(part)])) for part in x_NF.split(LENGTHS)]
    torch.testing.assert_close(whole_NF, torch.cat(alone), rtol=1e-6, atol=1e-6)
    order = torch.cat([int(first) + torch.randperm(n) for first, n in zip(offsets_Q1[:-1], LENGTHS, strict=True)])
    torch.testing.assert_close(transform(x_NF[order], offsets_Q1), whole_NF[order], rtol=1e-6, atol=1e-6)
    assert transform(x_NF[:0], torch.tensor([0])).shape == (0, 5)


@pytest.mark.parametrize("length", [1, 2, 999, 100_000])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e-30, 1e8, 3.4e38])
def test_a_constant_in_a_group_is_zero_however_its_sum_rounds(length: int, value: float) -> None:
    x_N1 = torch.full((length, 1), value)
    assert not standardise_groups(x_N1, torch.tensor([0, length])).any()
    almost_N1 = x_N1.clone()
    almost_N1[0] = torch.nextafter(x_N1[0], torch.zeros(1))
    assert standardise_groups(almost_N1, torch.tensor([0, length])).abs().max() <= (1 if value == 0 else 0)


def test_small_differences_on_a_large_mean_count() -> None:
    x_N1 = torch.tensor([[1000.0], [1000.125], [1000.25], [1000.375]])
    expected = reference.standardise([x_N1[:, 0].tolist()])[0]
    copy_N1 = x_N1.clone()
    actual_N1 = standardise_groups(x_N1, torch.tensor([0, 4]))
    assert actual_N1[:, 0].tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(x_N1, copy_N1)
    double_N1 = x_N1.double()
    assert standardise_groups(double_N1, torch.tensor([0, 4]))[:, 0].tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(double_N1, copy_N1.double())


@pytest.mark.slow
@pytest.mark.parametrize("numeric", METHODS)
@given(seen=matrices, new=matrices, cut=st.integers(0, 6))
def test_outputs_per_query_are_finite(numeric: str, seen: list[list[float]], new: list[list[float]], cut: int) -> None:
    width = min(len(seen[0]), len(new[0]))
    transform = fit(torch.tensor(seen)[:, :width], numeric, quantiles=7, per_query=True)
    offsets_Q1 = torch.tensor([0, min(cut, len(new)), len(new)])
    x_NF = transform(torch.tensor(new)[:, :width], offsets_Q1)
    assert x_NF.isfinite().all()
    assert x_NF.abs().max() <= math.sqrt(len(new)) + 1e-5


def test_per_query_leaves_categories_alone() -> None:
    x_NF = torch.tensor([[1.0, 30.0], [3.0, 10.0], [5.0, 30.0]])
    transform = fit_transform([x_NF], ["numeric", "categorical"], TransformConfig(per_query=True))
    assert transform(x_NF, torch.tensor([0, 2, 3])).tolist() == [[-1.0, 2.0], [1.0, 1.0], [0.0, 2.0]]


@pytest.mark.parametrize("numeric", METHODS)
@pytest.mark.parametrize("batch", [1, 7, 60])
def test_numeric_features_of_few_values_become_categories(numeric: str, batch: int) -> None:
    n = 60
    x_NF = torch.stack([torch.arange(n) % values for values in (2.0, 3.0, 4.0, 60.0, 9.0)], 1) * 0.25 - 0.5
    x_NF[::7, :2] = math.nan
    config = TransformConfig.model_validate({"numeric": numeric, "discrete_up_to": 3})
    kinds = ["numeric"] * 4 + ["categorical"]
    transform = fit_transform(x_NF.split(batch), kinds, config)
    assert transform.numeric_F.tolist() == [False, False, True, True, False]
    assert transform.cardinalities == (3, 4, 10)
    first_N, second_N = transform(x_NF)[:, :2].T
    assert first_N.tolist() == [0.0 if i % 7 == 0 else i % 2 + 1 for i in range(n)]
    assert second_N.tolist() == [0.0 if i % 7 == 0 else i % 3 + 1 for i in range(n)]
    assert transform(torch.full((1, 5), 0.125))[0, :2].tolist() == [0.0, 0.0]  # values that training did not have
    plain = fit_transform([x_NF], kinds, config.replace(discrete_up_to=0))
    assert plain.numeric_F.tolist() == [True] * 4 + [False]
    torch.testing.assert_close(transform(x_NF)[:, 2:], plain(x_NF)[:, 2:])
    rebuilt = FeatureTransform.from_state(transform.state_dict(), config)
    assert rebuilt.kinds == transform.kinds
    assert torch.equal(rebuilt(x_NF), transform(x_NF))


def test_a_feature_without_values_is_discrete_and_always_unknown() -> None:
    x_N1 = torch.full((3, 1), math.nan)
    transform = fit_transform([x_N1], ["numeric"], TransformConfig(discrete_up_to=1))
    assert transform.cardinalities == (1,)
    assert transform(torch.tensor([[4.0]])).tolist() == [[0.0]]


def test_a_gpu_looks_all_categories_up_at_once() -> None:
    codes = [[-7.5, 3.0, 5.0, math.nan], [-0.25, 3.0, 16777215.0, math.nan], [0.0, 4.0, 0.0, math.nan]]
    kinds: list[FeatureKind] = ["categorical"] * 4 + ["numeric"]
    fitted_NF = torch.cat([torch.tensor(codes), torch.ones(3, 1)], 1)
    transform = fit_transform([fitted_NF], kinds, TransformConfig())
    values = [-torch.inf, -7.5, -0.25, -0.0, 0.0, 3.0, 3.5, 4.0, 5.0, 16777215.0, torch.inf, math.nan, -math.nan]
    new_NF = torch.tensor(values)[:, None].expand(-1, 5).clone()
    expected_NF = transform(new_NF)
    assert expected_NF[:, :4].max(0).values.tolist() == [3, 2, 3, 0]
    with pretending() as device:
        there_NF = new_NF.to(device)
        transform.to(device)
        with counting() as counted:
            found_NF = transform(there_NF)
    assert not counted.counts.waits
    assert torch.equal(found_NF.cpu().nan_to_num(9), expected_NF.nan_to_num(9))


def test_a_gpu_hashes_as_a_cpu_does() -> None:
    x_NF = many_and_few_codes()
    kinds: list[FeatureKind] = ["categorical", "numeric", "categorical"]
    transform = fit_transform([x_NF], kinds, TransformConfig(max_vocabulary=9, hash_rows=77))
    expected_NF = transform(x_NF)
    with pretending() as device:
        there_NF = x_NF.to(device)
        transform.to(device)
        with counting() as counted:
            found_NF = transform(there_NF)
    assert not counted.counts.waits
    torch.testing.assert_close(found_NF.cpu(), expected_NF)


def test_per_query_asks_a_gpu_for_nothing() -> None:
    x_NF, offsets_Q1 = in_groups()
    transform = fit(x_NF, "standard", per_query=True)
    expected_NF = transform(x_NF, offsets_Q1)
    with pretending() as device:
        there = QueryGroups(x_NF, offsets_Q1).to(device)
        transform.to(device)
        with counting() as counted:
            found_NF = transform(there.features_NF, there.offsets_Q1)
    assert not counted.counts.waits
    torch.testing.assert_close(found_NF.cpu(), expected_NF)
