"""Laws of the in-context network and of the readings of examples."""

import pytest
import torch
from torch import Tensor

from ltrscale.batch import QueryGroups, to_offsets
from ltrscale.errors import InputError
from ltrscale.models.examples import InContextRanker, ReadingConfig, _learn, drawn_samples
from ltrscale.models.in_context import (
    InContextNetwork,
    InContextSizes,
    _ExampleAttention,
    _functions_of,
    _Scale,
    loss_of_layers,
)
from ltrscale.simulate.problems import ProblemsConfig, problems

ALL = ReadingConfig()


def network(layers: int = 3) -> InContextNetwork:
    torch.manual_seed(0)
    return InContextNetwork(InContextSizes(token=16, state=8, shown=4, heads=2, layers=layers)).eval()


def groups(*lengths: int, features: int = 5, seed: int = 1) -> QueryGroups:
    """Lists with labels; some features have ties."""
    generator = torch.Generator().manual_seed(seed)
    x_NF = torch.randn(sum(lengths), features, generator=generator)
    x_NF[:, ::2] = x_NF[:, ::2].round(decimals=1)
    labels_N = torch.randint(3, (len(x_NF),), generator=generator).float()
    return QueryGroups(x_NF, to_offsets(torch.tensor(lengths)), labels_N)


EXAMPLES, LISTS = groups(4, 6, 3, 5), groups(5, 3, 8, seed=2)


def scores(examples: QueryGroups = EXAMPLES, lists: QueryGroups = LISTS, layers: int = 3) -> Tensor:
    return InContextRanker(network(layers), drawn_samples(examples, ALL))(lists)


def with_features(of: QueryGroups, x_NF: Tensor) -> QueryGroups:
    return QueryGroups(x_NF, of.offsets_Q1, of.labels_N)


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


def differ(one: Tensor, other: Tensor) -> None:
    assert (one - other).abs().max() > 1e-2


def test_labels_of_the_lists_to_rank_do_not_exist() -> None:
    bare = QueryGroups(LISTS.features_NF, LISTS.offsets_Q1)
    torch.testing.assert_close(scores(lists=bare), scores(), rtol=0, atol=0)


def test_labels_of_examples_count() -> None:
    assert EXAMPLES.labels_N is not None
    differ(scores(QueryGroups(EXAMPLES.features_NF, EXAMPLES.offsets_Q1, EXAMPLES.labels_N.flip(0))), scores())


def test_a_score_does_not_depend_on_other_lists() -> None:
    alone = [scores(lists=LISTS.select(torch.tensor([q]))) for q in range(3)]
    same(torch.cat(alone), scores())
    other_way = scores(lists=LISTS.select(torch.tensor([2, 0, 1, 0])))
    same(other_way, torch.cat([alone[2], alone[0], alone[1], alone[0]]))


def test_a_score_does_not_depend_on_how_many_lists_come_before() -> None:
    many = LISTS.select(torch.arange(3000) % 3)
    same(scores(lists=many).view(1000, 16)[-1], scores())


def test_documents_take_their_scores_along() -> None:
    turned = QueryGroups(LISTS.features_NF.flip(0), to_offsets(LISTS.lengths_Q.flip(0)))
    same(scores(lists=turned).flip(0), scores())


def test_the_order_of_features_lists_and_examples_does_not_matter() -> None:
    order_F = torch.tensor([3, 1, 4, 0, 2])
    one, other = (with_features(part, part.features_NF[:, order_F]) for part in (EXAMPLES, LISTS))
    same(scores(one, other), scores())
    same(scores(EXAMPLES.select(torch.tensor([2, 0, 3, 1]))), scores())
    assert EXAMPLES.labels_N is not None
    turned = QueryGroups(
        EXAMPLES.features_NF.flip(0), to_offsets(EXAMPLES.lengths_Q.flip(0)), EXAMPLES.labels_N.flip(0)
    )
    same(scores(turned), scores())


def test_units_and_origins_of_features_do_not_matter() -> None:
    factor_F, shift_F = torch.tensor([8.0, 0.5, 1e6, 1e-6, 1.0]), torch.tensor([0.0, 16.0, -3e5, 0.0, 4.0])
    one, other = (with_features(part, part.features_NF * factor_F + shift_F) for part in (EXAMPLES, LISTS))
    torch.testing.assert_close(scores(one, other), scores(), rtol=0, atol=2e-2)  # float32 rounds what is shifted


