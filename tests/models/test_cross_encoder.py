"""The cross-encoder: sequences by a loop, the laws of encoders of text, and a ranker around it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from token_batches import (
    VOCABULARY,
    embedded,
    lists_of,
    text_config,
    text_encoder,
    text_groups,
    text_transform,
)

from jobs.bench.pretend import counting, pretending
from ltrscale.batch import QueryGroups
from ltrscale.errors import InputError
from ltrscale.models import cross_encoder
from ltrscale.models.cross_encoder import CrossEncoderConfig, _pairs_of
from ltrscale.models.features import TransformConfig
from ltrscale.models.layers import depths
from ltrscale.models.ranker import Architecture, HeadConfig, Ranker


def slow_pairs(groups: QueryGroups, config: CrossEncoderConfig) -> list[tuple[list[int], list[int], list[bool]]]:
    """Tokens, types and "is text" of each document, one document at a time, cutting the last field first."""
    pairs = []
    for q, (first, last) in enumerate(
        zip(groups.offsets_Q1[:-1].tolist(), groups.offsets_Q1[1:].tolist(), strict=True)
    ):
        for n in range(first, last):
            fields = [(0, lists_of(groups.query_tokens[name])[q]) for name in config.query]
            fields += [(1, lists_of(groups.document_tokens[name])[n]) for name in config.document]
            while sum(len(tokens) for _, tokens in fields) + len(fields) + 1 > config.max_tokens:
                next(tokens for _, tokens in reversed(fields) if tokens).pop()
            ids, types, text = [VOCABULARY.cls], [0], [False]
            for kind, tokens in fields:
                ids += [*tokens, VOCABULARY.sep]
                types += [kind] * (len(tokens) + 1)
                text += [True] * len(tokens) + [False]
            pairs.append((ids, types, text))
    return pairs


@pytest.mark.parametrize("max_tokens", [5, 8, 16, 40])
@pytest.mark.parametrize("document", [["title", "body"], ["body"], ["body", "title"]])
def test_sequences_equal_those_of_a_loop(max_tokens: int, document: list[str]) -> None:
    config, groups = text_config(max_tokens=max_tokens, document=document), text_groups()
    pairs, expected = _pairs_of(groups, config), slow_pairs(groups, config)
    lengths = pairs.offsets_N1.diff().tolist()
    found = zip(*(part.split(lengths) for part in (pairs.ids_T, pairs.types_T, pairs.text_T)), strict=True)
    assert [tuple(part.tolist() for part in parts) for parts in found] == expected
    assert max(lengths) <= max_tokens


def test_a_document_depends_on_its_query_and_itself_alone() -> None:
    encoder, groups = text_encoder().eval(), text_groups()
    whole_ND = embedded(encoder, groups)
    assert whole_ND.shape == (groups.n_documents, encoder.width)
    for q in range(groups.n_groups):
        rows = slice(int(groups.offsets_Q1[q]), int(groups.offsets_Q1[q + 1]))
        torch.testing.assert_close(
            embedded(encoder, groups.select(torch.tensor([q]))), whole_ND[rows], rtol=1e-5, atol=1e-5
        )
    order = torch.tensor([2, 0, 3, 1])
    permuted = groups.select(order)
    expected = torch.cat([whole_ND[int(groups.offsets_Q1[q]) : int(groups.offsets_Q1[q + 1])] for q in order])
    torch.testing.assert_close(embedded(encoder, permuted), expected, rtol=1e-5, atol=1e-5)


def test_the_order_of_documents_in_a_list_does_not_matter() -> None:
    encoder, groups = text_encoder().eval(), text_groups((6,))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    turned = replace(
        groups,
        features_NF=groups.features_NF[order],
        document_tokens={name: tokens.select(order) for name, tokens in groups.document_tokens.items()},
    )
    torch.testing.assert_close(embedded(encoder, turned), embedded(encoder, groups)[order], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 20, 33, 1 << 16])
def test_parts_at_inference_change_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, groups = text_encoder().eval(), text_groups()
    whole_ND = embedded(encoder, groups)
    monkeypatch.setattr(cross_encoder, "TOKENS_AT_ONCE", at_once)
    with torch.no_grad():
        torch.testing.assert_close(embedded(encoder, groups), whole_ND, rtol=1e-5, atol=1e-5)
        none = groups.select(torch.tensor([], dtype=torch.int64))
        assert embedded(encoder, none).shape == (0, encoder.width)


def test_a_batch_without_documents_trains() -> None:
    encoder = text_encoder().train()
    none = text_groups().select(torch.tensor([], dtype=torch.int64))
    h_ND = embedded(encoder, none)
    assert h_ND.shape == (0, encoder.width)
    h_ND.sum().backward()


def test_every_field_feature_and_parameter_has_a_part() -> None:
    encoder, groups = (
        text_encoder(bert={"layers": 1, "width": 8, "heads": 2, "positions": 16, "dropout": 0.0, "pooler": "tanh"}),
        text_groups(),
    )
    whole_ND = embedded(encoder, groups)
    whole_ND.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    for name in ("query_tokens", "document_tokens"):
        for field, tokens in getattr(groups, name).items():
            other = replace(tokens, ids_T=(tokens.ids_T - 4) % 55 + 5)
            changed = replace(groups, **{name: {**getattr(groups, name), field: other}})
            assert not torch.allclose(embedded(encoder, changed), whole_ND), field
    for column in range(4):
        x_NF = groups.features_NF.clone()
        x_NF[:, column] = (x_NF[:, column] + 1) % 3
        assert not torch.allclose(embedded(encoder, replace(groups, features_NF=x_NF)), whole_ND), column


def test_without_features_the_text_alone_counts() -> None:
    encoder, groups = text_encoder(features=None), text_groups()
    assert encoder.width == 8
    changed = replace(groups, features_NF=groups.features_NF + 1)
    assert torch.equal(embedded(encoder, changed), embedded(encoder, groups))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 12},
        {"features": [7]},
        {"embedding": 2},
        {"document": ["body", "title"]},
        {"bert": {"layers": 1, "width": 8, "heads": 2, "positions": 40, "dropout": 0.0}},
        {"bert": {"layers": 2, "width": 8, "heads": 4, "positions": 40, "dropout": 0.0}},
        {"bert": {"layers": 2, "width": 8, "heads": 2, "positions": 40, "dropout": 0.0, "feedforward": 9}},
        {"bert": {"layers": 2, "width": 8, "heads": 2, "positions": 40, "dropout": 0.0, "epsilon": 0.1}},
        {"bert": {"layers": 2, "width": 8, "heads": 2, "positions": 40, "dropout": 0.0, "pooler": "tanh"}},
        {"bert": {"layers": 2, "width": 8, "heads": 2, "positions": 40, "dropout": 0.5}},
    ],
    ids=str,
)
def test_every_key_of_the_config_means_something(change: dict[str, Any]) -> None:
    plain, other = (embedded(text_encoder(**settings).train(), text_groups()) for settings in ({}, change))
    assert plain.shape != other.shape or not torch.allclose(plain, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 41}, "max_tokens: 41 is above bert.positions, 40"),
        ({"max_tokens": 4}, "max_tokens: 4 leaves no room for text beside 4 specials"),
        ({"document": ["query"]}, "named twice"),
        ({"vocabulary": {"size": 3, "cls": 1, "sep": 2, "mask": 3}}, "special token is not below the size"),
        ({"query": []}, "at least 1 item"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        text_config(**change)


def test_a_missing_token_field_is_named() -> None:
    encoder, groups = text_encoder(), text_groups()
    without = replace(groups, document_tokens={"title": groups.document_tokens["title"]})
    with pytest.raises(InputError, match=r"field 'body' of the documents, and the data has \['title'\]"):
        embedded(encoder, without)
    with pytest.raises(InputError, match="field 'query' of the query, and the data has none"):
        embedded(encoder, replace(groups, query_tokens={}))
    with pytest.raises(InputError, match="vocabulary is empty"):
        text_config(vocabulary=None).build(torch.ones(1, dtype=torch.bool), [])


def test_layers_have_depths_from_the_embeddings_up() -> None:
    encoder = text_encoder()
    layers = depths(encoder)
    ids = [id(parameter) for layer in layers for parameter in layer]
    assert sorted(ids) == sorted(map(id, encoder.parameters()))
    assert len(layers) == 1 + 2 + 1  # embeddings, two layers of BERT, one of the features
    first = {id(p) for p in (encoder.bert.tokens.weight, encoder.bert.positions.weight, encoder.bert.norm.weight)}
    assert first <= set(map(id, layers[0]))
    assert id(encoder.bert.layers[1].qkv.weight) in map(id, layers[2])


def test_a_ranker_scores_with_it() -> None:
    architecture = Architecture(transform=TransformConfig(numeric="standard"), encoder=text_config(), head=HeadConfig())
    torch.manual_seed(0)
    ranker, groups = Ranker(architecture, text_transform()).eval(), text_groups()
    scores_N = ranker(groups)
    assert scores_N.shape == (groups.n_documents,)
    torch.testing.assert_close(ranker.head[:-1](embedded(ranker.encoder, groups)), ranker.penultimate(groups))  # type: ignore[arg-type]
    scores_N.sum().backward()
    assert ranker.encoder.get_parameter("bert.tokens.weight").grad is not None


@pytest.mark.slow
def test_a_gpu_gives_the_same_embeddings_and_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_encoder, "TOKENS_AT_ONCE", 40)
    encoder, launches = text_encoder(), []
    for lengths in ([5, 1, 6, 4] * 2, [5, 1, 6, 4] * 6):
        encoder.zero_grad()
        groups = text_groups(lengths)
        x_NF = text_transform()(groups.features_NF)
        expected_ND = encoder.cpu().embed(x_NF, groups)
        with pretending() as device:
            there, x_there_NF = groups.to(device), x_NF.to(device)
            encoder.to(device)
            with counting() as counted:
                found_ND = encoder.embed(x_there_NF, there)
                found_ND.sum().backward()
            with counting() as at_inference, torch.no_grad():
                in_parts_ND = encoder.embed(x_there_NF, there)
        assert not counted.counts.waits | at_inference.counts.waits
        launches.append(counted.counts.launches)
        torch.testing.assert_close(found_ND.detach().cpu(), expected_ND)
        torch.testing.assert_close(in_parts_ND.cpu(), expected_ND.detach())
    assert launches[1] < 1.3 * launches[0]
