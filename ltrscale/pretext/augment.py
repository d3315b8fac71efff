"""Views, randomly changed copies of documents: augmentations and masks with their configs.

All randomness comes from the generator, and the number of draws does not depend on the values: a view is a function of
the documents, their groups and the generator's state. A mask hides values that would let an encoder recognise a
document instead of understanding it.

Shapes: N documents, F features, Q groups, Q1 = Q + 1 offsets, S documents sampled from the training split.
"""

import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ltrscale.batch import QueryGroups, group_index, joined
from ltrscale.config import Config
from ltrscale.errors import InputError, nearest
from ltrscale.models.features import FeatureKind


class Draw(NamedTuple):
    """The inputs of a random view of a micro-batch, besides the documents themselves."""

    numeric_F: Tensor
    """True where a feature is numeric, False where it is a vocabulary index."""
    offsets_Q1: Tensor
    generator: torch.Generator
    """Source of randomness, on the device of the documents."""
    marginals_SF: Tensor | None = None
    """A uniform sample of the training split's documents, normalised; see `Augmentation.needs_marginals`."""
    rates_F: Tensor | None = None
    """Rate at which each feature of a view is masked; None masks nothing, and draws nothing."""
    groups: QueryGroups | None = None
    """The micro-batch as it was read, for objectives on its tokens and encoders that read lists."""

    def masked(self, view: Tensor) -> Tensor:
        """Set entries of one or several views [..., F] to 0, independently, each at the rate of its feature.

        0 is the centre of a normalised numeric feature and the index of the unknown category.

        Example:
            >>> rates_F, generator = torch.tensor([0.0, 0.5, 1.0]), torch.Generator().manual_seed(0)
            >>> draw = Draw(torch.ones(3, dtype=torch.bool), torch.tensor([0, 2]), generator, rates_F=rates_F)
            >>> draw.masked(torch.ones(2, 3))
            tensor([[1., 1., 0.],
                    [1., 0., 0.]])
        """
        if self.rates_F is None:
            return view
        return view.masked_fill(torch.rand(view.shape, generator=self.generator, device=view.device) < self.rates_F, 0)


class Augmentation(Config):
    """An augmentation as a config selects it, with its strength."""

    kind: str

    needs_marginals: ClassVar[bool] = False
    """Whether it draws from the training marginals; a view then needs a sample of documents."""
    mixes_groups: ClassVar[bool] = False
    """Whether a view has values of other groups of the micro-batch."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        """One random view of documents, shape [N, F]; the input is not changed (HOU24, section 3; HOU23, section 4.1).

        Zeroing sets entries to 0, which is the centre of a normalised numeric feature and the index of the unknown
        category. Gaussian noise leaves categories alone, mixup takes them from one of the two documents, and all other
        augmentations treat them like any value. Swaps and mixup leave a document unchanged if it is alone in its group
        or batch.

        Raises:
            ValueError: the augmentation draws from the training marginals, but `draw` has none.

        Example:
            >>> x, offsets = torch.ones(1, 4), torch.tensor([0, 1])
            >>> draw = Draw(torch.tensor([True, True, False, False]), offsets, torch.Generator().manual_seed(1))
            >>> ZeroingConfig(probability=0.5).view(x, draw)
            tensor([[1., 0., 0., 1.]])
            >>> draw = draw._replace(generator=torch.Generator().manual_seed(1))
            >>> GaussianConfig(scale=0.1).view(x, draw)
            tensor([[1.0661, 1.0267, 1.0000, 1.0000]])
        """
        raise NotImplementedError


class ZeroingConfig(Augmentation):
    """Set each feature to 0 with the same probability, independently."""

    kind: Literal["zeroing"] = "zeroing"
    probability: float = Field(0.1, ge=0, le=1)
    """Share of the entries that are set to 0."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        return x_NF.masked_fill(random_entries(x_NF, self.probability, draw.generator), 0.0)


