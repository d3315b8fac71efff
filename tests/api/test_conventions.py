"""`Ranker` in scikit-learn's ways: its own checks, errors of both worlds, inner arguments, metadata routing."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from nightly import nightly
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError, UnsetMetadataPassedError
from sklearn.model_selection import (
    BaseCrossValidator,
    GridSearchCV,
    GroupKFold,
    GroupShuffleSplit,
    LeaveOneGroupOut,
    StratifiedGroupKFold,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from ltrscale import Ranker, bundle
from ltrscale.api.conventions import as_value_errors
from ltrscale.errors import InputError, UnavailableError

TREES = {"gbdt": {"num_trees": 5, "min_data_in_leaf": 1, "num_threads": 1}}
EXPECTED_FAILURES = {
    "check_fit2d_1sample": "a ranker learns from query groups: the error counts those, the check wants one of samples",
}
"""scikit-learn's checks that a ranker fails, with the reason."""


class FivesOfRows(Ranker):
    """A ranker of queries of five rows each, where none are given: scikit-learn's checks know no groups."""

    def fit(self, X: Any, y: Any = None, *, group: Any = None, **columns: Any) -> "FivesOfRows":
        return super().fit(X, y, group=dealt(X, y) if group is None else group, **columns)

    def predict(self, X: Any, *, group: Any = None, **columns: Any) -> NDArray[np.float64]:
        return super().predict(X, group=fives(X) if group is None else group, **columns)

    def score(self, X: Any, y: Any = None, *, group: Any = None, **columns: Any) -> float:
        return super().score(X, y, group=fives(X) if group is None else group, **columns)


def fives(X: Any) -> NDArray[np.int64]:
    return np.arange(X.shape[0]) // 5


