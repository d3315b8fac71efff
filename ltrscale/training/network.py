"""The network that pretraining and finetuning share: feature transform and encoder, built the same way for both."""

from collections.abc import Callable
from functools import partial

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from ltrscale import storage
from ltrscale.batch import group_index, rows_of
from ltrscale.config import is_current, made_by
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, Run, cut_into_parts, run_here
from ltrscale.errors import InputError, UnavailableError
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.features import FeatureTransform, make_transform, wanted
from ltrscale.models.fitting import FeatureStatistics, Sample, Wanted
from ltrscale.progress import log, progress

_DOCS_PER_BATCH = 8192
_TENSORS = "tensors.safetensors"


def fit(selection: Selection, config: NetworkConfig, *, run: Run = run_here) -> FeatureTransform:
    """Fit the feature transform on all documents of a training split, in one streaming pass.

    Unlabelled groups count too: a feature's distribution needs no label. So a baseline without pretraining gets the
    same transform as a pretrained network.

    Args:
        selection: all groups of the training split.
        config: its `transform` is fitted.
        run: reads the data, here or in tasks of a Ray cluster; the transform does not depend on the choice.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    kinds = [feature.kind for feature in selection.features]
    needed = wanted(kinds, config.transform, documents=selection.n_documents)
    statistics, parts = FeatureStatistics(needed), cut_into_parts(selection)
    with progress("feature statistics", selection.n_documents) as advance:
        for part, of_part in zip(parts, run(partial(_statistics, needed), parts), strict=True):
            statistics.merge(of_part)
            advance(part.documents)
    return make_transform(statistics, config.transform)


def _statistics(needed: Wanted, part: Part) -> FeatureStatistics:
    statistics = FeatureStatistics(needed)
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        statistics.add(part.first + statistics.documents, groups.features_NF.numpy())
    return statistics


def sample_inputs(
    selection: Selection, transform: FeatureTransform, *, size: int = 4096, run: Run = run_here
) -> Tensor:
    """A uniform sample of a training split's documents after the transform, shape [S, F].

    The columns of the sample are the features' marginals. The sample depends only on the documents and their order.

    Args:
        selection: all groups of the training split.
        transform: a fitted one.
        size: number of documents, S.
        run: as for `fit`.

    Raises:
        InputError: as `fit`.
    """
    sample, parts = Sample(size, selection.n_documents), cut_into_parts(selection)
    with progress("feature marginals", selection.n_documents) as advance:
        of_parts = run(partial(_sampled, transform, size, selection.n_documents), parts)
        for part, of_part in zip(parts, of_parts, strict=True):
            sample.merge(of_part)
            advance(part.documents)
    return torch.from_numpy(sample.rows_MF())


def _sampled(transform: FeatureTransform, size: int, documents: int, part: Part) -> Sample:
    """The sampled documents of a part.

    Transforms only groups with a sampled document, but these whole: `per_query` needs all documents of a group.
    """
    sample, first = Sample(size, documents), part.first
    for groups in iterate(part.selection, docs_per_batch=_DOCS_PER_BATCH):
        numbers_N = np.arange(first, first + groups.n_documents)
        chosen_N = torch.from_numpy(sample.chosen(numbers_N))
        rows, offsets_M1 = rows_of(groups.offsets_Q1, torch.unique(group_index(groups.offsets_Q1)[chosen_N]))
        sample.add(numbers_N[rows.numpy()], transform(groups.features_NF[rows], offsets_M1).numpy())
        first += groups.n_documents
    return sample


def fitted(selection: Selection, config: NetworkConfig, url: str, *, run: Run = run_here) -> FeatureTransform:
    """The transform of `fit`, kept in a committed directory, so that a resumed run reads it instead of fitting again.

    Args:
        selection: as for `fit`.
        config: as for `fit`.
        url: the directory; the caller deletes it when it is no longer needed.
        run: as for `fit`.

    Raises:
        InputError: as `fit`, or the directory cannot be written.
    """
    origin = made_by("transform", config.transform, {"train": selection.hash})
    state = _kept(url, origin, lambda: fit(selection, config, run=run).state_dict())
    return FeatureTransform.from_state(state, config.transform)


def _kept(url: str, origin: dict[str, object], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of this origin: read from the directory if they are committed there, otherwise made and committed."""
    if is_current(url, origin):
        try:
            data = storage.read_verified(url, _TENSORS, storage.read_manifest(url) or {})
            log.info("%s: made before with the same settings and data; read from there", url)
            return safetensors.torch.load(data)
        except UnavailableError:  # the directory may be undamaged, and the new one could not be written either
            raise
        except InputError as error:
            log.warning("%s; making it again", error)
    tensors = make()
    with storage.Commit(url) as commit:
        with commit.file(_TENSORS) as path:
            safetensors.torch.save_file(tensors, path)
        commit.finish({"made_by": origin})
    return tensors


def state_on_cpu(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's weights and buffers that later training does not touch."""
    return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}
