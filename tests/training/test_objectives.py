"""The groups that each loss counts, and the loss of a ranker with them."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ltrscale.batch import QueryGroups
from ltrscale.errors import InputError
from ltrscale.models.attention import RankFormerConfig
from ltrscale.models.encoders import IdentityConfig
from ltrscale.models.features import TransformConfig, fit_transform
from ltrscale.models.ranker import Architecture, HeadConfig, MeanRanker, Ranker
from ltrscale.ranking import losses
from ltrscale.ranking.clicks import dla_propensity_loss, dla_ranking_loss
from ltrscale.ranking.loss import Scored
from ltrscale.ranking.loss_choices import LossConfig
from ltrscale.training.finetune import FinetuneConfig
from ltrscale.training.ranking import ListLossConfig, RankingObjective

LABELS = torch.tensor([0.0, 2, 1, 0, 1, 1, 0, 0, 0, 3])
OFFSETS = torch.tensor([0, 4, 6, 9, 10])  # pairs; equal and relevant; nothing relevant; one relevant document alone
PAIRS, RELEVANT, ALL = [0], [0, 1, 3], [0, 1, 2, 3]


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(3)


COUNTED = {
    "sigmoid": ALL,
    "squared_error": ALL,
    "ranknet": PAIRS,
    "hinge": PAIRS,
    "lambdarank": PAIRS,
    "softmax": RELEVANT,
    "softmax_negatives": PAIRS,
    "attention_allocation": PAIRS,
    "list_net": PAIRS,
    "list_mle": PAIRS,
    "approx_ndcg": RELEVANT,
    "gumbel_approx_ndcg": RELEVANT,
    "neural_sort_ndcg": RELEVANT,
    "gumbel_neural_sort_ndcg": RELEVANT,
    "pirank": RELEVANT,
}


def loss_config(kind: str, **parameters: object) -> LossConfig:
    config: LossConfig = TypeAdapter(LossConfig).validate_python({"kind": kind, **parameters})
    return config


def groups() -> QueryGroups:
    x_NF = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    return QueryGroups(x_NF, OFFSETS, LABELS)


@pytest.mark.parametrize("kind", COUNTED)
def test_a_mean_counts_the_groups_that_have_something_to_learn(kind: str) -> None:
    config = loss_config(kind)
    scores_N = torch.randn(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss_Q = config.losses(Scored(scores_N, LABELS, OFFSETS, None, noise()))
    defined_Q = config.counted(LABELS, OFFSETS)
    assert defined_Q.nonzero()[:, 0].tolist() == COUNTED[kind]
    assert not loss_Q[~defined_Q].any()
    assert loss_Q[0] > 0


def ranker(**parts: object) -> Ranker:
    torch.manual_seed(0)
    config = TransformConfig(numeric="standard")
    transform = fit_transform([groups().features_NF], ["numeric"] * 3, config)
    values = {"transform": config, "encoder": IdentityConfig(), "head": HeadConfig(layers=1), **parts}
    return Ranker(Architecture.model_validate(values), transform)


def objective(config: FinetuneConfig, batch: QueryGroups, **parts: object) -> tuple[Tensor, float]:
    model = RankingObjective(ranker(**parts).eval(), config, config.list_loss)
    total, count = model(batch, noise())
    return total, count


@pytest.mark.parametrize("kind", COUNTED)
def test_in_bfloat16_a_loss_is_that_of_its_scores(kind: str) -> None:
    config = FinetuneConfig(loss=loss_config(kind))
    model = RankingObjective(ranker().eval(), config)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = model(groups(), noise())
        scores_N = model.ranker(groups())
    assert scores_N.dtype == torch.bfloat16
    torch.testing.assert_close(total, config.loss.losses(Scored(scores_N, LABELS, OFFSETS, None, noise())).sum())
    total.backward()


def test_lists_without_relevance_train_the_list_head() -> None:
    parts = {"context": RankFormerConfig(dropout=0.0), "grades": 2}
    list_loss = ListLossConfig(alpha=0.5, grades=2)
    config = FinetuneConfig(list_loss=list_loss, context=RankFormerConfig(), loss=loss_config("softmax"))
    total, count = objective(config, groups(), **parts)
    assert count == 4
    model = ranker(**parts).eval()
    scores_N, grades_QC = model.score(groups())[:2]
    assert grades_QC is not None
    expected_Q = losses.softmax(scores_N, LABELS, OFFSETS)
    expected_Q = expected_Q + 0.5 * losses.ordinal(grades_QC, torch.tensor([2.0, 1, 0, 3]))
    torch.testing.assert_close(total, expected_Q.sum())


def test_weights_come_from_the_data_are_cut_and_default_to_one() -> None:
    weights_N = torch.tensor([1.0, 9, 2, 1, 3, 1, 1, 1, 1, torch.nan])
    batch = QueryGroups(groups().features_NF, OFFSETS, LABELS, weights_N=weights_N)
    config = FinetuneConfig.model_validate({"loss": {"kind": "softmax"}, "debias": {"kind": "weights", "clip": 4}})
    total, _ = objective(config, batch)
    cut_N = torch.tensor([1.0, 4, 2, 1, 3, 1, 1, 1, 1, 1])
    expected_Q = losses.softmax(ranker().eval()(batch), LABELS, OFFSETS, weights_N=cut_N)
    torch.testing.assert_close(total, expected_Q.sum())
    with pytest.raises(InputError, match="no `weights` column"):
        objective(config, groups())


def test_the_dual_learning_algorithm_trains_propensities_and_needs_positions() -> None:
    config = FinetuneConfig.model_validate({"loss": {"kind": "softmax"}, "debias": {"kind": "dla", "positions": 3}})
    positions_N = torch.tensor([1.0, 2, 3, 4, 1, 2, 1, 2, 3, 1])
    batch = QueryGroups(groups().features_NF, OFFSETS, LABELS, positions_N=positions_N)
    model = RankingObjective(ranker(), config)
    total, count = model(batch, noise())
    assert count == 3  # groups with a click
    total.backward()
    assert model.propensity is not None
    (weights,) = (p for name, p in model.ranker.named_parameters() if name.endswith("weight"))
    for parameter in (weights, model.propensity.later):
        assert parameter.grad is not None
        assert parameter.grad.any()
    with pytest.raises(InputError, match="no `positions` column"):
        objective(config, groups())


def test_the_dual_learning_algorithm_takes_refined_labels_as_they_are() -> None:
    config = FinetuneConfig.model_validate({"loss": {"kind": "softmax"}, "debias": {"kind": "dla", "positions": 3}})
    positions_N = torch.tensor([1.0, 2, 3, 4, 1, 2, 1, 2, 3, 1])
    refined_N = torch.tensor([0.9, 0.05, 0.04, 0.01, 0.7, 0.3, 0.2, 0.2, 0.6, 1])  # none is 0
    batch = QueryGroups(groups().features_NF, OFFSETS, refined_N, positions_N=positions_N)
    model = RankingObjective(ranker().eval(), config)
    total, count = model(batch, noise())
    assert count == 4
    scores_N, logits_N = model.ranker(batch), torch.zeros(10)
    expected_Q = dla_ranking_loss(scores_N, refined_N, OFFSETS, examination_logits_N=logits_N, clip=10)
    expected_Q = expected_Q + dla_propensity_loss(
        logits_N, refined_N, OFFSETS, positions_N=positions_N, scores_N=scores_N, clip=10
    )
    torch.testing.assert_close(total, expected_Q.sum())


def test_an_empty_list_adds_nothing_to_the_list_loss() -> None:
    parts = {"context": RankFormerConfig(dropout=0.0), "grades": 2}
    config = FinetuneConfig(list_loss=ListLossConfig(grades=2), context=RankFormerConfig(), loss=loss_config("softmax"))
    with_empty = QueryGroups(groups().features_NF, torch.tensor([0, 0, 4, 6, 9, 10, 10]), LABELS)
    (total, count), (expected, expected_count) = (objective(config, b, **parts) for b in (with_empty, groups()))
    torch.testing.assert_close(total, expected)
    assert count == expected_count == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"debias": {"kind": "weights"}, "loss": {"kind": "lambdarank"}}, "lambdarank takes no document weights"),
        ({"debias": {"kind": "dla"}, "loss": {"kind": "sigmoid"}}, "defined for the softmax loss, not sigmoid"),
        ({"head_epochs": 0, "epochs": 0}, "nothing would be trained"),
        ({"list_loss": {}}, "list_loss needs a context that embeds lists: set context.kind to rankformer"),
        ({"list_loss": {}, "context": {"kind": "dasalc"}}, "set context.kind to rankformer"),
        (
            {"list_loss": {}, "context": {"kind": "rankformer"}, "relevant_only": True},
            "list_loss also learns from lists without a relevant document",
        ),
        ({"validation_metric": "ndcg"}, "validation_metric"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FinetuneConfig.model_validate(settings)


def test_the_parts_of_a_mean_learn_as_if_each_were_alone() -> None:
    parts = [ranker(head=HeadConfig(layers=2)) for _ in range(3)]
    for part in parts[1:]:
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter)
    config, expected, values = FinetuneConfig(loss=loss_config("softmax")), [], []
    for part in parts:
        loss, count = RankingObjective(part, config)(groups(), noise())
        values.append(loss.item())
        expected += torch.autograd.grad(loss, list(part.parameters()))
    assert len(set(values)) == 3
    loss, counted = RankingObjective(MeanRanker(parts), config)(groups(), noise())
    assert counted == count == len(RELEVANT)
    assert loss.item() == pytest.approx(sum(values) / 3)
    together = torch.autograd.grad(loss, [p for part in parts for p in part.parameters()])
    for mine, alone in zip(together, expected, strict=True):
        torch.testing.assert_close(3 * mine, alone)
