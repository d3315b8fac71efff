"""What a network takes from the data and from files before it is trained.

From the data come the feature transform, what views mask and draw, and of texts the token fields and the vocabulary.
Initial weights of a transformer may be at any URL, in Hugging Face's format: `config.json` and `model.safetensors` of a
BERT. Nothing is downloaded and nothing is unpickled.

Shapes: S sampled documents, F features.
"""

import copy
import json
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ltrscale import storage
from ltrscale.batch import group_index, rows_of
from ltrscale.cache import newest
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.dataset.summaries import UniqueInGroup, identifying
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, Run, parts_of, run_here, spread
from ltrscale.errors import InputError
from ltrscale.models.bert import bert_config, bert_weights
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.cross_encoder import CrossEncoder, CrossEncoderConfig, TokenNumbers
from ltrscale.models.features import FeatureKind, FeatureTransform, expected_sharing, make_transform, sharing, wanted
from ltrscale.models.fitting import FeatureStatistics, Sample, Wanted
from ltrscale.models.layers import Encoder, EncoderSettings
from ltrscale.origin import digest, is_current, made_by
from ltrscale.pretext.augment import MaskConfig
from ltrscale.progress import log, progress

_TENSORS = "tensors.safetensors"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_DOCUMENTS, _DOCS_PER_BATCH = 200_000, 8192
_FIT_BYTES = 32 << 20
_fits: dict[Hashable, FeatureTransform] = {}
"""The transforms that this process fitted last, by their origin: a search trains many networks on one split. Those of
more than `_FIT_BYTES`, which have large vocabularies, are not kept."""