def random_entries(x_NF: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """A mask whose entries are independently True with this probability, shape [N, F]."""
    return torch.rand(x_NF.shape, generator=generator, device=x_NF.device) < probability


class GaussianConfig(Augmentation):
    """Add normal noise to every numeric feature."""

    kind: Literal["gaussian"] = "gaussian"
    scale: float = Field(1.0, ge=0)
    """Standard deviation of the noise, in units of the normalised features."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        return add_noise(x_NF, draw.numeric_F, scale=self.scale, generator=draw.generator)


def add_noise(x_NF: Tensor, numeric_F: Tensor, *, scale: float, generator: torch.Generator) -> Tensor:
    """Add normal noise of standard deviation `scale` to numeric features; categories do not change."""
    noise_NF = torch.randn(x_NF.shape, generator=generator, device=x_NF.device, dtype=x_NF.dtype)
    return torch.addcmul(x_NF, noise_NF, scale * numeric_F.to(x_NF.dtype))


class SwapInGroupConfig(Augmentation):
    """Replace values by the same column's value of another document of the query group: `qg` of HOU23."""

    kind: Literal["swap_in_group"] = "swap_in_group"
    probability: float = Field(0.6, ge=0, le=1)
    """Share of the entries that are replaced; HOU23 tries .2 and .7, and .6 was best in docs/results/study-news.md."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        return swap_in_group(x_NF, draw.offsets_Q1, probability=self.probability, generator=draw.generator)


class SwapInBatchConfig(Augmentation):
    """Replace values by the same column's value of another document of the micro-batch."""

    kind: Literal["swap_in_batch"] = "swap_in_batch"
    mixes_groups: ClassVar[bool] = True
    probability: float = Field(0.1, ge=0, le=1)
    """Share of the entries that are replaced."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        return swap_in_group(x_NF, joined(draw.offsets_Q1), probability=self.probability, generator=draw.generator)


def swap_in_group(x_NF: Tensor, offsets_Q1: Tensor, *, probability: float, generator: torch.Generator) -> Tensor:
    """Replace each value, with a probability, by the same column's value of another document of its group.

    `qg` of HOU23, section 4.1: each entry draws independently whether it is replaced and by which document's value.
    All other documents of the group are equally likely; a document alone in its group does not change.

    Args:
        x_NF: features, numeric or vocabulary indices.
        offsets_Q1: offsets of the groups; a single group of all documents swaps within the batch.
        probability: chance of each entry to be replaced.
        generator: source of randomness, on the device of x_NF.

    Example:
        >>> x, generator = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.Generator().manual_seed(0)
        >>> swap_in_group(x, torch.tensor([0, 2, 3]), probability=1.0, generator=generator)
        tensor([[3., 4.],
                [1., 2.],
                [5., 6.]])
    """
    group_N = group_index(offsets_Q1)
    first_N1, length_N1 = offsets_Q1[group_N, None], offsets_Q1.diff()[group_N, None]
    place_N1 = torch.arange(len(x_NF), device=x_NF.device)[:, None] - first_N1
    hit_NF = random_entries(x_NF, probability, generator)
    # in place: with many features, this is the largest tensor of a step
    source_NF = _random_below((length_N1 - 1).clamp(min=1), x_NF.shape, generator)
    source_NF.add_(place_N1 + 1).remainder_(length_N1).add_(first_N1)
    return torch.where(hit_NF, x_NF.gather(0, source_NF), x_NF)


class MarginalConfig(Augmentation):
    """Replace values by draws from their feature's marginal over the training split: the corruption of SCARF."""

    kind: Literal["marginal"] = "marginal"
    needs_marginals: ClassVar[bool] = True
    probability: float = Field(0.6, ge=0, le=1)
    """Share of the entries that are replaced; SCARF has .6, HOU24 tries .3, .6 and .9."""
    fixed_count: bool = False
    """Corrupt the same number of features of every document, as SCARF does, instead of drawing each independently."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        """The documents with values drawn from the training marginals, each entry on its own (Bahri et al. 2022).

        SCARF's Algorithm 1 corrupts floor(rate F) features of every document (`fixed_count`); HOU24 uses a probability,
        which is an independent draw for each entry.

        Example:
            >>> marginals = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]])
            >>> numeric, generator = torch.ones(3, dtype=torch.bool), torch.Generator().manual_seed(0)
            >>> draw = Draw(numeric, torch.tensor([0, 2]), generator, marginals)
            >>> MarginalConfig(probability=0.7, fixed_count=True).view(torch.zeros(2, 3), draw)
            tensor([[  2.,   0., 200.],
                    [  2.,  20.,   0.]])
        """
        marginals_SF, generator = draw.marginals_SF, draw.generator
        if marginals_SF is None:
            raise ValueError("the marginal augmentation needs marginals_SF, a sample of the training documents")
        if self.fixed_count:
            # in floating point, .29 * 100 is slightly less than 29
            count = math.floor(self.probability * x_NF.shape[1] + 1e-9)
            order_NF = torch.rand(x_NF.shape, generator=generator, device=x_NF.device).argsort(1)
            hit_NF = torch.zeros_like(order_NF, dtype=torch.bool).scatter_(1, order_NF[:, :count], True)
        else:
            hit_NF = random_entries(x_NF, self.probability, generator)
        source_NF = torch.randint(len(marginals_SF), x_NF.shape, generator=generator, device=x_NF.device)
        return torch.where(hit_NF, marginals_SF.gather(0, source_NF).to(x_NF.dtype), x_NF)


Mixup = Literal["linear", "geometric", "binary"]
MIXUPS: tuple[Mixup, ...] = ("linear", "geometric", "binary")


class MixupConfig(Augmentation):
    """Mix documents with other documents of the micro-batch: the views of DACL+."""

    kind: Literal["mixup"] = "mixup"
    mixes_groups: ClassVar[bool] = True
    amount: float = Field(0.3, ge=0, le=1)
    """The largest share that the other document can have; HOU24 tries .3, .6 and .9."""
    forms: tuple[Mixup, ...] = Field(MIXUPS, min_length=1, max_length=100)
    """Ways to mix, one drawn for each document: all three are DACL+, `linear` alone is DACL."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        """The documents x, each with a share of another document x' of the batch.

        With `lambda ~ U(1 - amount, 1)` and one of the forms drawn for each document (Verma et al. 2021, section 3;
        their alpha is 1 - amount):

        - linear: `lambda x + (1 - lambda) x'`
        - geometric: `x^lambda x'^(1 - lambda)` where both are positive; linear elsewhere, where a real power is not
          defined. Normalised features are negative about half of the time.
        - binary: each feature comes from x with probability lambda, otherwise from x'.

        A category is never averaged: in every form it comes from x with probability lambda, otherwise from x'. All
        other documents of the batch are equally likely as the partner x'; a document alone in the batch does not
        change. A form listed twice is drawn twice as often.

        The paper gives each form its own strength; here one lambda serves all forms, so the share of x' has the same
        mean in each. We read HOU24's "mixup amount" as a bound on the share of x'.
        """
        n, device, generator = len(x_NF), x_NF.device, draw.generator
        ahead_N = 1 + _random_below(torch.full((), max(1, n - 1), device=device), (n,), generator)
        other_NF = x_NF[(torch.arange(n, device=device) + ahead_N) % max(1, n)]
        share_N1 = 1 - self.amount * torch.rand(n, 1, generator=generator, device=device)
        form_N1 = torch.randint(len(self.forms), (n, 1), generator=generator, device=device)
        keep_NF = torch.rand(x_NF.shape, generator=generator, device=device) < share_N1
        binary_NF = torch.where(keep_NF, x_NF, other_NF)
        mixed_NF = binary_NF
        for number, form in enumerate(self.forms):
            if form != "binary":
                smooth_NF = _smooth(form, x_NF, other_NF, share_N1.to(x_NF.dtype))
                mixed_NF = torch.where(draw.numeric_F & (form_N1 == number), smooth_NF, mixed_NF)
        return mixed_NF


def _smooth(form: Literal["linear", "geometric"], x_NF: Tensor, other_NF: Tensor, share_N1: Tensor) -> Tensor:
    linear_NF = torch.lerp(other_NF, x_NF, share_N1)
    if form == "linear":
        return linear_NF
    product_NF = x_NF.clamp(min=0) ** share_N1 * other_NF.clamp(min=0) ** (1 - share_N1)
    return torch.where((x_NF > 0) & (other_NF > 0), product_NF, linear_NF)


def _random_below(bound: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random integers from 0 to `bound - 1`, remainders of 62 bits: their chances differ by a part in 2^31."""
    return torch.randint(1 << 62, tuple(shape), generator=generator, device=bound.device).remainder_(bound)