def dealt(X: Any, y: Any) -> NDArray[np.int64]:
    """Lists of five rows or more, to which rows are dealt by their labels: lists of one label would teach no order."""
    if np.ndim(y) != 1 or len(y) != X.shape[0]:  # which the ranker refuses
        return fives(X)
    lists_N = np.empty(len(y), np.int64)
    lists_N[np.argsort(y, kind="stable")] = np.arange(len(y)) % max(len(y) // 5, 1)
    return lists_N


@pytest.mark.slow
@parametrize_with_checks([FivesOfRows("lightgbm", settings=TREES)], expected_failed_checks=lambda _: EXPECTED_FAILURES)
def test_scikit_learns_own_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


RNG = np.random.default_rng(0)
X, QUERY = RNG.normal(size=(240, 3)), np.repeat(np.arange(40), 6)
Y = (X[:, 0] + RNG.normal(0, 0.5, 240) > 0.5).astype(int)
QUERY = RNG.permutation(1000)[QUERY]  # ids, in no order
LENGTHS = np.full(40, 6)


def ranker(**arguments: Any) -> Ranker:
    return Ranker("lightgbm", settings=TREES, **arguments)


@pytest.fixture(scope="module")
def fitted() -> Ranker:
    return ranker().fit(X, Y, group=QUERY)


@pytest.fixture
def routing() -> Iterator[None]:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


WRONG: dict[str, tuple[Callable[[Ranker], Any], str]] = {
    "more features": (
        lambda r: r.predict(np.hstack([X, X]), group=QUERY),
        "^X has 6 features, but Ranker is expecting 3 features as input; give the columns of fit, in its order$",
    ),
    "fewer features": (lambda r: r.score(X[:, :2], Y, group=QUERY), "^X has 2 features, but Ranker is expecting 3"),
    "features of validation": (
        lambda r: clone(r).fit(X, Y, group=QUERY, validation=(np.hstack([X, X]), Y, QUERY)),
        "^validation has 6 features, but Ranker is expecting 3",
    ),
    "names of features": (
        lambda r: r.predict(pd.DataFrame(X, columns=["a", "b", "c"]), group=QUERY),
        "^X: features: no column is named '1'",
    ),
    "a sparse array": (lambda r: r.predict(sparse.csr_array(X), group=QUERY), "^X is a sparse csr_array; .*X.toarray"),
    "a row": (lambda r: r.predict(X[0], group=[1]), r"^X is a ndarray; .* Reshape your data: X.reshape\(1, -1\)"),
    "no features": (lambda r: clone(r).fit(X[:, :0], Y, group=QUERY), r"^X has 0 feature\(s\) \(shape=\(240, 0\)\)"),
    "complex labels": (lambda r: clone(r).fit(X, Y + 1j, group=QUERY), r"^y: Complex data not supported"),
    "labels of two types": (
        lambda r: clone(r).fit(X, np.where(Y == 1, "a", Y.astype(object)), group=QUERY),
        "^y: .*; give all values of the column one type$",
    ),
    "queries of two types": (
        lambda r: r.predict(X, group=np.where(Y == 1, "a", QUERY.astype(object))),
        "^group: .*; give all values of the column one type$",
    ),
    "values of two types": (
        lambda r: clone(r).fit(np.where(X > 1, "a", X.astype(object)), Y, group=QUERY),
        "^X: .*; give all values of the column one type$",
    ),
    "a saved ranker": (lambda _: Ranker.load("no/such/place"), "no/such/place"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_input_is_an_error_of_both_worlds(wrong: str, fitted: Ranker) -> None:
    call, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message) as caught:
        call(fitted)
    assert isinstance(caught.value, InputError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["predict", "score", "save"])
def test_a_ranker_without_a_model_is_not_fitted_in_both_worlds(method: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"predict": (X,), "score": (X, Y), "save": ("somewhere",)}
    with pytest.raises(NotFittedError, match=r"^this Ranker is not fitted; call fit first, or Ranker\.load$") as caught:
        getattr(ranker(), method)(*arguments[method])
    assert isinstance(caught.value, InputError)


def test_an_error_keeps_its_place_and_its_cause() -> None:
    with pytest.raises(ValueError, match="num_trees") as caught:
        ranker().set_params(settings__gbdt__num_trees=0).fit(X, Y, group=QUERY)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.traceback[-1].path.name == "config.py"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as joblib's workers send it


def test_storage_that_cannot_be_reached_is_no_wrong_value() -> None:
    @as_value_errors
    def unreachable() -> None:
        raise UnavailableError("s3://bucket: no answer")

    with pytest.raises(UnavailableError) as caught:
        unreachable()
    assert not isinstance(caught.value, ValueError)


def test_an_array_keeps_its_width_in_copies_and_files(fitted: Ranker, tmp_path: Path) -> None:
    fitted.save(str(tmp_path / "saved"))
    copies = [copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted)), Ranker.load(str(tmp_path / "saved"))]
    for one in copies:
        np.testing.assert_array_equal(one.predict(X, group=QUERY), fitted.predict(X, group=QUERY))
        with pytest.raises(ValueError, match="X has 4 features, but Ranker is expecting 3"):
            one.predict(np.hstack([X, X[:, :1]]), group=QUERY)


@pytest.mark.slow
def test_numbers_of_numpy_in_arguments_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """A search of scikit-learn sets values of its grid, which may be an array."""
    one = ranker(seed=np.int64(3)).set_params(settings__gbdt__num_trees=np.arange(3, 6)[0])
    one.fit(X, Y, group=QUERY, features=np.array(["1", "3"])).save(str(tmp_path / "saved"))
    loaded = Ranker.load(str(tmp_path / "saved"))
    assert (loaded.seed, loaded.settings, loaded.columns_["features"]) == (3, one.settings, ["1", "3"])
    np.testing.assert_array_equal(loaded.predict(X, group=QUERY), one.predict(X, group=QUERY))


def test_numbers_of_more_digits_are_read_as_doubles(fitted: Ranker) -> None:
    scores_N = fitted.predict(X.astype(np.longdouble), group=QUERY)
    np.testing.assert_array_equal(scores_N, fitted.predict(X, group=QUERY))


