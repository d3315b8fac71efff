"""What augmentation needs to know of the data: which features to mask, and the features' marginals.

Shapes: S sampled documents, F features.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ltrscale.batch import group_index, rows_of
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.dataset.summaries import UniqueInGroup, identifying
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.plan import Part, Run, parts_of, run_here, spread
from ltrscale.models.features import FeatureKind, FeatureTransform
from ltrscale.models.fitting import Sample
from ltrscale.pretext.augment import MaskConfig
from ltrscale.progress import log, progress

_DOCUMENTS, _DOCS_PER_BATCH = 200_000, 8192


def sample_inputs(
    selection: Selection, transform: FeatureTransform, *, size: int = 4096, run: Run = run_here
) -> Tensor:
    """A uniform sample of a training split's documents after the transform, shape [S, F].

    The columns of the sample are the features' marginals. The sample depends only on the documents and their order.

    Raises:
        InputError: as `transform.fit`.
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

    Raises:
        InputError: as `MaskConfig.rates`, or a file is missing or damaged.
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
