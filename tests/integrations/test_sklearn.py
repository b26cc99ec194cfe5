"""Estimators for scikit-learn keep its conventions, learn at once, and forget exactly."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import mbpa
from mbpa.integrations.sklearn import MbPAClassifier, MbPARegressor

QUICK = {"epochs": 5, "random_state": 0}
X, Y = load_iris(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(X))
X, Y = X[ORDER], Y[ORDER]
OLD = np.flatnonzero(Y < 2)[:40]
NEW = np.flatnonzero(Y == 2)[:10]
TESTED = np.arange(100, 150)


def classifier(**settings: Any) -> MbPAClassifier:
    return MbPAClassifier(**{**QUICK, **settings})


def regressor(**settings: Any) -> MbPARegressor:
    return MbPARegressor(**{**QUICK, **settings})


def assert_same(one: Any, other: Any, queries: Any = X[TESTED]) -> None:
    """Predictions, classes and the number of examples are equal to the bit."""
    predict = "predict_log_proba" if isinstance(one, MbPAClassifier) else "predict"
    ours, theirs = (getattr(each, predict)(queries) for each in (one, other))
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)
    if isinstance(one, MbPAClassifier):
        assert one.classes_.dtype == other.classes_.dtype
        assert np.array_equal(one.classes_, other.classes_)
        assert np.array_equal(one.predict(queries), other.predict(queries))
    assert len(one.example_ids_) == len(other.example_ids_)


# Conventions


@pytest.mark.heavy
@pytest.mark.parametrize("make", [classifier, regressor])
def test_scikit_learns_own_checks_pass(make: Any) -> None:
    results = check_estimator(make(epochs=30, hidden_layer_sizes=16), on_skip=None)
    skipped = {each["check_name"] for each in results if each["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # needs a variable set before scipy is imported
    assert not {each["status"] for each in results} - {"passed", "skipped"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MbPAClassifier", "MbPARegressor"])
def test_no_check_is_skipped_with_default_settings(name: str) -> None:
    code = (
        "from sklearn.utils.estimator_checks import check_estimator\n"
        f"from mbpa.integrations.sklearn import {name}\n"
        f"results = check_estimator({name}())\n"
        "assert {each['status'] for each in results} == {'passed'}\n"
    )
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.heavy
def test_it_works_in_a_pipeline_a_grid_search_and_cross_validation() -> None:
    pipeline = make_pipeline(StandardScaler().set_output(transform="pandas"), classifier())
    frame = pd.DataFrame(X, columns=list("abcd"))
    search = GridSearchCV(
        pipeline,
        {"mbpaclassifier__k": [5, 30], "mbpaclassifier__kernel": [None, mbpa.Gaussian(1.0)]},
        cv=2,
    ).fit(frame[:100], Y[:100], mbpaclassifier__ids=np.arange(100))
    assert search.score(frame[100:], Y[100:]) > 0.85
    assert list(search.best_estimator_[-1].feature_names_in_) == list("abcd")
    data = load_diabetes(return_X_y=True)
    assert cross_val_score(regressor(alpha=0.1, prior=1.0), *data, cv=2).mean() > 0.2


@pytest.mark.heavy
def test_a_seed_decides_everything_and_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    torch.manual_seed(1)
    one = classifier().fit(X[:60], Y[:60])
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert_same(one, classifier().fit(X[:60], Y[:60]))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.random.set_rng_state(before)
    other = classifier(random_state=1).fit(X[:60], Y[:60])
    assert not np.array_equal(one.predict_proba(X), other.predict_proba(X))


@pytest.mark.heavy
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_predict_the_same_and_live_on_their_own(copied: Any) -> None:
    for model, new in ((classifier(), Y[NEW]), (regressor(), X[NEW, 0])):
        model.fit(X[OLD], Y[OLD] if new is not X[NEW, 0] else X[OLD, 0])
        model.partial_fit(X[NEW], new)
        twin = copied(model)
        assert_same(model, twin)
        twin.forget(twin.example_ids_[-3:])
        assert len(model.example_ids_) == len(OLD) + len(NEW)
        assert_same(copied(twin), twin)
        assert not hasattr(clone(model), "model_")


# Learning


def test_partial_fit_teaches_a_new_class_at_once_and_trains_nothing() -> None:
    model = classifier(epochs=50).fit(X[OLD], Y[OLD])
    weights = [each.clone() for each in model.model_.head.parameters()]
    is_new = Y[TESTED] == 2
    assert not (model.predict(X[TESTED]) == 2).any()
    model.partial_fit(X[NEW], Y[NEW])
    assert (model.predict(X[TESTED][is_new]) == 2).mean() > 0.6
    assert model.score(X[TESTED][~is_new], Y[TESTED][~is_new]) > 0.9
    for old, new in zip(weights, model.model_.head.parameters(), strict=True):
        assert torch.equal(new[:2], old)
        assert not new[2].any()


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (np.array(["ash", "birch", "a long name"]), None),
        (np.array(["ash", "birch", "a long name"], dtype=object), object),
        (np.array([7, -1, 300], dtype=np.int16), np.int64),
        (np.array([2.0, 1.0, 5.0]), np.float64),
    ],
)
def test_labels_of_any_kind_are_returned_as_given_in_sorted_columns(names: Any, dtype: Any) -> None:
    model = classifier(epochs=40).fit(X[OLD], names[Y[OLD]])
    model.partial_fit(X[NEW], names[Y[NEW]])
    assert model.classes_.tolist() == sorted(names.tolist())
    assert dtype is None or model.classes_.dtype == dtype
    predicted = model.predict(X[TESTED])
    assert (predicted == names[Y[TESTED]]).mean() > 0.7
    columns = model.predict_proba(X[TESTED]).argmax(1)
    assert np.array_equal(model.classes_[columns], predicted)


def test_booleans_are_labels() -> None:
    model = classifier(epochs=30).fit(X[OLD], Y[OLD] == 1)
    assert model.predict(X[OLD]).dtype == bool
    assert model.score(X[OLD], Y[OLD] == 1) > 0.9


def test_labels_of_another_kind_are_refused_and_change_nothing() -> None:
    model = classifier().fit(X[OLD], Y[OLD])
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="y must hold numbers, like that of fit, got strings"):
        model.partial_fit(X[NEW], ["a"] * len(NEW))
    with pytest.raises(ValueError, match="y must hold numbers, like that of fit, got booleans"):
        model.partial_fit(X[NEW], np.ones(len(NEW), bool))
    with pytest.raises(ValueError, match="ids must be one for each of the 10 rows"):
        classifier().fit(X[NEW], Y[NEW], ids=[1, 2])
    with pytest.raises(ValueError, match="prior must be"):
        model.set_params(prior=-1).partial_fit(X[NEW], Y[NEW], classes=[7])
    with pytest.raises(ValueError, match="prior must be"):
        model.forget([0], allow_trained=True)
    assert_same(model.set_params(prior=0.01), twin)


def test_declared_classes_have_columns_and_stay() -> None:
    model = classifier().partial_fit(X[OLD], Y[OLD], classes=[0, 1, 2, 9])
    assert model.classes_.tolist() == [0, 1, 2, 9]
    assert model.partial_fit(X[NEW], Y[NEW], classes=[5]).classes_.tolist() == [0, 1, 2, 5, 9]
    model.forget(model.example_ids_[-len(NEW) :])
    assert model.classes_.tolist() == [0, 1, 2, 5, 9]
    assert np.allclose(model.predict_proba(X).sum(1), 1)


def test_the_first_partial_fit_is_fit() -> None:
    assert_same(classifier().partial_fit(X, Y), classifier().fit(X, Y))
    targets = np.stack([X[:, 0], Y], 1)
    one, other = regressor().partial_fit(X, targets), regressor().fit(X, targets)
    assert one.predict(X).shape == targets.shape
    assert_same(one, other)


def test_beyond_the_capacity_fit_keeps_a_sample_and_partial_fit_the_newest() -> None:
    by_class = np.argsort(Y, kind="stable")
    model = classifier(capacity=60).fit(X[by_class], Y[by_class])
    kept = np.array(model.example_ids_)
    assert len(kept) == 60
    assert set(Y[by_class][kept]) == {0, 1, 2}
    model.partial_fit(X[:20], Y[:20])
    assert model.example_ids_ == [*kept[20:], *range(150, 170)]
    assert model.partial_fit(X[:100], Y[:100]).example_ids_ == list(range(210, 270))


# Forgetting


@pytest.mark.heavy
def test_forgetting_leaves_no_trace_of_what_partial_fit_was_given() -> None:
    model, never = (classifier().fit(X[OLD], Y[OLD]) for _ in range(2))
    model.partial_fit(X[NEW], Y[NEW]).forget(range(len(OLD), len(OLD) + len(NEW)))
    assert_same(model, never)
    assert model.classes_.tolist() == [0, 1]
    for each in (model, never):
        each.partial_fit(X[NEW[:3]], Y[NEW[:3]])
    assert_same(model, never)


def test_ids_are_the_users_own_and_may_be_shared() -> None:
    people = pd.Series(["ann", "bob"] * 5)
    model = classifier().fit(X[OLD], Y[OLD], ids=[f"row {each}" for each in OLD])
    model.partial_fit(X[NEW], Y[NEW], ids=people)
    model.forget(["bob"])
    never = classifier().fit(X[OLD], Y[OLD]).partial_fit(X[NEW[::2]], Y[NEW[::2]])
    assert_same(model, never)
    assert model.example_ids_[-5:] == ["ann"] * 5
    with pytest.raises(ValueError, match=r"ids must be those of stored examples, got \['bob'\]"):
        model.forget(["ann", "bob"])
    with pytest.raises(ValueError, match="ids must be given in every call since fit or in none"):
        model.partial_fit(X[NEW], Y[NEW])
    for wrong in ("ann", 3, [["ann"]]):
        with pytest.raises(ValueError, match="ids must be"):
            model.forget(wrong)


def test_what_trained_the_network_is_not_forgotten_in_silence() -> None:
    model = regressor().fit(X[:30], Y[:30])
    with pytest.raises(ValueError, match="got 2 that the network was trained with: call fit"):
        model.forget([3, 4])
    assert len(model.example_ids_) == 30
    model.forget(range(30), allow_trained=True)
    assert model.example_ids_ == []
    head, trunk = model.model_.head, model._trunk
    features = torch.from_numpy((X - model._means) / model._spreads)
    expected = head(trunk(features))[:, 0].numpy() * Y[:30].std() + Y[:30].mean()
    assert np.allclose(model.predict(X), expected)  # the network alone


@pytest.mark.heavy
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), is_classifier=st.booleans())
def test_any_sequence_of_calls_equals_one_estimator_that_got_what_is_left(
    data: st.DataObject, is_classifier: bool
) -> None:
    make = classifier if is_classifier else regressor
    targets = np.array(["x", "yy", "z"])[Y] if is_classifier else X[:, 1] * 10
    rows = data.draw(st.integers(1, 40))
    model = make(epochs=1, k=5).fit(X[:rows], targets[:rows])
    fresh = copy.deepcopy(model)
    left: list[tuple[int, int]] = []  # ids and rows
    given = rows
    for _ in range(data.draw(st.integers(1, 6))):
        action = data.draw(st.sampled_from(["add", "forget", "pickle", "copy"]))
        if action == "add":
            chosen = data.draw(st.lists(st.integers(0, 149), min_size=1, max_size=5))
            model.partial_fit(X[chosen], targets[chosen])
            left += [(given + place, row) for place, row in enumerate(chosen)]
            given += len(chosen)
        elif action == "forget" and left:
            gone = data.draw(st.sets(st.sampled_from([each for each, _ in left])))
            model.forget(gone)
            left = [pair for pair in left if pair[0] not in gone]
        elif action == "pickle":
            model = pickle.loads(pickle.dumps(model))
        else:
            model = copy.deepcopy(model)
    if left:
        chosen = [row for _, row in left]
        fresh.partial_fit(X[chosen], targets[chosen])
    assert model.example_ids_[len(model.example_ids_) - len(left) :] == [each for each, _ in left]
    assert_same(model, fresh, X[:10])


# Odd inputs


def test_one_class_one_row_and_constant_features_work() -> None:
    model = classifier().fit(X[:1], ["only"])
    assert model.predict(X[:5]).tolist() == ["only"] * 5
    assert model.predict_proba(X[:5]).tolist() == [[1.0]] * 5
    model.partial_fit(X[1:3], ["other", "only"])
    assert model.predict(X[1:2]).tolist() == ["other"]
    constant = np.hstack([X, np.full((len(X), 1), 1e9), np.zeros((len(X), 1))])
    assert classifier(epochs=30).fit(constant, Y).score(constant, Y) > 0.9
    flat = regressor().fit(X, np.full(len(X), 7.0))
    assert np.allclose(flat.predict(X), 7, atol=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e300])
def test_features_and_targets_of_any_size_work(scale: float) -> None:
    plain = classifier(epochs=20).fit(X, Y)
    scaled = classifier(epochs=20).fit(X * scale, Y)
    assert np.allclose(scaled.predict_proba(X * scale), plain.predict_proba(X), atol=1e-3)
    assert np.isfinite(plain.predict_proba(X * scale)).all()
    values = regressor().fit(X, X[:, 0] * scale).predict(X)
    assert np.allclose(values / scale, regressor().fit(X, X[:, 0]).predict(X), atol=1e-3)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, bool, object])
def test_features_of_any_numeric_type_work(dtype: Any) -> None:
    typed = (X * 10).astype(dtype)
    plain = typed.astype(np.float64)
    assert_same(classifier().fit(typed, Y), classifier().fit(plain, Y), plain)


def test_what_cannot_be_learnt_is_refused() -> None:
    model = classifier().fit(X, Y)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="contains"):
            model.partial_fit([[bad, 0, 0, 0]], [0])
        with pytest.raises(ValueError, match="contains"):
            model.predict([[bad, 0, 0, 0]])
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        model.predict(sparse.csr_matrix(X))
    with pytest.raises(ValueError, match="X has 3 features"):
        model.partial_fit(X[:, :3], Y)
    with pytest.raises(ValueError, match="Unknown label type"):
        model.partial_fit(X[:2], [0.5, 1.5])
    with pytest.raises(NotFittedError):
        classifier().forget([0])
    with pytest.warns(DataConversionWarning):
        model.partial_fit(X[:5], Y[:5, None])
    with pytest.raises(ValueError, match="as in fit, got"):
        regressor().fit(X, Y).partial_fit(X, np.stack([Y, Y], 1))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"hidden_layer_sizes": (8, -1)}, "hidden_layer_sizes must be at least 1"),
        ({"alpha": -1}, "alpha must be a finite number, not negative, got -1"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"learning_rate": np.nan}, "learning_rate must be a finite number"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"prior": 0}, "prior must be a finite number above 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_fit(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(**setting).fit(X, Y)


def test_explanations_name_the_neighbours() -> None:
    model = classifier(k=3).fit(X[:50], Y[:50])
    neighbors = model.explain(X[10:11]).neighbors
    assert neighbors is not None
    assert model.example_ids_[int(neighbors.ids[0, 0])] == 10


def test_labels_that_another_type_cannot_hold_are_refused() -> None:
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = (X[:, 0] > 0).astype(int)
    with pytest.raises(ValueError, match=r"labels must be of type int64.*9223372036854775813"):
        MbPAClassifier(epochs=1).fit(X, np.where(y == 1, np.uint64(2**63 + 5), np.uint64(3)))
    model = MbPAClassifier(epochs=1, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match=r"labels must be of type int64.*\[0\.5, 2\.7\]"):
        model.partial_fit(X[:2], y[:2], classes=[0.5, 1.0, 2.7])
    assert model.classes_.tolist() == [0, 1]


def test_a_refused_call_changes_nothing() -> None:
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = (X[:, 0] > 0).astype(int)
    model = MbPAClassifier(epochs=1, random_state=0).fit(X, np.array(["no", "yes"])[y])
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match="ids must be one for each"):
        model.fit(X[:, :2], np.array(["A", "B"])[y], ids=[1])
    assert model.classes_.tolist() == ["no", "yes"]
    assert np.array_equal(model.predict_proba(X), before)
    with pytest.raises(ValueError, match="k must"):
        model.set_params(k=0).partial_fit(X[:3], ["yes"] * 3)
    assert model.set_params(k=5).partial_fit(X[:1], ["yes"]).example_ids_[-1] == 40


@pytest.mark.heavy
@pytest.mark.parametrize("setting", [{"k": 3}, {"prior": 5.0}, {"kernel": mbpa.Uniform()}])
def test_settings_of_predictions_may_change_after_fit(setting: dict[str, Any]) -> None:
    rows, labels = load_iris(return_X_y=True)
    before = MbPAClassifier(epochs=3, random_state=0).fit(rows, labels)
    expected = MbPAClassifier(epochs=3, random_state=0, **setting).fit(rows, labels)
    changed = copy.deepcopy(before).set_params(**setting)
    for each in (changed, pickle.loads(pickle.dumps(changed)), copy.deepcopy(changed)):
        assert np.array_equal(each.predict_proba(rows), expected.predict_proba(rows))
        assert str(each.explain(rows[:2])) == str(expected.explain(rows[:2]))
    assert not np.array_equal(before.predict_proba(rows), expected.predict_proba(rows))


def test_an_estimator_with_a_setting_out_of_range_can_be_loaded_and_mended() -> None:
    rows, labels = load_iris(return_X_y=True)
    model = MbPAClassifier(epochs=3, random_state=0).fit(rows, labels)
    expected = model.predict_proba(rows)
    loaded = pickle.loads(pickle.dumps(model.set_params(k=0)))
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        loaded.predict(rows)
    assert np.array_equal(loaded.set_params(k=50).predict_proba(rows), expected)


@pytest.mark.heavy
def test_an_estimator_goes_on_in_another_process(tmp_path: Path) -> None:
    rows, labels = load_iris(return_X_y=True)
    model = MbPAClassifier(epochs=3, random_state=0).fit(rows[:100], labels[:100])
    model.partial_fit(rows[100:105], labels[100:105])
    (tmp_path / "model").write_bytes(pickle.dumps((model, rows, labels)))
    program = """
import pickle
model, rows, labels = pickle.load(open("model", "rb"))
found = [model.predict_proba(rows)]
model.partial_fit(rows[105:110], labels[105:110])
found += [model.predict_proba(rows), model.example_ids_]
found += [model.forget(model.example_ids_[-5:]).predict_proba(rows)]
pickle.dump(found, open("found", "wb"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    before, after, ids, forgotten = pickle.loads((tmp_path / "found").read_bytes())
    assert np.array_equal(before, model.predict_proba(rows))
    assert np.array_equal(forgotten, before)
    model.partial_fit(rows[105:110], labels[105:110])
    assert np.array_equal(after, model.predict_proba(rows))
    assert ids == model.example_ids_
