"""Self-supervised objectives of one group or batch, with loops."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor


def cosine(a_D: Tensor, b_D: Tensor) -> Tensor:
    return (a_D @ b_D) / (a_D.norm() * b_D.norm())


def simclr_rank(z0_LD: Tensor, z1_LD: Tensor, temperature: float, *, with_positive: bool = True) -> Tensor:
    """HOU24 formula 3 for the documents of one group, both views summed, shape [L]; HOU23 D.1 without the positive."""
    views = [*z0_LD, *z1_LD]
    length = len(z0_LD)
    if length == 1:
        return 0 * (z0_LD + z1_LD).sum(1)
    losses = []
    for i in range(length):
        loss = z0_LD.new_zeros(())
        for own, positive in ((i, length + i), (length + i, i)):
            left_out = (own,) if with_positive else (own, positive)
            kept = [view for v, view in enumerate(views) if v not in left_out]
            others = torch.stack([cosine(views[own], view) / temperature for view in kept])
            loss = loss - cosine(views[own], views[positive]) / temperature + others.logsumexp(0)
        losses.append(loss)
    return torch.stack(losses) if losses else z0_LD.new_zeros(0)


def scarf(z_ND: Tensor, corrupted_ND: Tensor, temperature: float) -> Tensor:
    """SCARF's Algorithm 1, with the sum over k instead of its mean, shape [N]."""
    losses = []
    for i, z_D in enumerate(z_ND):
        scores_N = torch.stack([cosine(z_D, c_D) / temperature for c_D in corrupted_ND])
        losses.append(-torch.log(torch.exp(scores_N[i]) / torch.exp(scores_N).sum()))
    return torch.stack(losses)


def feature_errors(decoded_O: Tensor, x_F: Tensor, classes: Sequence[int | None]) -> list[Tensor]:
    """Errors of one document; `classes` has None for a numeric feature. Outputs: numbers first, then logits."""
    numbers = [i for i, n in enumerate(classes) if n is None]
    errors, start = [], len(numbers)
    for i, n in enumerate(classes):
        if n is None:
            errors.append((decoded_O[numbers.index(i)] - x_F[i]) ** 2)
        else:
            probabilities = torch.exp(decoded_O[start : start + n]) / torch.exp(decoded_O[start : start + n]).sum()
            errors.append(-torch.log(probabilities[int(x_F[i]) % n]))
            start += n
    return errors


def vime(
    decoded_O: Tensor,
    mask_logits_F: Tensor,
    x_F: Tensor,
    changed: Sequence[bool],
    classes: Sequence[int | None],
    alpha: float,
) -> Tensor:
    """VIME-self of one document: mean cross entropy of the mask plus alpha times the mean error of the features."""
    mask = x_F.new_zeros(())
    for logit, label in zip(mask_logits_F, changed, strict=True):
        probability = 1 / (1 + torch.exp(-logit))
        mask = mask - (torch.log(probability) if label else torch.log(1 - probability))
    return mask / len(x_F) + alpha * sum(feature_errors(decoded_O, x_F, classes)) / len(x_F)


def subtab(
    decoded_KNO: Tensor,
    z_KNP: Tensor,
    x_NF: Tensor,
    classes: Sequence[int | None],
    temperature: float,
    contrast: float,
    distance: float,
) -> Tensor:
    """SubTab of a whole batch, shape [N]."""
    subsets = len(decoded_KNO)
    pairs = list(combinations(range(subsets), 2))
    losses = []
    for i, x_F in enumerate(x_NF):
        loss = x_F.new_zeros(())
        for k in range(subsets):
            loss = loss + sum(feature_errors(decoded_KNO[k, i], x_F, classes)) / subsets
        for a, b in pairs:
            apart_P = z_KNP[a, i] / z_KNP[a, i].norm() - z_KNP[b, i] / z_KNP[b, i].norm()
            information = simclr_rank(z_KNP[a], z_KNP[b], temperature)[i] / 2  # a mean over the two views
            loss = loss + (contrast * information + distance * (apart_P**2).sum()) / len(pairs)
        losses.append(loss)
    return torch.stack(losses)
