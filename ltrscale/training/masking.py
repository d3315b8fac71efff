"""The features that pretraining masks in the views: those that the config names, and those that identify a document."""

from collections.abc import Sequence

from ltrscale.data.dataset.selection import Selection
from ltrscale.data.dataset.summaries import UniqueInGroup, identifying
from ltrscale.data.stream.batches import iterate
from ltrscale.data.stream.parts import Part, Run, cut_into_parts, run_here, spread
from ltrscale.models.features import FeatureKind
from ltrscale.pretext.augment import MaskConfig
from ltrscale.progress import log

_DOCUMENTS = 200_000


def masked_features(
    config: MaskConfig, selection: Selection, kinds: Sequence[FeatureKind], *, run: Run = run_here
) -> MaskConfig:
    """The same mask with the rate of every masked feature under its name, so that nothing is left to find out.

    The features that identify a document are found in a sample of the groups that are read, not in the manifests, which
    speak of other periods too. They are logged, with their shares and rates.

    Args:
        config: the settings.
        selection: all groups of the training split.
        kinds: kind of each feature for the network.
        run: as for `unique_in_group`.

    Raises:
        InputError: as `MaskConfig.rates`, or a file is missing or damaged.
    """
    names = [feature.name for feature in selection.features]
    found, suspects = identifying(selection.features, unique_in_group(selection, run=run))
    rates = dict(zip(names, config.rates(kinds, names, found), strict=True))
    for name, share in found.items():
        log.info(
            "pretraining: %s is unique within its query for %.0f%% of the documents, which would make the contrast too "
            "easy; %s",
            *(name, 100 * share),
            f"the views hide it at a rate of {rates[name]:g}, so nothing needs doing"
            if rates[name]
            else "pretrain.mask lets the views show it; set pretrain.mask.identifying=0.8 to hide it",
        )
    for name, share in suspects.items():
        if not rates[name]:
            log.warning(
                "pretraining: %s is a whole number, unique within its query for %.0f%% of the documents; if it is an "
                "id, leave it out, or hide it with pretrain.mask.columns={%s: 1}; if it is a quantity, such as a count "
                "or a rank, nothing needs doing",
                *(name, 100 * share, name),
            )
    return MaskConfig(identifying=0, columns={name: rate for name, rate in rates.items() if rate})


def unique_in_group(selection: Selection, *, run: Run = run_here) -> list[float | None]:
    """The shares of `UniqueInGroup` for each feature, in a sample of row groups that is spread over a selection.

    Args:
        selection: all groups of the training split.
        run: reads the data, here or in tasks of a Ray cluster; the shares do not depend on the choice.

    Raises:
        InputError: a file is missing, damaged, or does not hold what the manifest lists.
    """
    unique = UniqueInGroup(len(selection.features))
    for of_part in run(_unique, cut_into_parts(spread(selection, documents=_DOCUMENTS))):
        unique.merge(of_part)
    return unique.shares()


def _unique(part: Part) -> UniqueInGroup:
    unique = UniqueInGroup(len(part.selection.features))
    for groups in iterate(part.selection):
        unique.add(groups.features_NF.numpy(), groups.offsets_Q1.numpy())
    return unique