def test_features_that_are_constant_among_examples_change_nothing() -> None:
    def more(part: QueryGroups, x_N: Tensor) -> QueryGroups:
        return with_features(part, torch.cat([part.features_NF, x_N[:, None]], 1))

    constant = more(EXAMPLES, torch.full((18,), 0.1)), more(LISTS, torch.arange(16.0))
    torch.testing.assert_close(scores(*constant), scores(), rtol=0, atol=0)
    missing = more(EXAMPLES, torch.full((18,), torch.nan)), more(LISTS, torch.arange(16.0))
    torch.testing.assert_close(scores(*missing), scores(), rtol=0, atol=0)
    differ(scores(more(EXAMPLES, torch.arange(18.0)), more(LISTS, torch.arange(16.0))), scores())


def test_a_missing_value_counts_as_the_median_of_the_examples() -> None:
    x_NF, y_NF = EXAMPLES.features_NF.clone(), LISTS.features_NF.clone()
    x_NF[:3, 1], y_NF[4, 1] = torch.nan, torch.nan
    median = x_NF[3:, 1].median()
    filled = [torch.where(part.isnan(), median, part) for part in (x_NF, y_NF)]
    expected = scores(with_features(EXAMPLES, filled[0]), with_features(LISTS, filled[1]))
    torch.testing.assert_close(scores(with_features(EXAMPLES, x_NF), with_features(LISTS, y_NF)), expected)


def test_an_example_does_not_read_its_own_list() -> None:
    torch.manual_seed(0)
    attention, normal_BND, keys_BMA = _ExampleAttention(8), torch.randn(1, 5, 8), torch.randn(1, 5, 32)
    list_N = torch.tensor([0, 0, 1, 1, 1])
    own_NM = list_N[:, None] == list_N
    values_BMD = torch.randn(1, 5, 8)
    added_BND = attention(normal_BND, keys_BMA, values_BMD, own_NM)
    changed_BND = attention(normal_BND, keys_BMA, values_BMD + (list_N == 0)[:, None], own_NM)
    torch.testing.assert_close(changed_BND[:, :2], added_BND[:, :2], rtol=0, atol=0)
    differ(changed_BND[:, 2:], added_BND[:, 2:])
    alone_BND = attention(normal_BND, keys_BMA, values_BMD, torch.ones(5, 5, dtype=torch.bool))
    torch.testing.assert_close(alone_BND, attention.out.bias.expand(1, 5, 8))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9,), (2, 1), (1, 1, 1, 1), (3, 0, 4)])
def test_few_short_and_empty_lists_have_scores(lengths: tuple[int, ...]) -> None:
    examples = groups(*lengths)
    examples = QueryGroups(examples.features_NF, examples.offsets_Q1, torch.ones(sum(lengths)))
    made = scores(examples, groups(1, 0, 6, 0))
    assert made.isfinite().all()
    assert made[0] == 0
    differ(made[1:], torch.zeros(6))
    assert scores(examples, groups(0, 0)).shape == (0,)
    assert scores(examples, QueryGroups(torch.zeros(0, 5), torch.tensor([0]))).shape == (0,)


def test_examples_that_teach_nothing_are_refused() -> None:
    zeros = QueryGroups(EXAMPLES.features_NF, EXAMPLES.offsets_Q1, torch.zeros(18))
    with pytest.raises(InputError, match="no labelled group has a relevant document"):
        scores(zeros)
    with pytest.raises(InputError, match="no labelled group has a relevant document"):
        _learn(network(), zeros)
    with pytest.raises(InputError, match="no numeric feature has two different values"):
        scores(with_features(EXAMPLES, torch.ones(18, 5)))


