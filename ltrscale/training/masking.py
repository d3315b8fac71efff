"""The features that pretraining masks in the views: those that the config names, and those that identify a document."""

from collections.abc import Sequence

from ltrscale.data.dataset.split import Selection
from ltrscale.data.dataset.summaries import UniqueInGroup, identifying
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import spread
from ltrscale.models.features import Kind
from ltrscale.pretext.mask import MaskConfig
from ltrscale.progress import log

_DOCUMENTS = 200_000


def masked_features(config: MaskConfig, selection: Selection, kinds: Sequence[Kind]) -> MaskConfig:
    """The same mask with the rate of every masked feature under its name, so that nothing is left to find out.

    The features that identify a document are found in a sample of the groups that are read, not in the manifests, which
    may be older than the count, and speak of other periods too. They are logged, with their shares and rates.

    Args:
        config: the settings.
        selection: all groups of the training split.
        kinds: kind of each feature for the network.

    Raises:
        InputError: as `MaskConfig.rates`, or a file is missing or damaged.
    """
    names = [feature.name for feature in selection.features]
    found, suspects = identifying(selection.features, unique_in_group(selection))
    rates = dict(zip(names, config.rates(kinds, names, found), strict=True))
    for name, share in found.items():
        log.info(
            "pretraining: %s identifies a document within its group (unique for %.0f%% of documents); "
            "the views mask it at a rate of %g",
            *(name, 100 * share, rates[name]),
        )
    for name, share in suspects.items():
        if not rates[name]:
            log.warning(
                "pretraining: %s may identify a document within its group (a whole number, unique for %.0f%% of "
                "documents); if it is an id, leave it out, prepare it as categorical, or set pretrain.mask.columns",
                *(name, 100 * share),
            )
    return MaskConfig(identifying=0, columns={name: rate for name, rate in rates.items() if rate})


def unique_in_group(selection: Selection) -> list[float | None]:
    """The shares of `UniqueInGroup` for each feature, in a sample of row groups that is spread over a selection.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    unique = UniqueInGroup(len(selection.features))
    for groups in iterate(spread(selection, documents=_DOCUMENTS)):
        unique.add(groups.features_NF.numpy(), groups.offsets_Q1.numpy())
    return unique.shares()
