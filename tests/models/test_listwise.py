"""Initial order, chunks, and the special properties of DLCM and GSF; the laws of all contexts are in test_contexts."""

from collections.abc import Callable

import pytest
import torch
from reference.lists import apply, make, make_lists, shuffled
from torch import Tensor, nn

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.errors import InputError
from ltrscale.models.attention import SetRankConfig
from ltrscale.models.choices import ContextConfig
from ltrscale.models.contexts import DLCM, DLCMConfig, GSFConfig, _content_keys, _stride_numbers, map_lists

# initial order


ordered = pytest.mark.parametrize(
    "make_config",
    [
        lambda **keys: SetRankConfig(width=8, heads=2, blocks=1, **keys),
        lambda **keys: DLCMConfig(state=5, **keys),
    ],
    ids=["setrank", "dlcm"],
)
MakeConfig = Callable[..., ContextConfig]


def with_positions(groups: QueryGroups, positions: list[float] | None, ids: list[int] | None = None) -> QueryGroups:
    return QueryGroups(
        groups.features_NF,
        groups.offsets_Q1,
        ids_Q=None if ids is None else torch.tensor(ids),
        positions_N=None if positions is None else torch.tensor(positions),
    )


@ordered
def test_the_initial_order_counts_and_may_come_from_positions_or_from_a_feature(make_config: MakeConfig) -> None:
    groups, h_ND = make_lists([4, 3])
    groups.features_NF[:, 2] = torch.tensor([7.0, 30.0, -1.0, 8.0, 5.0, 4.0, 6.0])
    by_feature = make(make_config(initial_rank="feature", feature=2))
    by_position = make(make_config(initial_rank="positions"))
    out = apply(by_feature, with_positions(groups, None), h_ND).documents_ND
    same = apply(by_position, with_positions(groups, [3, 1, 4, 2, 20, 30, 10]), h_ND).documents_ND
    torch.testing.assert_close(same, out, rtol=0, atol=0)
    turned = apply(by_position, with_positions(groups, [2, 4, 1, 3, 20, 30, 10]), h_ND).documents_ND
    assert (turned[:4] - out[:4]).abs().max() > 1e-3
    torch.testing.assert_close(turned[4:], out[4:])


def test_missing_values_go_last_and_ties_keep_the_order_of_the_input() -> None:
    inf, nan = torch.inf, torch.nan
    values = torch.tensor([nan, 1.0, -inf, 1.0, nan, 2.0, 0.0, -0.0])[:, None]
    groups = QueryGroups(values, torch.tensor([0, 6, 6, 8]))
    assert DLCMConfig(initial_rank="feature", feature=0).order(groups).tolist() == [5, 1, 3, 2, 0, 4, 6, 7]
    groups = with_positions(groups, [nan, 3, 1, 3, nan, inf, 2, 2])
    assert DLCMConfig().order(groups).tolist() == [2, 1, 3, 5, 0, 4, 6, 7]


@ordered
def test_missing_positions_are_an_error(make_config: MakeConfig) -> None:
    module = make(make_config(initial_rank="positions"))
    groups, h_ND = make_lists([2, 0, 2])
    with pytest.raises(InputError, match="this data set has none: prepare the data with a column of positions"):
        apply(module, with_positions(groups, None), h_ND)
    with pytest.raises(InputError, match="query group 2 has no positions"):
        apply(module, with_positions(groups, [1, 2, torch.nan, torch.nan]), h_ND)
    with pytest.raises(InputError, match="query group 77 has no positions"):
        apply(module, with_positions(groups, [1, 2, torch.nan, torch.nan], ids=[5, 6, 77]), h_ND)
    assert apply(module, with_positions(groups, [1, 2, torch.nan, 4]), h_ND).documents_ND.isfinite().all()


@ordered
def test_the_ranking_feature_must_exist_and_have_an_order(make_config: MakeConfig) -> None:
    with pytest.raises(InputError, match=r"context\.feature: 4: the data set has 4 features"):
        make(make_config(initial_rank="feature", feature=4))
    with pytest.raises(InputError, match=r"context\.feature: 1: this feature is a category"):
        make(make_config(initial_rank="feature", feature=1))


# chunks


def test_a_layer_sees_padding_as_zeros_and_its_mask() -> None:
    seen = []

    def layer(x_MLD: Tensor, mask_ML: Tensor) -> Tensor:
        seen.append((x_MLD.shape[:2], bool((x_MLD[~mask_ML] == 0).all()), bool(x_MLD[mask_ML].all())))
        return x_MLD.cumsum(1) + torch.where(mask_ML, 0.0, torch.nan)[:, :, None]

    x_ND = torch.arange(1.0, 19.0).view(9, 2)
    out_ND = map_lists(layer, x_ND, torch.tensor([0, 4, 4, 5, 9]), quadratic=False)
    expected = torch.cat([part.cumsum(0) for part in x_ND.split([4, 1, 4])])
    assert torch.equal(out_ND, expected)
    assert seen == [((3, 4), True, True)]


