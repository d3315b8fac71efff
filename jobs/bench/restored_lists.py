"""Two ways to pretrain where most features are vectors, against no pretraining, on the same network and labels.

  OMP_NUM_THREADS=1 python -m jobs.bench.restored_lists --set data=runs/data/nfcorpus-vectors \
      --set out=runs/restored-lists

- `restored`: a Transformer over the list learns to restore masked features of a document from what is left of it and
  from the other documents; all of it, not only the encoder, is then finetuned. `lists` is the same without it.
- `contrasted`: SimCLR-Rank whose views mask whole vectors (a document's, a query's or their product's) instead of
  single numbers, which `contrasted_values` does; `scratch` is the same network without pretraining.

Each draw of labels has networks pretrained for it alone. NDCG@10; an epoch is chosen on validation, test judges once.
A repeated command continues where it stopped.

Shapes: N documents, F features, B masks of a document, Q1 offsets, D embedding, Q lists.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from jobs.bench.cells import Cell, difference, publish
from jobs.cli import Command, Job, main
from ltrscale import storage
from ltrscale.arrays import Doubles
from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.data.dataset.relevant import only_relevant
from ltrscale.data.dataset.selection import Selection, select
from ltrscale.data.dataset.split import SplitsWithTest
from ltrscale.data.stream.batches import GroupStream, StreamConfig, iterate
from ltrscale.models.attention import RankFormerConfig
from ltrscale.models.choices import NetworkConfig
from ltrscale.models.encoders import ResNetConfig
from ltrscale.models.features import FeatureTransform, TransformConfig
from ltrscale.pretext.augment import add_noise, swap_in_group
from ltrscale.pretext.contrast import simclr_rank
from ltrscale.progress import log
from ltrscale.ranking.loss import has_pairs
from ltrscale.ranking.metrics import ndcg
from ltrscale.ranking.pairwise import lambdarank
from ltrscale.reports.document import Document, Section, Table, TableRow, Text
from ltrscale.training.fitting import fit

Name = Literal["scratch", "contrasted_values", "contrasted", "lists", "restored"]
BEFORE: dict[Name, Name] = {"contrasted_values": "scratch", "contrasted": "scratch", "restored": "lists"}
"""What each pretrained network is without pretraining."""
_WIDTH, _AT = 96, 10
_NETWORK = NetworkConfig(transform=TransformConfig(numeric="standard"), encoder=ResNetConfig(width=_WIDTH, blocks=2))
_CONTEXT = RankFormerConfig(layers=2, heads=4, feedforward=192, dropout=0.1)


class RestoredListsJob(Config):
    """Compare pretraining by restored lists and by views without whole vectors with no pretraining."""

    out: str
    """Directory of the results, a file for each model, and `report.md`."""
    data: str
    """The data set, with periods train, dev and test."""
    vectors: str = r"^([qdp])_\d+$"
    """Names of features of vectors; a vector is those with the same group. Each other feature is masked alone."""
    labelled: tuple[int, ...] = Field((100, 300, 1000), min_length=1)
    """Training lists with a relevant document."""
    draws: int = Field(5, ge=1)
    """Samples of them, with the seeds 0, 1, ..."""
    epochs: int = Field(8, ge=1)
    """Of pretraining."""

    def splits(self) -> SplitsWithTest:
        """Training, validation and test."""
        periods = {"train": "train", "validation": "dev", "test": "test"}
        return SplitsWithTest.model_validate({k: {"data": self.data, "periods": p} for k, p in periods.items()})


class Network(nn.Module):
    """An encoder, with a Transformer over the list if asked for, and a linear head."""

    def __init__(self, transform: FeatureTransform, *, lists: bool) -> None:
        super().__init__()
        self.transform, self.encoder = transform, _NETWORK.build(transform)
        self.context = _CONTEXT.build(_WIDTH, transform.numeric_F, transform.cardinalities) if lists else None
        self.width = self.context.width if self.context else _WIDTH
        self.head = nn.Linear(self.width, 1)

    def embed(self, x_NF: Tensor, groups: QueryGroups) -> Tensor:
        """Embeddings [N, D] of transformed documents."""
        h_ND: Tensor = self.encoder(x_NF)
        if self.context is None:
            return h_ND
        documents_ND: Tensor = self.context(x_NF, h_ND, groups).documents_ND
        return documents_ND

    def forward(self, groups: QueryGroups) -> Tensor:
        """Scores [N]."""
        scores_N: Tensor = self.head(self.embed(self.transform(groups.features_NF), groups)).squeeze(1)
        return scores_N


def mask_of_features(names: list[str], vectors: str) -> Tensor:
    """The number of each feature's mask, shape [F]: a vector has one, each other feature its own.

    Example:
        >>> mask_of_features(["age", "q_0", "q_1", "d_0", "score"], r"^([qd])_")
        tensor([0, 1, 1, 2, 3])
    """
    matches = [re.match(vectors, name) for name in names]
    keys = [match[1] if match else f"one {name}" for match, name in zip(matches, names, strict=True)]
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys])


def batches(lists: Selection, epoch: int, docs_per_batch: int) -> Iterator[QueryGroups]:
    """All lists once, whole, in an order that depends on the epoch alone."""
    for step in GroupStream(lists, StreamConfig(docs_per_batch=docs_per_batch, streams=1)).epoch(epoch):
        yield from filter(None, step.micro_batches.values())


Loss = Callable[[Tensor, QueryGroups], Tensor]
"""The loss of a micro-batch of transformed documents."""


def _masked(x_NF: Tensor, mask_F: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """True where a feature of a document is masked, with all features of the same mask, shape [N, F]."""
    draws_NB = torch.rand(len(x_NF), int(mask_F.max()) + 1, generator=generator)
    return draws_NB[:, mask_F] < rate


def contrast(net: Network, mask_F: Tensor, seed: int) -> tuple[nn.Module, Loss]:
    """SimCLR-Rank on views with swapped values, noise, and .3 of the masks hidden; its projector and loss."""
    projector, generator = _two_layers(net.width, _WIDTH), torch.Generator().manual_seed(seed)

    def view(x_NF: Tensor, offsets_Q1: Tensor) -> Tensor:
        swapped_NF = swap_in_group(x_NF, offsets_Q1, probability=0.5, generator=generator)
        noisy_NF = add_noise(swapped_NF, net.transform.numeric_F, scale=0.5, generator=generator)
        return noisy_NF.masked_fill(_masked(x_NF, mask_F, 0.3, generator), 0)

    def loss(x_NF: Tensor, groups: QueryGroups) -> Tensor:
        offsets_Q1 = groups.offsets_Q1
        z0_ND, z1_ND = (projector(net.embed(view(x_NF, offsets_Q1), groups)) for _ in range(2))
        losses_N: Tensor = simclr_rank(z0_ND, z1_ND, offsets_Q1, temperature=0.1)
        return losses_N.mean()

    return projector, loss


def restore(net: Network, mask_F: Tensor, seed: int) -> tuple[nn.Module, Loss]:
    """The squared error of masked features, .4 of all masks, each at most 25; its decoder and loss."""
    decoder, generator = _two_layers(net.width, len(mask_F)), torch.Generator().manual_seed(seed)

    def loss(x_NF: Tensor, groups: QueryGroups) -> Tensor:
        hidden_NF = _masked(x_NF, mask_F, 0.4, generator)
        errors_NF = (decoder(net.embed(x_NF.masked_fill(hidden_NF, 0), groups)) - x_NF).square().clamp(max=25)
        restored: Tensor = (errors_NF * hidden_NF).sum() / hidden_NF.sum().clamp(min=1)
        return restored

    return decoder, loss


def _two_layers(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, outputs))


def pretrain(net: Network, added: nn.Module, loss: Loss, lists: Selection, epochs: int) -> None:
    """Minimise the loss over all lists, labelled or not."""
    parameters = [*net.parameters(), *added.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    net.train()
    for epoch in range(epochs):
        for groups in batches(lists, epoch, docs_per_batch=2048):
            value = loss(net.transform(groups.features_NF), groups)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 2.0)
            optimizer.step()
        log.info("pretraining, epoch %d of %d: loss %.3f", epoch + 1, epochs, value.item())


def finetune(net: Network, labelled: Selection, validation: Selection) -> float:
    """Learn the labels by LambdaRank, and keep the weights of the epoch that is best on validation; its value."""
    optimizer, best, best_epoch, kept = torch.optim.Adam(net.parameters(), lr=1e-3), -1.0, 0, net.state_dict()
    for epoch in range(60):
        net.train()
        for groups in batches(labelled, epoch, docs_per_batch=1000):
            labels_N = _labels(groups)
            loss_Q = lambdarank(net(groups), labels_N, groups.offsets_Q1)
            loss = loss_Q.sum() / has_pairs(labels_N, groups.offsets_Q1).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if (value := float(np.nanmean(judged(net, validation)))) > best:
            best, best_epoch, kept = value, epoch, copy.deepcopy(net.state_dict())
        if epoch - best_epoch == 10:
            break
    net.load_state_dict(kept)
    return best


@torch.no_grad()
def judged(net: Network, lists: Selection) -> Doubles:
    """NDCG of each list [Q]; NaN without a relevant document."""
    net.eval()
    values = [ndcg(net(groups), _labels(groups), groups.offsets_Q1, k=_AT) for groups in iterate(lists)]
    return torch.cat(values).double().numpy()


def _labels(groups: QueryGroups) -> Tensor:
    assert groups.labels_N is not None  # of lists selected as labelled
    return groups.labels_N


def compare(job: RestoredListsJob) -> None:
    """Train what is missing, draw by draw, and report."""
    splits = job.splits()
    everything, (validation, test) = (
        select(splits.train, labelled=False),
        (only_relevant(select(split, labelled=True)) for split in (splits.validation, splits.test)),
    )
    transform = fit(everything, _NETWORK)
    vectors_F = mask_of_features([feature.name for feature in everything.features], job.vectors)
    for draw in range(job.draws):
        for name in get_args(Name):
            missing = [n for n in job.labelled if not _cell(job, name, n, draw).is_made]
            if not missing:
                continue
            torch.manual_seed(draw)
            net = Network(transform, lists=name in ("lists", "restored"))
            if name in BEFORE:
                mask_F = torch.arange(len(vectors_F)) if name == "contrasted_values" else vectors_F
                added, loss = (restore if name == "restored" else contrast)(net, mask_F, draw)
                pretrain(net, added, loss, everything, job.epochs)
            start = copy.deepcopy(net.state_dict())
            for n in missing:
                labelled = select(splits.train.replace(relevant_groups=n, labelled_seed=draw), labelled=True)
                net.load_state_dict(start)
                torch.manual_seed(draw)  # whichever are missing
                value, ndcg_Q = finetune(net, only_relevant(labelled), validation), judged(net, test)
                log.info("%s, %d labelled lists, draw %d: %.4f on validation", name, n, draw, value)
                _cell(job, name, n, draw).write(ndcg_Q, validation=value)
    publish(document(job), job.out)


def _cell(job: RestoredListsJob, name: Name, labelled: int, draw: int) -> Cell:
    asked = {"data": job.data, "vectors": job.vectors, "epochs": job.epochs}
    return Cell(storage.join(job.out, str(labelled), str(draw), f"{name}.json"), asked)


def document(job: RestoredListsJob) -> Document:
    """A table for each number of labelled lists."""
    return Document(
        "Restored lists and views without vectors",
        [Text("More than the same network without pretraining, with its 95% interval over draws and lists.")],
        [Section(f"{n} labelled lists", [Table.from_rows([*_rows(job, n)])]) for n in job.labelled],
    )


def _rows(job: RestoredListsJob, labelled: int) -> Iterator[TableRow]:
    found = {name: [_cell(job, name, labelled, draw).read() for draw in range(job.draws)] for name in get_args(Name)}
    for name, records in found.items():
        row: TableRow = {
            "method": name,
            f"NDCG@{_AT}": float(np.mean([each["ndcg"] for each in records])),
            "validation": float(np.mean([each["validation"] for each in records])),
        }
        if name in BEFORE:
            pairs = zip(records, found[BEFORE[name]], strict=True)
            row["more than without"] = difference(
                [after["ndcg"] - before["ndcg"] for after, before in pairs], job.draws
            )
        yield row


def _job() -> Job:
    return RestoredListsJob, compare


COMMAND = Command("restored_lists", _job, __doc__, package="jobs.bench")

if __name__ == "__main__":
    main(COMMAND)