def fit(selection: Selection, config: NetworkConfig, *, run: Run = run_here) -> FeatureTransform:
    """Fit the feature transform on all documents of a training split, in one streaming pass.

    Unlabelled groups count too, because no label is needed. So a baseline without pretraining gets the same transform
    as a pretrained network.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    kinds = [feature.kind for feature in selection.features]
    needed = wanted(kinds, config.transform, bins=config.numbers.fitted_bins, documents=selection.n_documents)
    statistics, parts = FeatureStatistics(needed), [*parts_of(selection)]
    with progress("feature statistics", selection.n_documents) as advance:
        for part, of_part in zip(parts, run(partial(_statistics_of_part, needed), parts), strict=True):
            statistics.merge(of_part)
            advance(part.documents)
    for column in statistics.hashed:
        codes_V, rows = torch.from_numpy(statistics.seen[column].codes()), config.transform.hash_rows
        log.info(
            "%s: %s different codes are hashed into %s rows; %.1f%% of them share a row with another one (expected "
            "%.1f%%)",
            *(selection.features[column].name, f"{len(codes_V):,}", f"{rows:,}", 100 * sharing(codes_V, rows)),
            100 * expected_sharing(len(codes_V), rows),
        )
    return make_transform(statistics, config.transform, bins=config.numbers.fitted_bins)


def _statistics_of_part(needed: Wanted, part: Part) -> FeatureStatistics:
    statistics = FeatureStatistics(needed)
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        statistics.add(part.first + statistics.documents, groups.features_NF.numpy())
    return statistics


def fitted(selection: Selection, config: NetworkConfig, url: str, *, run: Run = run_here) -> FeatureTransform:
    """The transform of `fit`, kept in a committed directory, from which a resumed run reads it.

    A process that has fitted the same transform to the same data does not read the data again.
    """
    bins = {"bins": str(config.numbers.fitted_bins)} if config.numbers.fitted_bins else {}
    origin = made_by("transform", config.transform, {"train": selection.hash, **bins})
    if is_current(url, origin):
        try:
            data = storage.read_verified(url, _TENSORS, storage.read_manifest(url) or {})
            log.info("%s: made before with the same settings and data; read from there", url)
            return FeatureTransform.from_state(safetensors.torch.load(data), config.transform)
        except InputError as error:
            log.warning("%s; making it again", error)
    key = digest(origin)
    if key in _fits:
        log.info("feature statistics: those of an earlier network on the same data")
    transform = newest(_fits, key, lambda: fit(selection, config, run=run))
    if sum(values.nbytes for values in transform.state_dict().values()) > _FIT_BYTES:
        del _fits[key]
    else:
        transform = copy.deepcopy(transform)  # training may change it
    with storage.Commit(url) as commit:
        with commit.file(_TENSORS) as path:
            safetensors.torch.save_file(transform.state_dict(), path)
        commit.finish({"made_by": origin})
    return transform


def sample_inputs(
    selection: Selection, transform: FeatureTransform, *, size: int = 4096, run: Run = run_here
) -> Tensor:
    """A uniform sample of a training split's documents after the transform, shape [S, F].

    The columns of the sample are the features' marginals. The sample depends only on the documents and their order.
    """
    sample, parts = Sample(size, selection.n_documents), [*parts_of(selection)]
    with progress("feature marginals", selection.n_documents) as advance:
        of_parts = run(partial(_sample_of_part, transform, size, selection.n_documents), parts)
        for part, of_part in zip(parts, of_parts, strict=True):
            sample.merge(of_part)
            advance(part.documents)
    return torch.from_numpy(sample.rows_MF())


def _sample_of_part(transform: FeatureTransform, size: int, documents: int, part: Part) -> Sample:
    """The sampled documents of a part; transforms whole groups, because `per_query` needs all documents of a group."""
    sample, first = Sample(size, documents), part.first
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        numbers_N = np.arange(first, first + groups.n_documents)
        chosen_N = torch.from_numpy(sample.chosen(numbers_N))
        rows, offsets_M1 = rows_of(groups.offsets_Q1, torch.unique(group_index(groups.offsets_Q1)[chosen_N]))
        sample.add(numbers_N[rows.numpy()], transform(groups.features_NF[rows], offsets_M1).numpy())
        first += groups.n_documents
    return sample


def masked_features(
    config: MaskConfig,
    selection: Selection,
    kinds: Sequence[FeatureKind],
    *,
    where: str = "pretrain.mask",
    run: Run = run_here,
) -> MaskConfig:
    """The same mask, which `where` names in the config, with an explicit rate for every masked feature.

    Features that identify a document are detected in a sample of the groups read, because manifests also cover other
    periods. They are logged with their shares and rates.
    """
    unique = UniqueInGroup(len(selection.features))
    for of_part in run(_unique_of_part, parts_of(spread(selection, documents=_DOCUMENTS))):
        unique.merge(of_part)
    names = [feature.name for feature in selection.features]
    identified, suspects = identifying(selection.features, unique.shares())
    rates = dict(zip(names, config.rates(kinds, names, identified, where=where), strict=True))
    for name, share in identified.items():
        log.info(
            "pretraining: %s is unique within its query for %.0f%% of the documents, which would make the contrast too "
            "easy; %s",
            *(name, 100 * share),
            f"the views hide it at a rate of {rates[name]:g}, so nothing needs doing"
            if rates[name]
            else f"{where} lets the views show it; set {where}.identifying=0.8 to hide it",
        )
    for name, share in suspects.items():
        if not rates[name] and name not in config.columns:  # no warning if the user has set 0
            log.warning(
                "pretraining: %s is a whole number, unique within its query for %.0f%% of the documents; if it is an "
                "id, leave it out, or hide it with %s.columns={%s: 1}; if it is a quantity, such as a count "
                "or a rank, nothing needs doing, and a rate of 0 there says so",
                *(name, 100 * share, where, name),
            )
    return MaskConfig(identifying=0, columns={name: rate for name, rate in rates.items() if rate})


def _unique_of_part(part: Part) -> UniqueInGroup:
    unique = UniqueInGroup(len(part.selection.features))
    for groups in iterate(part.selection):
        unique.add(groups.features_NF.numpy(), groups.offsets_Q1.numpy())
    return unique


def with_tokens(selection: Selection, encoder: EncoderSettings) -> Selection:
    """The same groups with the token fields that the encoder reads."""
    fields = encoder.reads_tokens
    return selection.reading(query=fields.query, document=fields.document) if any(fields) else selection


def fitted_to(network: NetworkConfig, selection: Selection) -> NetworkConfig:
    """The network with the vocabulary of the data and the sizes of its initial weights, if any.

    Raises:
        InputError: the data have no vocabulary or one that differs from the config, the vocabulary lacks a special
            token, or the initial weights are of another architecture or of fewer tokens.
    """
    encoder = network.encoder
    if not isinstance(encoder, CrossEncoderConfig):
        return network
    with_tokens(selection, encoder)  # raises if a field is missing
    vocabulary = _vocabulary(selection)
    if network.initial is not None:
        bert = encoder.bert
        path = storage.join(network.initial, _CONFIG)
        sizes, rows = bert_config(_json_object(path), where=path, dropout=bert.dropout, pooler=bert.pooler)
        if rows < vocabulary.size:
            raise InputError(
                f"{path}: its vocabulary has {rows:,} tokens, and that of the data {vocabulary.size:,}; prepare the "
                "data with the vocabulary of these weights"
            )
        if encoder.max_tokens > sizes.positions:
            raise InputError(
                f"{path}: has {sizes.positions} positions, and network.encoder.max_tokens is {encoder.max_tokens}; "
                "lower it"
            )
        encoder, vocabulary = encoder.replace(bert=sizes), vocabulary.replace(size=rows)
    if encoder.vocabulary not in (None, vocabulary):
        raise InputError("network.encoder.vocabulary is not that of the data; leave it empty")
    return network.replace(encoder=encoder.replace(vocabulary=vocabulary))


def _vocabulary(selection: Selection) -> TokenNumbers:
    vocabulary = selection.vocabulary
    assert vocabulary is not None  # the selection has token fields
    for name in ("cls", "sep", "mask"):
        if name not in vocabulary.special:
            raise InputError(f"the vocabulary of the data has no special token {name!r}; prepare the data with one")
    special = {name: vocabulary.special[name] for name in ("cls", "sep", "mask")}
    return TokenNumbers(size=vocabulary.size, sha256=vocabulary.sha256, **special)


def load_initial(encoder: Encoder, initial: str | None) -> None:
    """Load the initial weights of an encoder's transformer, if any; other parts keep their random ones.

    Raises:
        InputError: a file is missing or damaged, or a tensor is missing, unexpected or of another shape.
    """
    if initial is None:
        return
    assert isinstance(encoder, CrossEncoder)
    path = storage.join(initial, _WEIGHTS)
    try:
        tensors = safetensors.torch.load(storage.read_bytes(path))
    except SafetensorError as error:
        raise InputError(f"{path}: no safetensors ({error}); copy it again") from error
    bert = encoder.bert
    bert.load_state_dict(bert_weights(tensors, bert.config, bert.tokens.num_embeddings, where=path))


def _json_object(path: str) -> dict[str, object]:
    try:
        values = json.loads(storage.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no JSON ({error}); copy it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: no JSON object; copy it again")
    return values
