"""Masked language modelling: a slow loop, the frequencies of the draws, and what its encoder must be."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from token_batches import VOCABULARY, text_config, text_encoder, text_groups, text_transform

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.cross_encoder import Pairs
from ltrscale.models.encoders import MLPConfig
from ltrscale.pretext.augment import ZeroingConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.pretext.reconstruct import MaskedLanguageConfig, _hide, _masked_language, _TokenDecoder
from ltrscale.training.auxiliary import AuxiliaryConfig
from ltrscale.training.pretrain import PretrainConfig


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pretrainer(**settings: float) -> Pretrainer:
    torch.manual_seed(0)
    transform, config = text_transform(), MaskedLanguageConfig.model_validate(settings)
    network = NetworkConfig(transform=transform.config, encoder=text_config())
    return Pretrainer(transform, network, config, ZeroingConfig())


def test_hiding_has_the_frequencies_of_the_paper() -> None:
    pairs = text_encoder(max_tokens=40).pairs(text_groups([40] * 200))
    ids_T, rows_M, _ = _hide(pairs, VOCABULARY, generator(), rate=0.15)
    hidden_T = torch.zeros_like(pairs.text_T).index_fill(0, rows_M, True)
    assert not hidden_T[~pairs.text_T].any()
    assert torch.equal(ids_T[~hidden_T], pairs.ids_T[~hidden_T])

    def near(found: torch.Tensor, share: float) -> None:
        assert abs(float(found.double().mean()) - share) < 4 * math.sqrt(share * (1 - share) / len(found))

    near(hidden_T[pairs.text_T], 0.15)
    became_M, was_M = ids_T[rows_M], pairs.ids_T[rows_M]
    near(became_M == VOCABULARY.mask, 0.8 + 0.1 / VOCABULARY.size)
    near(became_M == was_M, 0.1 + 0.1 / VOCABULARY.size)
    random_M = became_M[(became_M != VOCABULARY.mask) & (became_M != was_M)]
    counts_V = torch.bincount(random_M, minlength=VOCABULARY.size).double()
    assert counts_V[VOCABULARY.mask] == 0  # it would count as [MASK]
    assert counts_V[5:].min() > 0.5 * counts_V[5:].mean()


@torch.no_grad()
def test_the_loss_equals_a_loop_over_documents_and_tokens() -> None:
    encoder, groups = text_encoder(), text_groups()
    torch.manual_seed(3)
    decoder, pairs = _TokenDecoder(8, VOCABULARY.size), encoder.pairs(groups)
    losses_M, _ = _masked_language(encoder, decoder, pairs, generator(), rate=0.3)
    ids_T, rows_M, _ = _hide(pairs, VOCABULARY, generator(), rate=0.3)
    expected = []
    for n in range(groups.n_documents):
        first, last = pairs.offsets_N1[[n, n + 1]].tolist()
        h_TD = encoder.bert(ids_T[first:last], pairs.types_T[first:last], torch.tensor([0, last - first]))
        for row in range(first, last):
            if row in rows_M.tolist():
                h_D = F.layer_norm(F.gelu(decoder.dense(h_TD[row - first])), [8])
                logits = [float(h_D @ encoder.bert.tokens.weight[v] + decoder.bias[v]) for v in range(VOCABULARY.size)]
                right = logits[int(pairs.ids_T[row])]
                expected.append(math.log(sum(math.exp(logit) for logit in logits)) - right)
    assert len(expected) > 20
    torch.testing.assert_close(losses_M, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_embedding_learns_as_input_and_as_output() -> None:
    model = pretrainer(rate=0.5)
    loss, count = model(text_groups(), generator())
    loss.backward()
    assert count == len(_hide(model.encoder.pairs(text_groups()), VOCABULARY, generator(), rate=0.5)[1])  # type: ignore[operator]
    gradient = model.encoder.get_parameter("bert.tokens.weight").grad
    assert gradient is not None
    assert gradient.any(1).all()  # every token, also those that are nowhere: as outputs they are wrong answers
    for name in ("bert.layers.0.qkv.weight", "bert.positions.weight"):
        assert model.encoder.get_parameter(name).grad is not None


@pytest.mark.slow
def test_it_learns() -> None:
    """A text that repeats two tokens is restored."""
    model, groups = pretrainer(rate=0.3), text_groups()
    for tokens in (*groups.query_tokens.values(), *groups.document_tokens.values()):
        tokens.ids_T.copy_(torch.arange(len(tokens.ids_T)) % 2 + 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    values = []
    for step in range(60):
        loss, count = model(groups, generator(step))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        values.append(loss.item() / count)
    assert sum(values[-5:]) / 5 < 1.2 < values[0]


def test_nothing_hidden_counts_nothing() -> None:
    groups = text_groups().select(torch.tensor([], dtype=torch.int64))
    loss, count = pretrainer()(groups, generator())
    assert (loss.item(), count) == (0, 0)


def test_features_play_no_part() -> None:
    model, groups = pretrainer(), text_groups()
    other = QueryGroups(groups.features_NF + 1, *[getattr(groups, name) for name in groups.__slots__[1:]])
    assert torch.equal(model(groups, generator())[0], model(other, generator())[0])


@pytest.mark.parametrize("text", [True, False])
def test_an_objective_and_an_encoder_of_different_kinds_are_refused(text: bool) -> None:
    network = NetworkConfig(encoder=text_config() if text else MLPConfig())
    method = SimCLRRankConfig() if text else MaskedLanguageConfig()
    message = "simclr_rank learns from features" if text else "masked_language learns from text"
    with pytest.raises(ValueError, match=message):
        Pretrainer(text_transform(), network, method, ZeroingConfig())
    with pytest.raises(ValidationError, match=message):
        PretrainConfig(network=network, method=method)


def test_it_may_be_an_auxiliary_objective() -> None:
    assert AuxiliaryConfig(method=MaskedLanguageConfig()).method.reads_tokens


@pytest.mark.slow
def test_a_gpu_hides_the_same_tokens_and_is_asked_for_nothing() -> None:
    model, groups = pretrainer(rate=0.4), text_groups()
    pairs = text_encoder().pairs(groups)
    expected_T, expected_M, _ = _hide(pairs, VOCABULARY, generator(), rate=0.4)
    loss, count = model.eval()(groups, generator())
    with pretending() as device:
        there = Pairs(*(values.to(device) for values in pairs))
        found_T, rows_M, there_M = _hide(there, VOCABULARY, generator(), rate=0.4)
        moved = groups.to(device)
        model.to(device)
        with counting() as counted:
            loss_there, count_there = model(moved, generator())
            loss_there.backward()
    assert not counted.counts.waits
    assert torch.equal(found_T.cpu(), expected_T)
    there_M = there_M.cpu()
    assert len(there_M) > there_M.sum() == len(expected_M)
    assert rows_M.cpu()[there_M].tolist() == expected_M.tolist()
    assert count_there.cpu() == count
    torch.testing.assert_close(loss_there.detach().cpu(), loss.detach())
