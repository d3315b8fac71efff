"""Calibration of scores that are logits of clicks: do documents get clicked as often as their scores say?

A ranking metric sees only the order of the scores. If a pointwise loss makes the sigmoid of a score a probability, it
can be checked against the clicks, by the log loss and by the error of the mean probability over bins. Both come from
sums that add up over batches, however the data are split.

Shapes: N documents, B fine bins of the score, b bins, C sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ltrscale.config import Strict

_LIMIT, _PER_UNIT = 30, 64
_BINS = 2 * _LIMIT * _PER_UNIT + 1


class Calibration(Strict):
    """Probabilities against clicks, over all documents."""

    documents: int
    clicked: float
    """Share of clicked documents."""
    predicted: float
    """Mean probability."""
    log_loss: float
    """Mean of `-log p` of the clicked and `-log(1 - p)` of the other documents, in nats."""
    error: float
    """Expected calibration error: the mean over documents of the distance, in its bin, of mean probability and share
    of clicked documents."""
    reference: float | None = None
    """The error that probabilities which are right would have on average, as clicks are few; None in the first
    reports."""


def tally(scores_N: Tensor, clicks_N: Tensor) -> Tensor:
    """Sums over documents by fine bin of the score, shape [C, B], float64; tallies of several batches add up.

    The sums are the number of documents, their clicks, their probabilities and their log losses. A fine bin is 1/64 of
    a logit wide, so probabilities in it differ by less than 2%; scores beyond 30 share the last one.

    Args:
        scores_N: finite logits.
        clicks_N: 0 or 1.
    """
    logits_N, clicks_N = scores_N.double(), clicks_N.double()
    bin_N = (logits_N.clamp(-_LIMIT, _LIMIT) * _PER_UNIT).round().long() + _LIMIT * _PER_UNIT
    losses_N = F.softplus(logits_N) - logits_N * clicks_N
    sums_CN = torch.stack([torch.ones_like(logits_N), clicks_N, logits_N.sigmoid(), losses_N])
    return sums_CN.new_zeros(len(sums_CN), _BINS).index_add_(1, bin_N, sums_CN)


def calibration(tally_CB: Tensor, *, bins: int = 10) -> Calibration:
    """Log loss and expected calibration error over bins of equal count (Naeini et al. 2015; Nguyen and O'Connor 2015).

    `sum over bins of n_b / N |mean p - mean y|`. Bins have about N / `bins` documents each. Documents of a fine
    bin stay together, in the bin where their middle lies, so the order of the input never matters. As clicks are few,
    the error is above 0 even for correct probabilities: see `reference`.

    Raises:
        ValueError: there is no document.

    Example:
        >>> even = calibration(tally(torch.zeros(4), torch.tensor([0, 1, 0, 1])))
        >>> even.error, round(even.log_loss, 4)
        (0.0, 0.6931)
        >>> round(calibration(tally(torch.full((4,), 1.0986), torch.tensor([0, 1, 0, 1]))).error, 4)  # .75 against .5
        0.25
    """
    counts_B, clicks_B, probabilities_B, losses_B = tally_CB
    n = counts_B.sum()
    if n == 0:
        raise ValueError("calibration needs a document")
    middle_B = counts_B.cumsum(0) - counts_B / 2
    bin_B = (middle_B / n * bins).long().clamp(max=bins - 1)
    columns_CB = torch.stack([counts_B, clicks_B, probabilities_B])
    counts_b, clicks_b, probabilities_b = tally_CB.new_zeros(3, bins).index_add_(1, bin_B, columns_CB)
    return Calibration(
        documents=int(n),
        clicked=float(clicks_B.sum() / n),
        predicted=float(probabilities_B.sum() / n),
        log_loss=float(losses_B.sum() / n),
        error=float((probabilities_b - clicks_b).abs().sum() / n),
        reference=float(_mean_deviation(counts_b, probabilities_b).sum() / n),
    )


def _mean_deviation(counts_b: Tensor, probabilities_b: Tensor) -> Tensor:
    """The mean of `|X - n p|`, X binomial: `2 v (1 - p) P(X = v)`, v = floor(n p) + 1 (Diaconis and Zabell 1991)."""
    n_b = counts_b.clamp(min=1)
    p_b = (probabilities_b / n_b).clamp(0.0, 1.0)
    v_b = (n_b * p_b).floor() + 1
    misses_b = (n_b - v_b).clamp(min=0)
    ways_b = torch.lgamma(n_b + 1) - torch.lgamma(v_b + 1) - torch.lgamma(misses_b + 1)
    chance_b = (ways_b + torch.xlogy(v_b, p_b) + torch.xlogy(misses_b, 1 - p_b)).exp()
    return torch.where((counts_b > 0) & (v_b <= n_b), 2 * v_b * (1 - p_b) * chance_b, 0.0)
