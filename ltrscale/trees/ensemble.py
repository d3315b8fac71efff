"""The mean of several models that differ only in their seed, chosen on validation.

Shapes: N documents, C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ltrscale.bundle import Bundle, TreesArchitecture, load, reading, save_trees
from ltrscale.config import Config
from ltrscale.data.dataset.selection import only_relevant, select
from ltrscale.data.dataset.split import Split
from ltrscale.data.stream.scored import score
from ltrscale.progress import log
from ltrscale.trees.configs import CatBoostConfig, GBDTConfig, LightGBMConfig, XGBoostConfig
from ltrscale.trees.data import read
from ltrscale.trees.targets import Floats


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
    match config:
        case LightGBMConfig():
            settings = "feature_fraction or bagging_fraction"
            draws = config.feature_fraction < 1 or config.bagging_fraction < 1 or config.objective == "rank_xendcg"
        case XGBoostConfig():
            settings, draws = "colsample_bytree or subsample", config.colsample_bytree < 1 or config.subsample < 1
        case CatBoostConfig():
            return
    if not draws:
        raise ValueError(f"{where}: these trees draw nothing at random, all candidates are equal; lower {settings}")


def choose(
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
    bundles = [load(url) for url in candidates]
    labelled = select(validation, labelled=True)
    selection = only_relevant(labelled)
    groups, _ = read(selection, "validation")
    scores_CN = np.stack(
        [
            score(reading(selection, [opened]), opened.scorer(features=selection.features), opened.url).scores_N.numpy()
            for opened in bundles
        ]
    )
    taken, value, alone = forward_selection(
        scores_CN, lambda scores_N: groups.mean_ndcg(scores_N, config.stop_on), most=ensemble.most
    )
    name = f"validation_ndcg@{config.stop_on}"
    models = {f"model-{i}": bundles[c].content for i, c in enumerate(taken)}
    save_trees(
        out,
        models,
        TreesArchitecture(library=config.kind, models=tuple(models), per_query=config.per_query),
        config={**config.model_dump(mode="json"), "ensemble": ensemble.model_dump(mode="json")},
        features=bundles[0].features,
        dataset_hash=bundles[0].dataset_hash,
        read_as=bundles[0].read_as,
        metrics={
            name: value,
            f"{name}_best_single": alone,
            "models": len(taken),
            "trees": sum(int(bundles[c].metrics["trees"] or 0) for c in taken),
            "labelled_groups": bundles[0].metrics["labelled_groups"],
            "validation_groups": labelled.n_groups,
        },
        made_by=made_by,
    )
    log.info("mean of %d of %d models, %s %.4f, the best alone %.4f", len(taken), len(bundles), name, value, alone)
    return load(out)


def forward_selection(
    scores_CN: NDArray[np.float64], value_of: Callable[[Floats], float], *, most: int
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