@pytest.mark.slow
def test_some_columns_of_an_array_may_be_features() -> None:
    some = ranker().fit(X, Y, group=QUERY, features=["1", "3"])
    assert some.n_features_in_ == 2
    changed = X.copy()
    changed[:, 1] = 7
    np.testing.assert_array_equal(some.predict(changed, group=QUERY), some.predict(X, group=QUERY))


@pytest.mark.slow
def test_values_inside_arguments_have_names() -> None:
    shared = {"gbdt": {"num_trees": 5, "num_threads": 1}}
    one = Ranker(settings=shared)
    assert one.get_params()["settings__gbdt__num_trees"] == 5
    assert not [name for name in one.get_params(deep=False) if "__" in name]
    one.set_params(settings__gbdt__num_trees=3, settings__gbdt__num_leaves=4, prepare__max_group=100, seed=2)
    assert one.settings == {"gbdt": {"num_trees": 3, "num_leaves": 4, "num_threads": 1}}
    assert (one.prepare, one.seed) == ({"max_group": 100}, 2)
    assert shared == {"gbdt": {"num_trees": 5, "num_threads": 1}}
    assert Ranker().set_params(**one.get_params()).get_params() == one.get_params() == clone(one).get_params()
    same = Ranker(settings=one.settings, prepare={"max_group": 100}, seed=2)
    models = [model_of(each.fit(X, Y, group=QUERY)) for each in (one, same, Ranker(settings=shared, seed=2))]
    assert models[0] == models[1] != models[2]
    one.set_params(settings__gbdt={"num_trees": 1}, method="xgboost", settings__gbdt__max_leaves=2)
    assert one.settings == {"gbdt": {"num_trees": 1, "max_leaves": 2}}


def model_of(trained: Ranker) -> bytes:
    return bundle.load(trained.bundle_).content