def permute_columns(x_NF: Tensor, *, generator: torch.Generator) -> Tensor:
    """Permute each column independently: values stay in their feature, but move to other documents.

    Example:
        >>> x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        >>> permute_columns(x, generator=torch.Generator().manual_seed(0))
        tensor([[ 3., 30.],
                [ 1., 20.],
                [ 2., 10.]])
    """
    n, n_features = x_NF.shape
    if x_NF.device.type != "cpu":  # one sort of random keys for all columns
        keys_NF = torch.randint(1 << 31, (n, n_features), generator=generator, device=x_NF.device, dtype=torch.int32)
        return x_NF.gather(0, keys_NF.argsort(0))
    source_FN = torch.empty(n_features, n, dtype=torch.int64)
    for source_N in source_FN:
        torch.randperm(n, generator=generator, out=source_N)
    return x_NF.gather(0, source_FN.T)


SingleAugmentConfig = (
    ZeroingConfig | GaussianConfig | SwapInGroupConfig | SwapInBatchConfig | MarginalConfig | MixupConfig
)


class ComposeConfig(Augmentation):
    """Several augmentations, one after the other."""

    kind: Literal["compose"] = "compose"
    steps: tuple[Annotated[SingleAugmentConfig, Field(discriminator="kind")], ...] = Field(min_length=1, max_length=100)
    """Applied in this order, each to the view made by the step before it."""

    def view(self, x_NF: Tensor, draw: Draw) -> Tensor:
        for step in self.steps:
            x_NF = step.view(x_NF, draw)
        return x_NF

    @property
    def needs_marginals(self) -> bool:  # type: ignore[override]
        return any(step.needs_marginals for step in self.steps)

    @property
    def mixes_groups(self) -> bool:  # type: ignore[override]
        return any(step.mixes_groups for step in self.steps)


