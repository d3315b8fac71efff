"""A ranker from few labels, on one screen: SimCLR-Rank without labels, then LambdaRank with them (Hou et al. 2024).

    python docs/one_screen.py runs/demo/data

The data set is that of `make demo`: 5,000 training lists, of which 75 have labels here. Stream, encoder, losses and the
metric are the library's; settings and loops are yours to change. Prints NDCG@5 of 1,000 test lists without pretraining
and with it. `jobs.pipeline` does the same with checkpoints, more workers and GPUs.

Shapes: N documents of a batch, F features, D embedding, Q lists; list q is rows offsets_Q1[q] to offsets_Q1[q + 1].
"""

import copy
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ltrscale.batch import QueryGroups
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.pretext.augment import MaskConfig, add_noise
from ltrscale.pretext.contrast import simclr_rank
from ltrscale.ranking.loss import has_pairs
from ltrscale.ranking.metrics import ndcg
from ltrscale.ranking.pairwise import lambdarank
from ltrscale.training.fitting import fit, masked_features

WIDTH = 96
NETWORK = NetworkConfig(transform=TransformConfig(numeric="log1p_standard"), encoder=ResNetConfig(width=WIDTH))


def batches(lists: Selection, epoch: int, docs_per_batch: int) -> Iterator[QueryGroups]:
    """All lists once, whole, in an order that depends on the seed and the epoch alone."""
    for step in GroupStream(lists, StreamConfig(docs_per_batch=docs_per_batch, streams=1)).epoch(epoch):
        yield from filter(None, step.micro_batches.values())


def pretrain(encoder: nn.Module, transform: FeatureTransform, lists: Selection, *, epochs: int = 8) -> None:
    """Tell two views of a document, noisy copies of it, from the views of the other documents of its list."""
    projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    parameters = [*encoder.parameters(), *projector.parameters()]
    optimizer, generator = torch.optim.Adam(parameters, lr=1e-3), torch.Generator().manual_seed(0)
    names = [feature.name for feature in lists.features]
    identifying_F = masked_features(MaskConfig(), lists, transform.kinds).rates(transform.kinds, names)
    hidden_F = torch.tensor(identifying_F).clamp(min=0.1)  # what names a document, such as its seller, is too easy

    def view(x_NF: Tensor) -> Tensor:
        noisy_NF = add_noise(x_NF, transform.numeric_F, scale=1.0, generator=generator)
        return noisy_NF.masked_fill(torch.rand(x_NF.shape, generator=generator) < hidden_F, 0.0)

    encoder.train()
    for epoch in range(epochs):
        for groups in batches(lists, epoch, docs_per_batch=2048):
            x_NF = transform(groups.features_NF)
            z0_ND, z1_ND = projector(encoder(view(x_NF))), projector(encoder(view(x_NF)))
            loss = simclr_rank(z0_ND, z1_ND, groups.offsets_Q1, temperature=0.1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 2.0)
            optimizer.step()
        print(f"pretraining, epoch {epoch + 1}: loss {loss:.3f}")


def finetune(
    ranker: nn.Module, labelled: Selection, validation: Selection, *, epochs: int = 120, patience: int = 20
) -> None:
    """Learn the labels, and keep the weights of the epoch that ranks validation best."""
    optimizer, best, best_epoch, kept = torch.optim.Adam(ranker.parameters(), lr=1e-3), 0.0, 0, ranker.state_dict()
    for epoch in range(epochs):
        ranker.train()
        for groups in batches(labelled, epoch, docs_per_batch=1000):
            loss_Q = lambdarank(ranker(groups.features_NF).squeeze(1), groups.labels_N, groups.offsets_Q1)
            loss = loss_Q.sum() / has_pairs(groups.labels_N, groups.offsets_Q1).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (value := mean_ndcg(ranker, validation)) > best:
            best, best_epoch, kept = value, epoch, copy.deepcopy(ranker.state_dict())
        if epoch - best_epoch == patience:
            break
    ranker.load_state_dict(kept)


@torch.no_grad()
def mean_ndcg(ranker: nn.Module, lists: Selection) -> float:
    """Mean NDCG@5 over the lists with a relevant document; others have NaN."""
    ranker.eval()
    of_batches = (ndcg(ranker(g.features_NF).squeeze(1), g.labels_N, g.offsets_Q1, k=5) for g in iterate(lists))
    return torch.cat([*of_batches]).nanmean().item()


def main(data: str) -> dict[str, float]:
    """NDCG@5 on test of the same network without pretraining and with it, after the same 75 labelled lists."""
    train = Split(data=data, periods="2026-W01..2026-W05")
    lists, labelled = select(train, labelled=False), select(train.replace(labelled_fraction=0.03), labelled=True)
    validation = select(Split(data=data, periods="2026-W06"), labelled=True)
    test = select(Split(data=data, periods="2026-W07..2026-W08"), labelled=True)
    transform, found = fit(lists, NETWORK), {}
    for name in ("no pretraining", "SimCLR-Rank"):
        torch.manual_seed(0)
        encoder = NETWORK.build(transform)
        if name == "SimCLR-Rank":
            pretrain(encoder, transform, lists)
        ranker = nn.Sequential(transform, encoder, nn.Linear(WIDTH, 1))
        finetune(ranker, labelled, validation)
        found[name] = mean_ndcg(ranker, test)
        print(f"{name}: NDCG@5 {found[name]:.4f}")
    return found


if __name__ == "__main__":
    main(sys.argv[1])
