"""The feature transform of a network, fitted to all documents of a training split before pretraining or finetuning."""

import copy
from collections.abc import Hashable
from functools import partial

import safetensors.torch
import torch
from torch import Tensor

from ltrscale import storage
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, Run, parts_of, run_here
from ltrscale.errors import InputError
from ltrscale.late import newest
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform, expected_sharing, make_transform, sharing, wanted
from ltrscale.models.fitting import FeatureStatistics, Wanted
from ltrscale.origin import digest, is_current, made_by
from ltrscale.progress import log, progress

_TENSORS = "tensors.safetensors"
_DOCS_PER_BATCH = 8192
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
        _log_sharing(selection.features[column].name, torch.from_numpy(statistics.seen[column].codes()), config)
    return make_transform(statistics, config.transform, bins=config.numbers.fitted_bins)


def _log_sharing(name: str, codes_V: Tensor, config: NetworkConfig) -> None:
    rows = config.transform.hash_rows
    log.info(
        "%s: %s different codes are hashed into %s rows; %.1f%% of them share a row with another one (expected %.1f%%)",
        *(name, f"{len(codes_V):,}", f"{rows:,}", 100 * sharing(codes_V, rows)),
        100 * expected_sharing(len(codes_V), rows),
    )


def _statistics_of_part(needed: Wanted, part: Part) -> FeatureStatistics:
    statistics = FeatureStatistics(needed)
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        statistics.add(part.first + statistics.documents, groups.features_NF.numpy())
    return statistics


def fitted(selection: Selection, config: NetworkConfig, url: str, *, run: Run = run_here) -> FeatureTransform:
    """The transform of `fit`, kept in a committed directory, from which a resumed run reads it.

    A process that has fitted the same transform to the same data does not read the data again.

    Raises:
        InputError: as `fit`, or the directory cannot be written.
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
