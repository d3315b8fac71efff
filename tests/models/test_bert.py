"""BERT over ragged sequences: transformers' BertModel as oracle, and the laws of ragged batches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ltrscale.batch import to_offsets
from ltrscale.errors import InputError
from ltrscale.models import bert as bert_module
from ltrscale.models.bert import Bert, BertConfig, _ragged_attention, _Sequences, bert_config, bert_weights

SIZES = {"layers": 2, "width": 16, "heads": 4, "positions": 40}
LENGTHS = [5, 1, 17, 5, 40, 2, 9]


def sequences(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens and types, and offsets; token 0 is padding to transformers, and gets no gradient there."""
    generator = torch.Generator().manual_seed(seed)
    offsets_S1 = to_offsets(torch.tensor(lengths))
    ids_T = torch.randint(1, 50, (sum(lengths),), generator=generator)
    return ids_T, torch.randint(0, 2, (sum(lengths),), generator=generator), offsets_S1


def make(**settings: Any) -> Bert:
    """A small BERT in inference mode whose biases and norms are not at their initial values."""
    torch.manual_seed(0)
    bert = Bert(BertConfig.model_validate({**SIZES, **settings}), vocabulary=50)
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return bert.eval()


def theirs(pooler: bool = False) -> Any:
    """A tiny BertModel of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=40,
    )
    torch.manual_seed(1)
    model = transformers.BertModel(config, add_pooling_layer=pooler).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("pooler", ["cls", "tanh"])
def test_equals_transformers(pooler: Any) -> None:
    model = theirs(pooler == "tanh")
    config, vocabulary = bert_config(model.config.to_dict(), where="config.json", dropout=0.1, pooler=pooler)
    ours = Bert(config, vocabulary).eval()
    ours.load_state_dict(bert_weights(model.state_dict(), config, vocabulary, where="model"))
    ids_T, types_T, offsets_S1 = sequences(LENGTHS)
    h_TD = ours(ids_T, types_T, offsets_S1)
    pooled_SD = ours.pool(h_TD, offsets_S1)
    for s, (first, last) in enumerate(zip(offsets_S1[:-1].tolist(), offsets_S1[1:].tolist(), strict=True)):
        expected = model(ids_T[None, first:last], token_type_ids=types_T[None, first:last])
        torch.testing.assert_close(h_TD[first:last], expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)
        if pooler == "tanh":
            torch.testing.assert_close(pooled_SD[s], expected.pooler_output[0], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(pooled_SD[s], h_TD[first])


@pytest.mark.slow
def test_gradients_equal_those_of_transformers_on_a_padded_batch() -> None:
    model = theirs()
    config, vocabulary = bert_config(model.config.to_dict(), where="config.json", dropout=0.0, pooler="cls")
    ours = Bert(config, vocabulary)
    ours.load_state_dict(bert_weights(model.state_dict(), config, vocabulary, where="model"))
    ids_T, types_T, offsets_S1 = sequences(LENGTHS)
    ours(ids_T, types_T, offsets_S1).square().sum().backward()
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = torch.zeros(2, *mask.shape, dtype=torch.int64)
    padded[0][mask], padded[1][mask] = ids_T, types_T
    h_SLD = model(padded[0], token_type_ids=padded[1], attention_mask=mask.long()).last_hidden_state
    h_SLD[mask].square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    expected = bert_weights(grads, config, vocabulary, where="gradients")
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)


def test_a_sequence_does_not_depend_on_the_others_nor_on_their_order() -> None:
    bert = make()
    ids_T, types_T, offsets_S1 = sequences(LENGTHS)
    h_TD = bert(ids_T, types_T, offsets_S1)
    for first, last in zip(offsets_S1[:-1].tolist(), offsets_S1[1:].tolist(), strict=True):
        alone = bert(ids_T[first:last], types_T[first:last], torch.tensor([0, last - first]))
        torch.testing.assert_close(alone, h_TD[first:last], rtol=1e-5, atol=1e-5)
    order = [6, 0, 2, 5, 1, 4, 3]
    rows = torch.cat([torch.arange(int(offsets_S1[s]), int(offsets_S1[s + 1])) for s in order])
    permuted = bert(ids_T[rows], types_T[rows], to_offsets(offsets_S1.diff()[order]))
    torch.testing.assert_close(permuted, h_TD[rows], rtol=1e-5, atol=1e-5)


def test_position_and_type_of_a_token_matter() -> None:
    bert = make()
    ids_T, types_T, offsets_S1 = sequences([6])
    h_TD = bert(ids_T, types_T, offsets_S1)
    assert not torch.allclose(bert(ids_T.flip(0), types_T.flip(0), offsets_S1).flip(0), h_TD)
    assert not torch.allclose(bert(ids_T, 1 - types_T, offsets_S1), h_TD)


@pytest.mark.parametrize("budget", [1, 60, 2**18])
def test_attention_does_not_depend_on_buckets(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over sequences and heads, for buckets of one sequence, of several, and of all."""
    monkeypatch.setattr(bert_module, "PAIRS_PER_CHUNK", budget)
    offsets_S1 = to_offsets(torch.tensor([3, 0, 1, 7, 3]))
    qkv_T3HE = torch.randn(14, 3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out_THE, (q, k, v) = _ragged_attention(qkv_T3HE, _Sequences(offsets_S1)), qkv_T3HE.unbind(1)
    for first, last in zip(offsets_S1[:-1].tolist(), offsets_S1[1:].tolist(), strict=True):
        for head in range(2):
            scores = q[first:last, head] @ k[first:last, head].T / 5**0.5
            torch.testing.assert_close(out_THE[first:last, head], scores.softmax(1) @ v[first:last, head])


def test_no_sequences_give_no_embeddings_and_keep_gradients_defined() -> None:
    bert = make()
    none = torch.zeros(0, dtype=torch.int64)
    h_TD = bert(none, none, torch.tensor([0]))
    assert h_TD.shape == (0, 16)
    assert bert.pool(h_TD, torch.tensor([0])).shape == (0, 16)
    h_TD.sum().backward()


def test_dropout_in_training_only() -> None:
    bert, batch = make(dropout=0.5), sequences(LENGTHS)
    assert torch.equal(bert(*batch), bert(*batch))
    bert.train()
    assert not torch.equal(bert(*batch), bert(*batch))


def test_the_path_for_gpus_gets_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU's kernel is called with, by a stand-in with its signature that computes on the CPU."""
    from torch.nn.attention import varlen

    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, other: Tensor, longest: int, most: int, **_: Any
    ) -> Tensor:
        assert bounds.dtype == other.dtype == torch.int32
        assert longest == most == int(bounds.diff().max())
        cut = [x.split(bounds.diff().tolist()) for x in (q, k, v)]
        parts = [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in of)) for of in zip(*cut, strict=True)]
        return torch.cat([part.transpose(0, 1) for part in parts])

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    qkv_T3HE = torch.randn(14, 3, 2, 5)
    there = _Sequences(to_offsets(torch.tensor([3, 1, 7, 3])))
    torch.testing.assert_close(bert_module._on_gpu(*qkv_T3HE.unbind(1), there), _ragged_attention(qkv_T3HE, there))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="attention over ragged sequences needs a GPU")
