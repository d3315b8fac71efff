"""The mean of several models that differ only in their seed: of all, or of those that validation chooses.

Shapes: N documents, C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.arrays import Doubles
from ltrscale.bundle import Bundle, MetricValue, TreesBundle, load, load_trees, save_trees, with_tokens_of
from ltrscale.config import Config
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import score_selection
from ltrscale.progress import Report, log
from ltrscale.stages.stage import BundleUrl, LabelledStage, Origin
from ltrscale.trees.configs import GBDTConfig
from ltrscale.trees.data import Labelled, read_labelled


class EnsembleConfig(Config):
    """How many models to train, and how many of them to average."""

    candidates: int = Field(10, ge=2)
    """Models to choose from: the same settings with seeds s, s + 1, ..."""
    most: int = Field(5, ge=1)
    """Maximum number of models in the mean; each costs time when documents are scored."""


def check_draws(config: GBDTConfig, *, where: str = "ensemble") -> None:
    """Check that the seed makes a difference, for otherwise all candidates are the same.

    Args:
        config: of the trees.
        where: the key that asks for several models, for errors.

    Raises:
        ValueError: it makes no difference.
    """
    if not config.is_random:
        raise ValueError(
            f"{where}: these trees draw nothing at random, all candidates are equal; lower {config.sampling}"
        )


class AverageJob(LabelledStage):
    """Average the scores of runs of the same trees."""

    stage: ClassVar = "average"
    bundles: tuple[BundleUrl, ...] = Field(min_length=1)
    """Of one model each, which differ in their seed."""

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Judge the mean on validation, and commit it."""
        average(self.bundles, self.splits.validation, self.out, made_by=origin)


def choose_members(
    config: GBDTConfig,
    ensemble: EnsembleConfig,
    candidates: Sequence[str],
    validation: Split,
    out: str,
    *,
    made_by: Mapping[str, Any],
) -> Bundle:
    """Choose the models whose mean score has the best validation NDCG, and commit only these as a bundle.

    Args:
        config: settings of the candidates; its `stop_on` is the cut-off of the NDCG.
        ensemble: how many models to take.
        candidates: bundles of trees of one library and the same features.
        validation: the choice is made on its labelled groups.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest.

    Raises:
        InputError: a bundle or the data cannot be read.
    """
    bundles = _opened(candidates)
    judged = _Judged.of(bundles, validation)
    taken, value, alone = forward_selection(
        judged.scores_CN, lambda scores_N: judged.value(scores_N, config.stop_on), most=ensemble.most
    )
    name = f"validation_ndcg@{config.stop_on}"
    _save(
        [bundles[c] for c in taken],
        out,
        config={**config.model_dump(mode="json"), "ensemble": ensemble.model_dump(mode="json")},
        metrics={name: value, f"{name}_best_single": alone, "validation_groups": judged.n_groups},
        made_by=made_by,
    )
    log.info("mean of %d of %d models, %s %.4f, the best alone %.4f", len(taken), len(bundles), name, value, alone)
    return load(out)


def average(runs: Sequence[str], validation: Split, out: str, *, made_by: Mapping[str, Any]) -> Bundle:
    """Commit the mean score of all runs of the same trees as a bundle; nothing is chosen.

    Args:
        runs: bundles of one model each, grown by `jobs.train_gbdt` with the same settings but for their seed.
        validation: its labelled groups judge the mean.
        out: directory of the bundle.
        made_by: origin, recorded in the bundle's manifest.

    Raises:
        InputError: a bundle or the data cannot be read.
    """
    bundles = _opened(runs)
    if len({opened.content for opened in bundles}) < len(bundles):
        log.warning("%s: some of the %d runs are equal trees; their settings draw nothing at random", out, len(bundles))
    judged, stop_on = _Judged.of(bundles, validation), int(bundles[0].config["stop_on"])
    name, value = f"validation_ndcg@{stop_on}", judged.value(judged.scores_CN.mean(axis=0), stop_on)
    _save(
        bundles,
        out,
        config={**bundles[0].config, "runs": len(bundles)},
        metrics={name: value, "validation_groups": judged.n_groups},
        made_by=made_by,
    )
    log.info("mean of %d models, %s %.4f", len(bundles), name, value)
    return load(out)


