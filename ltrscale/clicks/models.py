"""Sessions, which are shown lists with their clicks, and click models that are fitted to them.

The models: position-based, user browsing, (simplified) dynamic Bayesian, and ratios of clicks as baselines. Each gives
the probability of a click on every shown document: without seeing clicks (`conditional` False), or given the clicks
above (True). It orders the documents of a query by `relevance_D1`. Attractions of pairs with few impressions are drawn
towards the mean of all pairs, which stands for pairs that were not seen.

A pair is a document of a query. Pairs are numbered from 0; D, one past the last, stands for every unseen pair, and -1
for a position without a document.

Shapes: S sessions, C of them with a click, P positions, L positions of the last click with 0 for none, D pairs,
D1 = D + 1 with the one not seen, M cells (a pair at a place), K places.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from ltrscale.arrays import Bools, Doubles, Ints
from ltrscale.progress import log

_TINY = 1e-12
_ROUNDS, _TOLERANCE = 1000, 1e-5


@dataclass(frozen=True, eq=False)
class Sessions:
    """Lists that were shown, position by position; entry p of the second axis is position p + 1."""

    pairs_SP: Ints
    clicks_SP: Bools
    queries_S: Ints
    """The number of each session's query."""
    pairs: int
    """D; numbers of pairs are at most D."""

    def __len__(self) -> int:
        return len(self.pairs_SP)

    @property
    def positions(self) -> int:
        """Number of positions, P."""
        return int(self.pairs_SP.shape[1])

    @property
    def shown_SP(self) -> Bools:
        """Where a document was shown."""
        return self.pairs_SP >= 0

    @property
    def last_SP(self) -> Ints:
        """The position of the last click at or above each position, from 1; 0 for none."""
        places_P = np.arange(1, self.positions + 1)
        return np.asarray(np.maximum.accumulate(np.where(self.clicks_SP, places_P, 0), axis=1))

    @property
    def last_S(self) -> Ints:
        """The position of the last click, from 1; 0 without a click."""
        return self.last_SP[:, -1]

    def take(self, keep_S: Bools) -> "Sessions":
        """Some of the sessions; pairs keep their numbers."""
        return Sessions(self.pairs_SP[keep_S], self.clicks_SP[keep_S], self.queries_S[keep_S], self.pairs)

    def folds_D(self, folds: int) -> Ints:
        """The fold of each pair, from 0: that of its query, so that folds are independent; 0 for an unshown pair."""
        fold_D = np.zeros(self.pairs, np.int64)
        row_M, column_M = np.nonzero(self.shown_SP & (self.pairs_SP < self.pairs))
        fold_D[self.pairs_SP[row_M, column_M]] = self.queries_S[row_M] % folds
        return fold_D


def sums(index_N: Ints, values_N: Doubles | Bools, size: int) -> Doubles:
    """The sum of the values of each index below `size`.

    Example:
        >>> sums(np.array([1, 1]), np.array([0.5, 2.0]), 3).tolist()
        [0.0, 2.5, 0.0]
    """
    return np.asarray(np.bincount(index_N, values_N, size), np.float64)


class Cells(NamedTuple):
    """How often each pair was shown and clicked at each place; a cell that was never shown is left out."""

    pair_M: Ints
    place_M: Ints
    shown_M: Doubles
    clicked_M: Doubles

    def keep(self, keep_M: Bools) -> "Cells":
        """Some of the cells."""
        return Cells(self.pair_M[keep_M], self.place_M[keep_M], self.shown_M[keep_M], self.clicked_M[keep_M])

    @property
    def several_M(self) -> Bools:
        """Cells of pairs that were shown at several places."""
        return np.asarray(np.bincount(self.pair_M)[self.pair_M] > 1) if len(self.pair_M) else np.zeros(0, np.bool_)

    def by_place(self, places: int) -> tuple[Doubles, Doubles]:
        """How often documents were shown and clicked at each place, shapes [K]."""
        return sums(self.place_M, self.shown_M, places), sums(self.place_M, self.clicked_M, places)


