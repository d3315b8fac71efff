"""An auxiliary objective: a pretext loss on unlabelled groups beside the ranking loss on labelled ones.

Training on few labels alone may undo pretraining; the pretext loss preserves it while the ranker learns.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from ltrscale import bundle
from ltrscale.batch import QueryGroups
from ltrscale.config import Config
from ltrscale.data.dataset.selection import Selection
from ltrscale.data.stream.batches import GroupStream, StreamConfig
from ltrscale.data.stream.cursor import Position
from ltrscale.data.stream.parts import Run
from ltrscale.draws import mix
from ltrscale.models.features import FeatureTransform
from ltrscale.models.ranker import Ranker
from ltrscale.pretext.augment import AugmentConfig, MaskConfig, SwapInGroupConfig
from ltrscale.pretext.choices import MethodConfig
from ltrscale.pretext.contrast import SimCLRRankConfig
from ltrscale.pretext.objective import Pretrainer
from ltrscale.training.feed import Account, Fed, RowsOf, read_ahead
from ltrscale.training.fitting import masked_features, sample_inputs


class AuxiliaryConfig(Config):
    """A pretext loss on all groups of the training split, beside the ranking loss in the phase `full`.

    A step minimises `ranking loss + weight * pretext loss`, each a mean over its own batch of all workers.
    """

    weight: float = Field(0.1, gt=0)
    """Weight of the pretext loss; SimCLR-Rank's is about log(2 L - 1) for lists of L documents, far above most ranking
    losses. No paper here has it: choose by validation."""
    every: int = Field(1, ge=1)
    """Only one step in this many has it; a batch of unlabelled groups may cost more than one of labelled groups."""
    method: MethodConfig = SimCLRRankConfig()
    """The pretext objective; if its projector has the settings of pretraining's, it starts from those weights."""
    augment: AugmentConfig = SwapInGroupConfig()
    """How a view differs from the document, as in pretraining."""
    mask: MaskConfig = MaskConfig()
    """Features that are masked in the views, as in pretraining."""
    stream: StreamConfig = StreamConfig(docs_per_batch=4096, streams=1)
    """Batch size and order of the unlabelled groups."""

    def groups(self, selection: Selection, transform: FeatureTransform, *, run: Run) -> "Unlabelled":
        """The groups to learn from, with a sample of their documents if the method draws values from it."""
        config, where = self, "finetune.auxiliary.mask"
        if not self.method.reads_tokens:
            mask = masked_features(self.mask, selection, transform.kinds, where=where, run=run)
            config = self.replace(mask=mask)
        draws = self.method.needs_marginals(self.augment)
        return Unlabelled(config, selection, sample_inputs(selection, transform, run=run) if draws else None)

    def order(self, phase: str, seed: int) -> StreamConfig:
        """How a phase reads the unlabelled groups."""
        regroup = self.stream.regroup or self.method.regroups
        return self.stream.replace(seed=mix("auxiliary", phase, seed, self.stream.seed), regroup=regroup)


@dataclass(frozen=True)
class Unlabelled:
    """The input of an auxiliary objective, equal on all workers."""

    config: AuxiliaryConfig
    selection: Selection
    """All groups of the training split, without labels."""
    marginals_SF: Tensor | None
    """Documents from which corrupted values are drawn; None if the method draws none."""


class AuxiliaryObjective(nn.Module):
    """The pretext loss on unlabelled groups, for the encoders of rankers trained side by side.

    It trains the encoders and the method's own parts; the projector of a pretrained bundle is reused.
    """

    def __init__(self, unlabelled: Unlabelled, rankers: Sequence[Ranker], start: bundle.EncoderBundle | None) -> None:
        super().__init__()
        self.unlabelled = unlabelled
        self.nets = nn.ModuleList(_pretrainer(unlabelled, ranker, start) for ranker in rankers)

    def forward(self, groups: QueryGroups, generator: torch.Generator) -> tuple[Tensor, Tensor | float]:
        """The loss summed over documents or hidden tokens, and their number, both as a mean over the rankers."""
        losses, counts = zip(*(net(groups, generator) for net in self.nets), strict=True)
        return torch.stack(losses).mean(), sum(counts) / len(counts)


def _pretrainer(unlabelled: Unlabelled, ranker: Ranker, start: bundle.EncoderBundle | None) -> Pretrainer:
    config, architecture = unlabelled.config, ranker.architecture
    names = [feature.name for feature in unlabelled.selection.features]
    rates_F = torch.tensor(config.mask.rates(ranker.transform.kinds, names))
    net = Pretrainer(
        ranker.transform, architecture.network, config.method, config.augment, unlabelled.marginals_SF, rates_F
    )
    net.encoder = ranker.encoder  # shared with the ranker; the original only gave the sizes
    if start is not None and net.projector is not None and start.projector() == net.projector.config:
        start.initialise_projector(net.projector)
    return net


class Auxiliary:
    """The endless stream of unlabelled micro-batches of one worker, epoch after epoch."""

    def __init__(self, objective: AuxiliaryObjective, stream: GroupStream, device: torch.device) -> None:
        self.objective, self.stream, self.device = objective, stream, device
        self.config = objective.unlabelled.config
        self.epoch = 0
        self.positions: dict[int, Position] = {}
        """Positions in the streams; with the epoch, all that an exact resume needs."""
        self.rows_of: RowsOf | None = None
        """Finds the rows of host tables that groups can use; set by the trainer."""
        self._reading: Generator[Fed] | None = None

    def is_due(self, step: int) -> bool:
        """True if this step has an auxiliary loss."""
        return step % self.config.every == 0

    def next(self) -> Fed:
        """The next micro-batches of this worker's streams; none once they have run out in this epoch."""
        if self._reading is None:
            steps = self.stream.epoch(self.epoch, self.positions or None)
            self._reading = read_ahead(
                steps, depth=self.stream.config.prefetch, device=self.device, rows_of=self.rows_of
            )
        return next(self._reading, Fed({}, self.positions, Account()))

    def advance(self, fed: Fed, groups: float) -> None:
        """Move past a step in which all workers read this many groups; 0 starts the next epoch."""
        if groups:
            self.positions = fed.positions
            return
        if not self.positions:
            raise RuntimeError("an epoch of unlabelled groups served none")
        self.close()
        self.epoch, self.positions = self.epoch + 1, {}

    def close(self) -> None:
        """Stop the thread that reads ahead."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None