def _opened(urls: Sequence[str]) -> list[TreesBundle]:
    return [load_trees(url) for url in urls]


@dataclass(frozen=True, eq=False)
class _Judged:
    """The scores of some models for the validation groups."""

    groups: Labelled
    n_groups: int
    """Labelled ones, those without a relevant document too."""
    scores_CN: Doubles

    @classmethod
    def of(cls, bundles: Sequence[TreesBundle], validation: Split) -> Self:
        labelled = select(validation, labelled=True)
        selection = only_relevant(labelled)
        groups, _ = read_labelled(selection, "validation")
        scores = [
            score_selection(
                with_tokens_of(selection, [opened]), opened.scorer(features=selection.features), opened.url
            ).scores_N.numpy()
            for opened in bundles
        ]
        return cls(groups, labelled.n_groups, np.stack(scores))

    def value(self, scores_N: Doubles, k: int) -> float:
        return self.groups.mean_ndcg(scores_N, k)


def _save(
    bundles: Sequence[TreesBundle],
    out: str,
    *,
    config: Mapping[str, Any],
    metrics: Mapping[str, MetricValue],
    made_by: Mapping[str, Any],
) -> None:
    """Commit the mean of bundles with one model each, which saw the same columns of the same data."""
    first, models = bundles[0], {f"model-{i}": opened.content for i, opened in enumerate(bundles)}
    save_trees(
        out,
        models,
        first.trees.replace(models=tuple(models)),
        config=config,
        features=first.features,
        dataset_hash=first.dataset_hash,
        read_as=first.read_as,
        reference=first.reference,
        metrics={
            **metrics,
            "models": len(models),
            "trees": sum(int(opened.metrics["trees"] or 0) for opened in bundles),
            "labelled_groups": first.metrics["labelled_groups"],
        },
        made_by=made_by,
    )


def forward_selection(
    scores_CN: NDArray[np.float64], value_of: Callable[[Doubles], float], *, most: int
) -> tuple[list[int], float, float]:
    """Models whose mean score has the highest value, chosen greedily (Caruana et al. 2004).

    Starts with the best model; each round adds the model that raises the value of the mean most, or lowers it least.
    Returns the best mean of all rounds, and among equals the one of fewest models. So a model that harms is never
    forced in. Unlike in the paper, each model is taken only once: the paper's models are of many kinds, while these are
    equally good except for chance, so that weights would fit the noise of the validation groups.

    Args:
        scores_CN: scores of each candidate.
        value_of: value of scores [N], higher is better.
        most: maximum number of models.

    Returns:
        The chosen models in order, the value of their mean, and the value of the best candidate alone.

    Example:
        >>> scores_CN = np.array([[0.0, 2.0], [3.0, 0.0], [0.0, 9.0]])
        >>> forward_selection(scores_CN, lambda scores_N: -abs(float(scores_N[0] - scores_N[1])), most=3)
        ([0, 1], -0.5, -2.0)
    """
    taken: list[int] = []
    values: list[float] = []
    sum_N = np.zeros(scores_CN.shape[1])
    while len(taken) < min(most, len(scores_CN)):
        left = [c for c in range(len(scores_CN)) if c not in taken]
        of_left = [value_of((sum_N + scores_CN[c]) / (len(taken) + 1)) for c in left]
        best = int(np.argmax(of_left))
        taken.append(left[best])
        values.append(of_left[best])
        sum_N = sum_N + scores_CN[left[best]]
    n = int(np.argmax(values)) + 1
    return taken[:n], values[n - 1], values[0]