def count(sessions: Sessions, place_SP: Ints | None = None) -> Cells:
    """The cells of sessions; the place of a document is its position, from 0, unless it is given.

    Example:
        >>> both = Sessions(np.array([[0, 1], [1, -1]]), np.array([[True, False], [False, False]]), np.zeros(2), 2)
        >>> [column.tolist() for column in count(both)]
        [[0, 1, 1], [0, 0, 1], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    if place_SP is None:
        place_SP = np.broadcast_to(np.arange(sessions.positions), sessions.pairs_SP.shape)
    shown_SP = sessions.shown_SP
    places = int(place_SP.max(initial=0)) + 1
    code_N, cell_N = np.unique(sessions.pairs_SP[shown_SP] * places + place_SP[shown_SP], return_inverse=True)
    shown_M = np.bincount(cell_N, minlength=len(code_N)).astype(np.float64)
    clicked_M = sums(cell_N, sessions.clicks_SP[shown_SP], len(code_N))
    return Cells(code_N // places, code_N % places, shown_M, clicked_M)


class ClickModel(Protocol):
    """A fitted click model."""

    @property
    def relevance_D1(self) -> Doubles | None:
        """What documents of a query are ordered by; None if the model does not know documents."""
        ...

    def probabilities(self, sessions: Sessions, *, conditional: bool) -> Doubles:
        """The probability of a click on each document, shape [S, P]; any number where nothing was shown."""
        ...


def fit_product(cells: Cells, pairs: int, places: int, *, smoothing: float) -> tuple[Doubles, Doubles]:
    """The attraction of pairs [D + 1] and the examination of places [K], whose product is the probability of a click.

    Both are hidden, and fitted by EM.
    With `w = (shown - clicked) / (1 - a e)` misses, `x = clicked + w e (1 - a)` is the expected number of examinations;
    then `e = sum x / sum shown` by place and `a = (sum clicked + s m) / (sum x + s)` by pair, m the mean attraction.
    The maximum determines only the product; `propensity.overlap` says when it determines the shape of the examinations.

    The smoothing s is in examinations. Above 0 it biases examinations: poor documents are drawn up to the mean, so the
    positions where they stand come out too low; at 0 they come out too high, if impressions are few.

    Example:
        >>> cells = Cells(np.array([0, 0]), np.array([0, 1]), np.full(2, 100.0), np.array([50.0, 10.0]))
        >>> attraction_D1, examination_K = fit_product(cells, 1, 2, smoothing=0.0)
        >>> (examination_K * attraction_D1[0]).round(3).tolist()
        [0.5, 0.1]
    """
    pair_M, place_M, shown_M, clicked_M = cells
    clicked_D1, shown_K = sums(pair_M, clicked_M, pairs + 1), sums(place_M, shown_M, places)
    attraction_D1 = np.full(pairs + 1, 0.5)
    ratio_K = _ratio(sums(place_M, clicked_M, places), shown_K)
    examination_K = ratio_K / max(ratio_K.max(initial=0), _TINY)
    for _ in range(_ROUNDS):
        a_M, e_M = attraction_D1[pair_M], examination_K[place_M]
        examined_M = clicked_M + (shown_M - clicked_M) * e_M * (1 - a_M) / np.maximum(1 - a_M * e_M, _TINY)
        attraction_D1 = _smoothed(clicked_D1, sums(pair_M, examined_M, pairs + 1), smoothing)
        before_K, examination_K = examination_K, _ratio(sums(place_M, examined_M, places), shown_K)
        if np.abs(examination_K - before_K).max(initial=0) <= _TOLERANCE * examination_K.max(initial=0):
            break
    else:
        log.warning("clicks: examination times attraction has not converged after %d rounds of EM", _ROUNDS)
    return attraction_D1, examination_K


def _smoothed(clicked_D1: Doubles, examined_D1: Doubles, smoothing: float) -> Doubles:
    """Shares of clicks, drawn towards the share of all; that mean for pairs without an examination."""
    mean = clicked_D1.sum() / max(examined_D1.sum(), _TINY)
    smoothing = max(smoothing, _TINY)
    return np.asarray((clicked_D1 + smoothing * mean) / (examined_D1 + smoothing))


def _ratio(of_K: Doubles, all_K: Doubles) -> Doubles:
    return np.asarray(np.divide(of_K, all_K, out=np.zeros_like(of_K), where=all_K > 0))


@dataclass(frozen=True, eq=False)
class PositionRatio:
    """The share of clicks at each position, whatever is shown there: the baseline of prediction."""

    ratio_P: Doubles
    relevance_D1: ClassVar = None

    @staticmethod
    def fit(sessions: Sessions) -> "PositionRatio":
        """Count clicks by position."""
        shown_P, clicked_P = count(sessions).by_place(sessions.positions)
        return PositionRatio(_ratio(clicked_P, shown_P))

    def probabilities(self, sessions: Sessions, *, conditional: bool) -> Doubles:  # noqa: ARG002
        """The probability of a click on each document, shape [S, P]."""
        return np.broadcast_to(self.ratio_P, sessions.pairs_SP.shape)


@dataclass(frozen=True, eq=False)
class DocumentRatio:
    """The share of clicks on each document of a query, whatever its position: the baseline of order."""

    relevance_D1: Doubles

    @staticmethod
    def fit(sessions: Sessions, *, smoothing: float) -> "DocumentRatio":
        """Count clicks by pair."""
        cells, size = count(sessions), sessions.pairs + 1
        clicked_D1, shown_D1 = (sums(cells.pair_M, c, size) for c in (cells.clicked_M, cells.shown_M))
        return DocumentRatio(_smoothed(clicked_D1, shown_D1, smoothing))

    def probabilities(self, sessions: Sessions, *, conditional: bool) -> Doubles:  # noqa: ARG002
        """The probability of a click on each document, shape [S, P]."""
        return np.asarray(self.relevance_D1[sessions.pairs_SP])


@dataclass(frozen=True, eq=False)
class PositionBasedModel:
    """A click is an examined position times an attractive document (PBM; Richardson et al. 2007)."""

    relevance_D1: Doubles
    examination_P: Doubles
    """For predictions, not as propensities: smoothing raises low documents and lowers their positions."""

    @staticmethod
    def fit(sessions: Sessions, *, smoothing: float) -> "PositionBasedModel":
        """Fit by EM."""
        return PositionBasedModel(
            *fit_product(count(sessions), sessions.pairs, sessions.positions, smoothing=smoothing)
        )

    def probabilities(self, sessions: Sessions, *, conditional: bool) -> Doubles:  # noqa: ARG002
        """The probability of a click on each document, shape [S, P]; clicks above make no difference."""
        return np.asarray(self.relevance_D1[sessions.pairs_SP] * self.examination_P)


@dataclass(frozen=True, eq=False)
class UserBrowsing:
    """Examination depends on the position and on that of the last click above (UBM; Dupret and Piwowarski 2008)."""

    relevance_D1: Doubles
    examination_PL: Doubles
    """By position and position of the last click above, from 1; 0 for none."""

    @staticmethod
    def fit(sessions: Sessions, *, smoothing: float) -> "UserBrowsing":
        """Fit by EM."""
        p = sessions.positions
        cells = count(sessions, np.arange(p) * p + _last_above(sessions))
        attraction_D1, examination_K = fit_product(cells, sessions.pairs, p * p, smoothing=smoothing)
        return UserBrowsing(attraction_D1, examination_K.reshape(p, p))

    def probabilities(self, sessions: Sessions, *, conditional: bool) -> Doubles:
        """The probability of a click on each document, shape [S, P]; over all last clicks if not `conditional`."""
        attraction_SP = self.relevance_D1[sessions.pairs_SP] * sessions.shown_SP
        if conditional:
            return np.asarray(attraction_SP * self.examination_PL[np.arange(sessions.positions), _last_above(sessions)])
        click_SP = np.zeros_like(attraction_SP)
        last_SL = np.zeros_like(attraction_SP)
        last_SL[:, 0] = 1.0
        for p in range(sessions.positions):
            click_SL = attraction_SP[:, p : p + 1] * self.examination_PL[p]
            click_SP[:, p] = (last_SL * click_SL).sum(axis=1)
            last_SL *= 1 - click_SL
            if p + 1 < sessions.positions:
                last_SL[:, p + 1] = click_SP[:, p]
        return click_SP


def _last_above(sessions: Sessions) -> Ints:
    """The position of the last click above each position, from 1; 0 for none, shape [S, P]."""
    last_SP = sessions.last_SP
    return np.concatenate([np.zeros_like(last_SP[:, :1]), last_SP[:, :-1]], axis=1)


@dataclass(frozen=True, eq=False)
class DynamicBayesian:
    """Users continue from position to position until a clicked document satisfies them (DBN; Chapelle and Zhang 2009).

    An examined document is clicked if it attracts. A clicked one satisfies with its own probability, and then the
    user stops; otherwise the user continues with probability `continuation`, which is 1 in the simplified model (SDBN).
    """

    attraction_D1: Doubles
    satisfaction_D1: Doubles
    continuation: float

    @property
    def relevance_D1(self) -> Doubles:
        """Attraction times satisfaction, as in the paper."""
        return self.attraction_D1 * self.satisfaction_D1

    @staticmethod
    def simplified(sessions: Sessions, *, smoothing: float) -> "DynamicBayesian":
        """Count: users see all down to the last click, or all without a click, and the last click satisfies them.

        Chapelle and Zhang 2009, algorithm 1, with smoothing.
        """
        last_S1 = sessions.last_S[:, None]
        places_P = np.arange(1, sessions.positions + 1)
        seen_SP = sessions.shown_SP & ((places_P <= last_S1) | (last_S1 == 0))
        attraction, satisfaction = _shares(sessions, seen_SP, places_P == last_S1)
        return DynamicBayesian(_smoothed(*attraction, smoothing), _smoothed(*satisfaction, smoothing), 1.0)

    @staticmethod
    def fit(sessions: Sessions, *, smoothing: float) -> "DynamicBayesian":
        """Fit by EM, from the simplified model (Chapelle and Zhang 2009, appendix)."""
        model = DynamicBayesian.simplified(sessions, smoothing=smoothing)
        model = DynamicBayesian(model.attraction_D1, model.satisfaction_D1, 0.9)
        for _ in range(_ROUNDS):
            examined_SP, satisfied_SP, went_on, could = model.expected(sessions)
            attraction, satisfaction = _shares(sessions, examined_SP, satisfied_SP)
            previous = model
            model = DynamicBayesian(
                _smoothed(*attraction, smoothing), _smoothed(*satisfaction, smoothing), went_on / max(could, _TINY)
            )
            moved = [
                np.abs(previous.relevance_D1 - model.relevance_D1).mean(),
                previous.continuation - model.continuation,
            ]
            if np.abs(moved).max() < _TOLERANCE:
                break
        else:
            log.warning("clicks: DBN has not converged after %d rounds of EM", _ROUNDS)
        return model

    def expected(self, sessions: Sessions) -> tuple[Doubles, Doubles, float, float]:
        """Hidden values given the clicks: examination and satisfaction [S, P], how often users continued and could."""
        shown_SP, last_S, positions = sessions.shown_SP, sessions.last_S, sessions.positions
        attraction_SP = self.attraction_D1[sessions.pairs_SP] * shown_SP
        satisfaction_SP = self.satisfaction_D1[sessions.pairs_SP]
        on_SP = np.where(shown_SP, self.continuation, 1.0)  # users pass a position without a document
        quiet_SP1 = np.ones((len(sessions), positions + 1))  # no click from here on, if it is examined
        for p in reversed(range(positions)):
            quiet_SP1[:, p] = (1 - attraction_SP[:, p]) * (1 - on_SP[:, p] + on_SP[:, p] * quiet_SP1[:, p + 1])

        # only the last click may have satisfied: the others were followed by one
        satisfied_SP = np.zeros_like(attraction_SP)
        row_C = np.flatnonzero(last_S > 0)
        place_C = last_S[row_C] - 1
        s_C = satisfaction_SP[row_C, place_C]
        quiet_below_C = 1 - self.continuation + self.continuation * quiet_SP1[row_C, place_C + 1]
        satisfied_SP[row_C, place_C] = s_C / np.maximum(s_C + (1 - s_C) * quiet_below_C, _TINY)

        # all down to the last click was examined; below it, what users reached who continued and did not click again
        examined_SP = (np.arange(1, positions + 1) <= last_S[:, None]).astype(np.float64)
        examined_SP[last_S == 0, 0] = 1.0
        could = went_on = 0.0
        for p in range(positions - 1):
            free_S = (examined_SP[:, p] - satisfied_SP[:, p]) * shown_SP[:, p]
            quiet_S = on_SP[:, p] * quiet_SP1[:, p + 1]
            share_S = quiet_S / np.maximum(1 - on_SP[:, p] + quiet_S, _TINY)
            reached_S = np.where(shown_SP[:, p], free_S, examined_SP[:, p]) * share_S
            above_S = p + 1 < last_S
            examined_SP[:, p + 1] = np.where(above_S, 1.0, reached_S)
            could += free_S.sum()
            went_on += (free_S * np.where(above_S, 1.0, share_S)).sum()
        return examined_SP, satisfied_SP, float(went_on), float(could)

    def probabilities(self, sessions: Sessions, *, conditional: bool) -> Doubles:
        """The probability of a click on each document, shape [S, P]."""
        shown_SP, clicks_SP = sessions.shown_SP, sessions.clicks_SP
        attraction_SP = self.attraction_D1[sessions.pairs_SP] * shown_SP
        satisfaction_SP = self.satisfaction_D1[sessions.pairs_SP]
        click_SP, reach_S = np.zeros_like(attraction_SP), np.ones(len(sessions))
        for p in range(sessions.positions):
            a_S, s_S = attraction_SP[:, p], satisfaction_SP[:, p]
            click_SP[:, p] = reach_S * a_S
            if conditional:
                missed_S = reach_S * (1 - a_S) / np.maximum(1 - reach_S * a_S, _TINY)
                after_S = np.where(clicks_SP[:, p], 1 - s_S, missed_S)
            else:
                after_S = reach_S * (1 - a_S * s_S)
            reach_S = np.where(shown_SP[:, p], self.continuation * after_S, reach_S)
        return click_SP


_Share = tuple[Doubles, Doubles]


def _shares(sessions: Sessions, examined_SP: Doubles | Bools, satisfied_SP: Doubles | Bools) -> tuple[_Share, _Share]:
    """Clicks and examinations by pair, and satisfactions and clicks."""
    shown_SP = sessions.shown_SP
    pair_N, size = sessions.pairs_SP[shown_SP], sessions.pairs + 1
    columns = (examined_SP, sessions.clicks_SP, satisfied_SP)
    examined_D1, clicked_D1, satisfied_D1 = (sums(pair_N, column[shown_SP], size) for column in columns)
    return (clicked_D1, examined_D1), (satisfied_D1, clicked_D1)


class Perplexity(NamedTuple):
    """Perplexities of predictions; 1 is perfect, 2 a coin flip."""

    overall: float
    positions_P: Doubles
    """By position; NaN where nothing was shown."""


def perplexity(probabilities_SP: Doubles, sessions: Sessions) -> Perplexity:
    """`2^-mean log2 P(what happened)` over the documents shown, and over those at each position.

    Dupret and Piwowarski 2008, section 4.2. Probabilities are kept a millionth away from 0 and 1. PyClick and CLAX take
    the mean of the positions' perplexities as the overall one: this differs, because the last positions are rare and
    easy to predict, and count there as much as the first.

    Example:
        >>> one = Sessions(np.array([[0, 1]]), np.array([[True, False]]), np.zeros(1), 2)
        >>> perplexity(np.array([[0.5, 0.5]]), one).overall
        2.0
    """
    shown_SP = sessions.shown_SP
    p_SP = np.clip(probabilities_SP, 1e-6, 1 - 1e-6)
    bits_SP = -np.log2(np.where(sessions.clicks_SP, p_SP, 1 - p_SP)) * shown_SP
    shown_P = shown_SP.sum(axis=0)
    by_P = np.divide(bits_SP.sum(axis=0), shown_P, out=np.full(len(shown_P), np.nan), where=shown_P > 0)
    return Perplexity(float(2 ** (bits_SP.sum() / max(shown_P.sum(), 1))), np.exp2(by_P))