def test_functions_of_a_feature_match_their_definition() -> None:
    examples, lists = groups(7, 4, features=1), groups(6, features=1, seed=5)
    x_M, x_N = examples.features_NF[:, 0].double(), lists.features_NF[:, 0].double()
    scale = _Scale.from_examples(x_M[None, :, None], examples.offsets_Q1)
    got_NK = _functions_of(x_N[None, :, None], lists.offsets_Q1, scale)[0, :, 0]

    def plain(x: Tensor, own_L: Tensor) -> list[Tensor]:
        def share(value: Tensor) -> Tensor:
            return ((x_M < value).double().mean() + (x_M <= value).double().mean()) / 2

        u, u_L = share(x), torch.stack([share(value) for value in own_L])
        hats = [(1 - 3 * (u - k / 3).abs()).clamp(min=0) for k in range(4)]
        rank = ((u_L < u).double().mean() + (u_L <= u).double().mean()) / 2
        z = (x - x_M.mean()) / x_M.std(correction=0)
        within = (x - own_L.mean()) / own_L.std(correction=0)
        return [*hats, z.clamp(-4, 4), within.clamp(-3, 3), 12**0.5 * (rank - 0.5)]

    def table(x: Tensor, own_L: Tensor) -> Tensor:
        return torch.stack([torch.stack(plain(value, own_L)) for value in x])

    centre_K = torch.cat([table(x_M[:7], x_M[:7]), table(x_M[7:], x_M[7:])]).mean(0)
    torch.testing.assert_close(got_NK, table(x_N, x_N) - centre_K)


def test_samples_fit_are_seeded_and_keep_a_relevant_document() -> None:
    x_NF = torch.arange(300.0)[:, None]
    labels_N = torch.zeros(300)
    labels_N[250] = 1  # the only relevant document, in the last of the lists
    examples = QueryGroups(x_NF, to_offsets(torch.tensor([30, 50, 5, 15, 80, 20, 40, 60])), labels_N)
    config = ReadingConfig(samples=5, documents=60, longest=12)
    made = drawn_samples(examples, config)
    assert len(made) == 5
    for part in made:
        assert part.n_documents <= 60
        assert part.lengths_Q.max() <= 12
        assert part.labels_N is not None
        assert part.labels_N.sum() == 1
        assert len(set(part.features_NF[:, 0].tolist())) == part.n_documents
        assert part.features_NF[part.labels_N > 0].item() == 250
    again, other = drawn_samples(examples, config), drawn_samples(examples, config.model_copy(update={"seed": 1}))
    assert all(one.features_NF.equal(two.features_NF) for one, two in zip(made, again, strict=True))
    assert not all(one.features_NF.equal(two.features_NF) for one, two in zip(made, other, strict=True))
    assert len({tuple(part.features_NF[:, 0].tolist()) for part in made}) == 5
    assert drawn_samples(examples, ReadingConfig(longest=80)) == [examples]


def test_several_readings_are_averaged() -> None:
    config = ReadingConfig(samples=3, documents=12)
    rankers = [InContextRanker(network(), [part]) for part in drawn_samples(EXAMPLES, config)]
    assert len(rankers) == 3
    mean = torch.stack([ranker(LISTS) for ranker in rankers]).mean(0)
    same(InContextRanker(network(), drawn_samples(EXAMPLES, config))(LISTS), mean)


@pytest.mark.slow
def test_pretraining_on_problems_teaches_to_read_examples() -> None:
    config = ProblemsConfig(examples=(8, 12), questions=8, features=(4, 6), documents=(160, 200), values=6_000)
    net = network(layers=2).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)

    def loss(number: int, *, shuffled: bool = False) -> Tensor:
        made = problems(config, seed=0, number=number)
        x_BNF, labels_BN, offsets_Q1, read = made.features_BNF, made.labels_BN, made.offsets_Q1, made.n_read
        example_labels_BM = labels_BN[:, :read].roll(1, 0) if shuffled else labels_BN[:, :read]
        reading = net.read(x_BNF[:, :read], example_labels_BM, offsets_Q1[: made.n_examples + 1])
        asked_Q1 = offsets_Q1[made.n_examples :] - read
        return loss_of_layers(net(reading, x_BNF[:, read:], asked_Q1), labels_BN[:, read:], asked_Q1)

    for step in range(50):
        optimizer.zero_grad()
        loss(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        held_out = torch.stack([loss(number) for number in range(1000, 1010)]).mean()
        foreign = torch.stack([loss(number, shuffled=True) for number in range(1000, 1010)]).mean()
    assert held_out < -0.1
    assert held_out < foreign - 0.1