UNKNOWN = {
    "settings__gbdt__num_tree": "settings: gbdt.num_tree: unknown key; did you mean 'gbdt.num_trees'",
    "settings__gbtd__num_trees": "settings: gbtd: unknown key; did you mean 'gbdt'",
    "settings__gbdt__max_leaves": "gbdt.max_leaves: a key of kind xgboost, and gbdt.kind is lightgbm",
    "setings__gbdt__num_trees": "no argument 'setings__gbdt__num_trees'; did you mean 'settings'",
    "prepare__max_grup": "prepare: max_grup: unknown key; did you mean 'max_group'",
    "metric__k": "no argument 'metric__k'; did you mean 'metric'",
    "settings__": "no argument 'settings__'",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_inside_is_an_error_that_changes_nothing(name: str) -> None:
    one = ranker()
    before = one.get_params()
    with pytest.raises(ValueError, match=UNKNOWN[name]) as caught:
        one.set_params(**{"seed": 3, name: 1})
    assert isinstance(caught.value, InputError)
    assert one.get_params() == before


SPLITTERS = {
    "group k-fold": GroupKFold(3),
    "shuffled groups": GroupShuffleSplit(2, test_size=0.3, random_state=0),
    "stratified groups": StratifiedGroupKFold(2, shuffle=True, random_state=0),
    "a group for each fold": LeaveOneGroupOut(),
}


@pytest.mark.slow
@pytest.mark.usefixtures("routing")
@pytest.mark.parametrize("splitter", ["group k-fold", *map(nightly, [*SPLITTERS][1:])])
def test_cross_validation_of_arrays_is_that_by_hand(splitter: str) -> None:
    folds: BaseCrossValidator = SPLITTERS[splitter]
    groups = QUERY % 3 if splitter == "a group for each fold" else QUERY
    asked = ranker().set_fit_request(group=True).set_score_request(group=True)
    values = cross_val_score(asked, X, Y, cv=folds, params={"group": QUERY, "groups": groups})
    by_hand = [
        ranker().fit(X[train], Y[train], group=QUERY[train]).score(X[test], Y[test], group=QUERY[test])
        for train, test in folds.split(X, Y, groups)
    ]
    assert values.tolist() == by_hand
    assert len({*by_hand}) > 1


@pytest.mark.nightly
@pytest.mark.usefixtures("routing")
def test_a_grid_of_inner_values_is_searched_on_arrays() -> None:
    grid = {"settings__gbdt__num_trees": [1, 20], "settings__gbdt__num_leaves": [4]}
    search = GridSearchCV(ranker(), grid, cv=GroupKFold(2), error_score="raise")
    search.fit(X, Y, group=QUERY, groups=QUERY)
    for params, found in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
        one = clone(search.estimator).set_params(**params)
        values = cross_val_score(one, X, Y, cv=GroupKFold(2), params={"group": QUERY, "groups": QUERY})
        assert found == values.mean()
    assert len({*search.cv_results_["mean_test_score"]}) > 1
    best = ranker().set_params(**search.best_params_).fit(X, Y, group=QUERY)
    np.testing.assert_array_equal(search.best_estimator_.predict(X, group=QUERY), best.predict(X, group=QUERY))
    assert search.score(X, Y, group=QUERY) == best.score(X, Y, group=QUERY)


@pytest.mark.slow
@pytest.mark.usefixtures("routing")
def test_one_array_can_be_the_folds_groups_and_the_queries() -> None:
    asked = ranker().set_fit_request(group="groups").set_score_request(group="groups")
    values = cross_val_score(asked, X, Y, cv=GroupKFold(3), params={"groups": QUERY})
    both = cross_val_score(ranker(), X, Y, cv=GroupKFold(3), params={"group": QUERY, "groups": QUERY})
    assert values.tolist() == both.tolist()
    for one in (clone(asked), pickle.loads(pickle.dumps(asked)), copy.deepcopy(asked)):
        assert str(one.get_metadata_routing()) == str(asked.get_metadata_routing())


@pytest.mark.usefixtures("routing")
def test_lengths_of_groups_are_no_ids_of_rows_and_the_error_says_so() -> None:
    with pytest.raises(ValueError, match="group fits no 120 rows; give a query id for each row"):
        cross_val_score(
            ranker(), X, Y, cv=GroupKFold(2), params={"group": LENGTHS, "groups": QUERY}, error_score="raise"
        )


@pytest.mark.slow
@pytest.mark.usefixtures("routing")
def test_routing_takes_the_names_of_columns_too() -> None:
    frame = pd.DataFrame(X, columns=["1", "2", "3"]).assign(search=QUERY, bought=Y)
    names = {"query": "search", "label": "bought"}
    values = cross_val_score(ranker(), frame, cv=GroupKFold(3), params={"groups": QUERY, **names})
    arrays = cross_val_score(ranker(), X, Y, cv=GroupKFold(3), params={"group": QUERY, "groups": QUERY})
    assert values.tolist() == arrays.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("routing")
def test_a_pipeline_passes_groups_on() -> None:
    scaled = make_pipeline(StandardScaler(), ranker()).fit(X, Y, group=QUERY)
    scaled_NF = StandardScaler().fit_transform(X)
    by_hand = ranker().fit(scaled_NF, Y, group=QUERY)
    np.testing.assert_array_equal(scaled.predict(X, group=QUERY), by_hand.predict(scaled_NF, group=QUERY))
    assert scaled.score(X, Y, group=QUERY) == by_hand.score(scaled_NF, Y, group=QUERY)
    with pytest.raises(UnsetMetadataPassedError, match="sample_weight"):
        scaled.score(X, Y, group=QUERY, sample_weight=np.ones(len(X)))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("routing")
def test_folds_may_run_in_processes_of_their_own() -> None:
    one, two = (
        cross_val_score(
            ranker(), X, Y, cv=GroupKFold(2), params={"group": QUERY, "groups": QUERY}, n_jobs=jobs, error_score="raise"
        )
        for jobs in (1, 2)
    )
    assert one.tolist() == two.tolist()
