"""Memory for query groups that every epoch serves anew: few labelled groups, scattered over many others.

An epoch that reads some hundred labelled groups out of a large data set spends most of its time reading what it skips.
"""

from ltrscale.data.dataset.selection import RowGroup, Selection
from ltrscale.data.stream.windows import Decoder, Window


class Memory:
    """The served groups of the row groups that were read so far, decoded: what is there need not be read again.

    It holds copies of these groups alone. The order of an epoch, its batches and its account are the same with and
    without it. One worker fills it, in any order; all epochs and phases of a run may share it.

    Args:
        selection: the selection whose groups it holds.
    """

    def __init__(self, selection: Selection) -> None:
        self.decoder = Decoder(selection)
        self.groups: dict[RowGroup, Window] = {}


def memory_for(selection: Selection, gigabytes: float) -> Memory | None:
    """An empty memory for a selection of labelled groups; None if they may take more, by the manifest's counts.

    Groups without labels are never held: an epoch over all groups reads nothing in vain.
    """
    of_tokens = sum(key.max_tokens for key in selection.tokens if key.of == "document")  # at most
    size = 4 * selection.n_documents * (len(selection.features) + of_tokens)
    return Memory(selection) if selection.labelled and size <= 1e9 * gigabytes else None