AnyAugmentConfig = SingleAugmentConfig | ComposeConfig
AugmentConfig = Annotated[AnyAugmentConfig, Field(discriminator="kind")]


Rate = Annotated[float, Field(ge=0, le=1)]


class MaskConfig(Config):
    """Rates at which values of a view are masked, after the augmentation, each entry independently.

    A masked category becomes the unknown one, a masked number the centre of its feature, 0. A feature's rate is that of
    its name in `columns`, otherwise the highest rate of the patterns there that match it, otherwise that of its kind:
    `numbers` or `categories`. A category that identifies a document has the higher of `categories` and `identifying`.
    """

    numbers: Rate = 0.0
    """Rate for all numeric features; 0 masks none, because augmentations change numbers already."""

    categories: Rate = 0.0
    """Rate for all categorical features; 0 masks none, because many categories carry relevance (the papers mask
    categories no more than numbers)."""
    columns: dict[str, Rate] = Field(default_factory=dict)
    """Rates by the name of a feature, numeric or categorical, or by a pattern such as `c_*`; where several patterns
    match, the highest rate."""
    identifying: Rate = 0.8
    """Rate for categorical features that identify a document within its group: at least half of the documents have a
    value that no other document of their group has. With .8, both views show the value in 4% of the cases, so that the
    encoder sees it but cannot rely on it; the papers have no such features."""

    def rates(
        self,
        kinds: Sequence[FeatureKind],
        names: Sequence[str],
        identifying: Collection[str] = (),
        *,
        where: str = "pretrain.mask",
    ) -> list[float]:
        """The rate of each feature; `where` is the place of this config in a job's.

        Raises:
            InputError: `columns` names a feature or pattern that does not occur; names the nearest feature.

        Example:
            >>> config = MaskConfig(numbers=0.2, columns={"f_p*": 0.1, "f_age": 0.5})
            >>> kinds = ["numeric", "numeric", "numeric", "categorical", "categorical"]
            >>> config.rates(kinds, ["f_age", "f_pop", "f_size", "c_os", "c_id"], {"c_id"})
            [0.5, 0.1, 0.2, 0.0, 0.8]
        """
        matches = {key: [name for name in names if fnmatchcase(name, key)] for key in self.columns if key not in names}
        for key, matching in matches.items():
            if not matching:
                closest = nearest(key, names)
                raise InputError(f"{where}.columns: no feature is or matches {key!r}; the nearest is {closest!r}")
        rates = []
        for kind, name in zip(kinds, names, strict=True):
            patterns = [self.columns[key] for key, matching in matches.items() if name in matching]
            of_kind = self.numbers if kind == "numeric" else self.categories
            if kind == "categorical" and name in identifying:
                of_kind = max(of_kind, self.identifying)
            rates.append(self.columns.get(name, max(patterns, default=of_kind)))
        return rates
