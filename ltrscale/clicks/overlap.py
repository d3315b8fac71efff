"""Do positions overlap: were documents of a query shown at several positions, and do they link all positions?

Where each document keeps its position, any clicks fit any propensities: what one position loses in examination its
documents can gain in relevance. Propensities relative to each other are determined exactly within positions that a
chain of documents shown at several of them connects (Hager, Zoeter and de Rijke 2025, ICTIR, on two-tower models: swaps
across positions, or features that overlap across them).

Shapes: D pairs, P positions, M cells.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.clicks.sessions import Cells


@dataclass(frozen=True, eq=False)
class Overlap:
    """How positions overlap."""

    pairs: int
    """Pairs of query and document."""
    several: int
    """Those that were shown at several positions."""
    impressions: float
    """Share of what was shown that shows such a pair."""
    seen_P: Bools
    """Positions at which something was shown."""
    links_PP: Ints
    """Pairs shown at both positions; 0 on the diagonal."""
    linked_PP: Bools
    """Whether so many pairs link them that it counts, and these have clicks at both."""

    @property
    def parts(self) -> list[list[int]]:
        """The positions, from 1, in parts that no link connects; the first part has the first position shown."""
        _, part_P = connected_components(csr_array(self.linked_PP), directed=False)
        seen = np.flatnonzero(self.seen_P)
        return [(seen[part_P[seen] == part] + 1).tolist() for part in dict.fromkeys(part_P[seen].tolist())]

    @property
    def connected(self) -> bool:
        """Whether propensities of all positions can be told, relative to the first."""
        return len(self.parts) == 1 and int(self.seen_P.sum()) > 1


def overlap(cells: Cells, positions: int, *, pairs_per_link: int) -> Overlap:
    """How the positions of some cells overlap.

    Args:
        cells: with positions from 0 as places.
        positions: P.
        pairs_per_link: the fewest pairs shown at both of two positions that link them.

    Example:
        >>> cells = Cells(np.array([0, 0, 1]), np.array([0, 1, 2]), np.ones(3), np.ones(3))
        >>> found = overlap(cells, 3, pairs_per_link=1)
        >>> found.pairs, found.several, found.parts
        (2, 1, [[1, 2], [3]])
    """
    shown_M, several_M = cells.shown_M, cells.several_M
    shown_DP, rate_DP = dense(cells.keep(several_M), positions)
    there_DP = (shown_DP > 0).astype(np.float64)
    links_PP = (there_DP.T @ there_DP).astype(np.int64)
    np.fill_diagonal(links_PP, 0)
    clicked_PP = rate_DP.T @ there_DP
    return Overlap(
        pairs=len(np.unique(cells.pair_M)),
        several=len(shown_DP),
        impressions=float(shown_M[several_M].sum() / max(shown_M.sum(), 1)),
        seen_P=cells.by_place(positions)[0] > 0,
        links_PP=links_PP,
        linked_PP=(links_PP >= pairs_per_link) & (clicked_PP > 0) & (clicked_PP.T > 0),
    )


def dense(cells: Cells, positions: int) -> tuple[Doubles, Doubles]:
    """How often each pair was shown at each position, and the share of clicks, 0 where it was not; shapes [D, P].

    Only pairs that have a cell get a row.
    """
    pairs_D, row_M = np.unique(cells.pair_M, return_inverse=True)
    shown_DP, rate_DP = np.zeros((2, len(pairs_D), positions))
    shown_DP[row_M, cells.place_M] = cells.shown_M
    rate_DP[row_M, cells.place_M] = cells.clicked_M / cells.shown_M
    return shown_DP, rate_DP