def test_attention_on_a_gpu_equals_that_of_buckets() -> None:
    qkv_T3HE = torch.randn(200, 3, 2, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    there = _Sequences(to_offsets(torch.tensor([3, 1, 96, 100], device="cuda")))
    half = _ragged_attention(qkv_T3HE.bfloat16(), there)
    torch.testing.assert_close(half.float(), _ragged_attention(qkv_T3HE, there), rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.layer.1.output.dense.weight": None}, "'encoder.layer.1.output.dense.weight' is missing"),
        (
            {"encoder.layer.2.output.dense.weight": torch.zeros(1)},
            "'encoder.layer.2.output.dense.weight' is unexpected",
        ),
        ({"embeddings.LayerNorm.bias": torch.zeros(3)}, r"'embeddings.LayerNorm.bias' has shape \[3\]"),
    ],
)
def test_a_wrong_tensor_is_named(change: dict[str, Tensor | None], message: str) -> None:
    model = theirs()
    config, vocabulary = bert_config(model.config.to_dict(), where="config.json", dropout=0.1, pooler="cls")
    tensors = {name: tensor for name, tensor in {**model.state_dict(), **change}.items() if tensor is not None}
    with pytest.raises(InputError, match=f"m.safetensors: tensor {message}"):
        bert_weights(tensors, config, vocabulary, where="m.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
)
def test_another_architecture_is_refused(change: dict[str, Any], message: str) -> None:
    values = {**theirs().config.to_dict(), **change}
    with pytest.raises(InputError, match=f"^c.json: {message}"):
        bert_config(values, where="c.json", dropout=0.1, pooler="cls")


def test_weights_of_other_tasks_load_without_their_heads() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    for task in (transformers.BertForMaskedLM, transformers.BertForSequenceClassification):
        model = task(config)
        ours, vocabulary = bert_config(model.config.to_dict(), where="config.json", dropout=0.1, pooler="cls")
        state = bert_weights(model.state_dict(), ours, vocabulary, where="model")
        Bert(ours, vocabulary).load_state_dict(state)
        assert torch.equal(state["tokens.weight"], model.bert.embeddings.word_embeddings.weight)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="5 does not divide the width 16"):
        BertConfig(width=16, heads=5)