# DLCM


def test_dlcm_reads_from_the_last_to_the_first() -> None:
    """The last document of the initial ranking is read first, so other documents cannot change its output o."""
    module = make(DLCMConfig(state=5, units=2))
    assert isinstance(module, DLCM)
    nn.init.zeros_(module.compare.weight)  # the state no longer counts: units are those of o alone
    groups, h_ND = make_lists([4])
    groups = with_positions(groups, [2, 4, 1, 3])
    out = apply(module, groups, h_ND).documents_ND
    h_ND[2] += 1  # the first
    moved = apply(module, groups, h_ND).documents_ND
    torch.testing.assert_close(moved[[0, 1, 3]], out[[0, 1, 3]])
    assert not torch.allclose(moved[2], out[2])
    h_ND[1] += 1  # the last, which all others come after
    assert ((apply(module, groups, h_ND).documents_ND - moved).abs().amax(1) > 1e-6).all()


# GSF


def test_gsf_of_size_one_is_pointwise() -> None:
    module = make(GSFConfig(size=1, hidden=(9,), width=4, activation="elu"))
    groups, h_ND = make_lists([5, 0, 1, 9])
    single = QueryGroups(groups.features_NF, torch.arange(len(h_ND) + 1))
    torch.testing.assert_close(apply(module, groups, h_ND), apply(module, single, h_ND))
    torch.testing.assert_close(apply(module.train(), groups, h_ND), apply(module, single, h_ND))


@pytest.mark.slow
def test_training_of_gsf_is_a_fair_sample_of_all_groups() -> None:
    module = make(GSFConfig(size=2, hidden=(9,), width=4, strides=None, activation="elu"))
    groups, h_ND = make_lists([4, 7])
    expected_ND = apply(module, groups, h_ND).documents_ND  # all ordered pairs
    module.train()
    torch.manual_seed(0)
    samples = torch.stack([apply(module, groups, h_ND).documents_ND.detach() for _ in range(600)])
    error = samples.std(0) / len(samples) ** 0.5
    assert samples.std(0).min() > 0
    assert ((samples.mean(0) - expected_ND) / error).abs().max() < 4.5


def test_gsf_gives_equal_documents_equal_embeddings() -> None:
    module = make(GSFConfig(size=3, hidden=(9,), width=4, strides=2, activation="elu"))
    groups, h_ND = make_lists([12, 5])
    for a, b in ((0, 4), (0, 9), (2, 3), (13, 16), (1, 14)):
        groups.features_NF[b], h_ND[b] = groups.features_NF[a], h_ND[a]
    out = apply(module, groups, h_ND).documents_ND
    for a, b in ((0, 4), (0, 9), (2, 3), (13, 16)):
        torch.testing.assert_close(out[a], out[b])
    assert not torch.allclose(out[1], out[14])  # in another list
    moved, moved_ND, order_N = shuffled(groups, h_ND)
    torch.testing.assert_close(apply(module, moved, moved_ND).documents_ND, out[order_N], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_strides_give_groups_of_distinct_documents_and_all_pairs(size: int) -> None:
    for length in range(1, 40):
        every = _stride_numbers(length, size, None)
        assert set(_stride_numbers(length, size, 4)) <= set(every)
        assert len(set(_stride_numbers(length, size, 4))) == min(4, len(every))
        for stride in every:
            group = {place * stride % length for place in range(size)}
            assert len(group) == min(size, length)
        if size == 2:
            assert every == tuple(range(1, length)) or length == 1


def test_content_keys_distinguish_rows_and_match_equal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 3, (4000, 12), generator=generator).float()
    rows[rows == 2] = torch.nan
    keys = _content_keys(rows)
    distinct = {tuple(-1.0 if v != v else v for v in row) for row in rows.tolist()}
    assert len(keys.unique()) == len(distinct)
    assert torch.equal(_content_keys(rows[7:8]), keys[7:8])
    row = torch.tensor([0.0, torch.nan])
    assert len(_content_keys(torch.stack([row, row.neg()])).unique()) == 1  # -0 is 0, and missing values are equal
    assert len(_content_keys(torch.eye(30)).unique()) == 30  # which column a value is in counts
    assert 0.45 < (keys > 0).double().mean() < 0.55


def test_a_gpu_is_not_asked_which_list_has_no_positions() -> None:
    groups, h_ND = make_lists([2, 0, 2])
    lacking = with_positions(groups, [1, 2, torch.nan, torch.nan])
    with pretending() as device:
        module, there, h_there_ND = make(DLCMConfig(state=3)).to(device), lacking.to(device), h_ND.to(device)
        with counting() as counted, pytest.raises(InputError, match="query group 2 has no positions"):
            apply(module, there, h_there_ND)
        assert counted.counts.waits.total() <= 1  # for the id of the group, once it is known to be refused
