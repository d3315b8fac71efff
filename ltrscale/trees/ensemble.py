"""The mean of models that differ only in their seed: all of them, or those that validation chooses.

Shapes: N documents, C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.arrays import Doubles
from ltrscale.bundle import BundleFacts, MetricValue, TreesBundle, load, save_trees, with_tokens_of
from ltrscale.config import Config
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import score_selection
from ltrscale.progress import Report, log
from ltrscale.stages.inputs import BundleUrl
from ltrscale.stages.stage import LabelledStage, Origin
from ltrscale.trees.configs import GBDTConfig
from ltrscale.trees.data import Labelled, read_labelled


class EnsembleConfig(Config):
    """How many models to train, and how many of them to average."""

    candidates: int = Field(10, ge=2, le=1000)
    """Models to choose from: the same settings with seeds s, s + 1, ..."""
    most: int = Field(5, ge=1, le=100)
    """Maximum number of models in the mean; each costs time when documents are scored."""


def check_draws(config: GBDTConfig, *, where: str = "ensemble") -> None:
    """Check that the seed makes a difference, because otherwise all candidates are equal.

    Raises:
        ValueError: it makes no difference.
    """
    if not config.is_random:
        raise ValueError(
            f"{where}: these trees draw nothing at random, all candidates are equal; lower {config.sampling}"
        )


class AverageJob(LabelledStage):
    """Average the scores of runs of the same trees; nothing is chosen."""

    stage: ClassVar = "average"
    bundles: tuple[BundleUrl, ...] = Field(min_length=1, max_length=1000)
    """Bundles of one model each, which differ in their seed."""

    def work(self, origin: Origin, report: Report) -> None:  # noqa: ARG002
        """Judge the mean on the labelled groups of validation, and commit it.

        Raises:
            InputError: a bundle or the data cannot be read.
        """
        bundles = [load(url, TreesBundle) for url in self.bundles]
        if len({opened.content for opened in bundles}) < (n := len(bundles)):
            log.warning("%s: some of the %d runs are equal trees; their settings draw nothing at random", self.out, n)
        judged, stop_on = _Judged.from_bundles(bundles, self.splits.validation), int(bundles[0].config["stop_on"])
        name, value = f"validation_ndcg@{stop_on}", judged.groups.mean_ndcg(judged.scores_CN.mean(axis=0), stop_on)
        metrics: dict[str, MetricValue] = {name: value, "validation_groups": judged.n_groups}
        _save_mean(bundles, self.out, config={**bundles[0].config, "runs": n}, metrics=metrics, made_by=origin)
        log.info("mean of %d models, %s %.4f", n, name, value)


def choose_members(
    config: GBDTConfig,
    ensemble: EnsembleConfig,
    candidates: Sequence[str],
    validation: Split,
    out: str,
    *,
    made_by: Mapping[str, Any],
) -> None:
    """Choose the models whose mean score has the best validation NDCG, and commit only these as a bundle.

    The choice is greedy (Caruana et al. 2004): it starts with the best model; each round adds the model that raises the
    value of the mean most, or lowers it least; the best mean of all rounds counts, the smallest of equal ones, so a
    harmful model is never forced in. Unlike in the paper, each model is taken at most once: the paper's models are of
    many kinds, but these differ only by chance, and weights would fit the noise of the validation groups.

    The candidates are of one library and the same features; `stop_on` of the config is the cut-off of the NDCG.

    Raises:
        InputError: a bundle or the data cannot be read.
    """
    bundles = [load(url, TreesBundle) for url in candidates]
    judged, name = _Judged.from_bundles(bundles, validation), f"validation_ndcg@{config.stop_on}"
    members, value, best_alone = _forward_selection(
        judged.scores_CN, lambda scores_N: judged.groups.mean_ndcg(scores_N, config.stop_on), most=ensemble.most
    )
    _save_mean(
        [bundles[c] for c in members],
        out,
        config={**config.model_dump(mode="json"), "ensemble": ensemble.model_dump(mode="json")},
        metrics={name: value, f"{name}_best_single": best_alone, "validation_groups": judged.n_groups},
        made_by=made_by,
    )
    log.info(
        "mean of %d of %d models, %s %.4f, the best alone %.4f", len(members), len(bundles), name, value, best_alone
    )


class _Judged(NamedTuple):
    """The scores of some models for the validation groups with a relevant document."""

    groups: Labelled
    n_groups: int
    """Labelled groups, including those without a relevant document."""
    scores_CN: Doubles

    @classmethod
    def from_bundles(cls, bundles: Sequence[TreesBundle], validation: Split) -> Self:
        labelled = select(validation, labelled=True)
        selection = only_relevant(labelled)
        groups, _ = read_labelled(selection, "validation")
        scores = []
        for opened in bundles:
            read, scorer = with_tokens_of(selection, [opened]), opened.scorer(features=selection.features)
            scores.append(score_selection(read, scorer, opened.url).scores_N.numpy())
        return cls(groups, labelled.n_groups, np.stack(scores))


def _save_mean(
    bundles: Sequence[TreesBundle],
    out: str,
    *,
    config: Mapping[str, Any],
    metrics: Mapping[str, MetricValue],
    made_by: Mapping[str, Any],
) -> None:
    """Commit the mean of bundles with one model each, which saw the same columns of the same data."""
    first, models = bundles[0], {f"model-{i}": opened.content for i, opened in enumerate(bundles)}
    about = BundleFacts(
        config=config,
        features=first.features,
        dataset_hash=first.dataset_hash,
        read_as=first.read_as,
        present=first.present,
        reference=first.reference,
        metrics={
            **metrics,
            "models": len(models),
            "trees": sum(int(opened.metrics["trees"] or 0) for opened in bundles),
            "labelled_groups": first.metrics["labelled_groups"],
        },
        made_by=made_by,
    )
    save_trees(out, models, first.forest.replace(models=tuple(models)), about)


def _forward_selection(
    scores_CN: NDArray[np.float64], value_of: Callable[[Doubles], float], *, most: int
) -> tuple[list[int], float, float]:
    """Models whose mean score has the highest value, in order; that value; and the value of the best model alone."""
    chosen: list[int] = []
    values: list[float] = []
    sum_N = np.zeros(scores_CN.shape[1])
    while len(chosen) < min(most, len(scores_CN)):
        candidates = [c for c in range(len(scores_CN)) if c not in chosen]
        values_with = [value_of((sum_N + scores_CN[c]) / (len(chosen) + 1)) for c in candidates]
        best = int(np.argmax(values_with))
        chosen.append(candidates[best])
        values.append(values_with[best])
        sum_N = sum_N + scores_CN[candidates[best]]
    n = int(np.argmax(values)) + 1
    return chosen[:n], values[n - 1], values[0]
