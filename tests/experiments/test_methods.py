"""Laws of all methods of a pipeline."""

from contextlib import nullcontext
from typing import Any

import pytest
from nightly import nightly

from ltrscale import bundle
from ltrscale.config import by_kind
from ltrscale.data.dataset.selection import select
from ltrscale.data.dataset.split import Splits
from ltrscale.data.stream.batches import iterate
from ltrscale.experiments.methods.base import Method, SeedRun, check_methods
from ltrscale.experiments.methods.composed import AnyMethod
from ltrscale.runtime.workers import ONE

SMALL: dict[str, dict[str, Any]] = {
    "gbdt": {"gbdt": {"num_trees": 10, "feature_fraction": 0.5}},
    "semi_gbdt": {"semi": {"gbdt": {"num_trees": 10}, "pca": 2}},
    "neural": {"finetune": {"head_epochs": 0, "epochs": 1}},
    "tuned": {"of": "gbdt", "space": {"gbdt.num_leaves": {"choices": [4, 8]}}, "trials": 2},
    "combined": {"parts": ["neural", "other"], "combine": {"how": "mean"}},
    "ensemble": {"of": "neural", "runs": 2},
    "blend": {"members": ["gbdt", "neural", "feature"]},
    "self_trained": {"of": "gbdt", "runs": 1, "student": {"kind": "regression"}},
    "stack": {"members": ["gbdt"], "stack": {"folds": 2, "gbdt": {"num_trees": 10}}},
}
"""Settings that train in a moment; the kinds that are not here train as they are by default."""
KINDS = by_kind(AnyMethod)


@pytest.fixture(scope="module")
def run(synthetic_dataset: str, tmp_path_factory: pytest.TempPathFactory) -> SeedRun:
    """A run of a method of each kind."""
    values = {
        "train": {"data": synthetic_dataset, "periods": ["2026-W01..2026-W02"]},
        "validation": {"data": synthetic_dataset, "periods": ["2026-W03"]},
    }
    splits = Splits.model_validate(values)
    feature = select(splits.train, labelled=True).features[0].name
    settings = {**SMALL, "feature": {"feature": feature}}
    methods: dict[str, Method] = {kind: of.model_validate(settings.get(kind, {})) for kind, of in KINDS.items()}
    methods["other"] = methods["neural"]
    check_methods(methods, ONE)
    return SeedRun(methods, splits, 1, ONE, str(tmp_path_factory.mktemp("methods")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nightly(kind) if kind == "self_trained" else kind for kind in KINDS])
def test_a_method_commits_a_model_that_scores_and_is_trained_once(kind: str, run: SeedRun) -> None:
    model = bundle.load(run.model(kind))
    assert bundle.content_hash(run.model(kind)) == bundle.content_hash(model.url)
    selection = select(run.splits.validation, labelled=True)
    groups = next(iterate(selection, docs_per_batch=1 << 16))
    assert model.scorer(features=selection.features)(groups).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_says_where_tables_sort_it_and_what_may_be_built_on_it(kind: str, run: SeedRun) -> None:
    method = run.methods[kind]
    assert method.about(run.methods).family
    assert {*method.built_on()} <= run.methods.keys()
    for building in ({"kind": "ensemble", "of": kind}, {"kind": "stack", "members": [kind]}):
        made = KINDS[str(building["kind"])].model_validate(building)
        is_allowed = method.is_one_model if building["kind"] == "ensemble" else method.can_be_member
        with nullcontext() if is_allowed else pytest.raises(ValueError, match=r"^methods\.new"):
            made.check("methods.new", "new", run.methods)
