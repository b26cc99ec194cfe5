"""Estimators for River keep its conventions, and depend on the newest examples alone."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
from river import checks, datasets, evaluate, metrics, preprocessing
from sklearn.linear_model import Ridge

import mbpa
from mbpa.integrations.river import OnlineClassifier, OnlineRegressor


class QuickClassifier(OnlineClassifier):
    """Fewer examples, for River's longer checks."""

    def __init__(self, k: int = 10, capacity: int = 250) -> None:
        super().__init__(k=k, capacity=capacity)


class QuickRegressor(OnlineRegressor):
    """Fewer examples, for River's longer checks."""

    def __init__(self, k: int = 10, capacity: int = 250) -> None:
        super().__init__(k=k, capacity=capacity)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(QuickClassifier(), id="clf"),
        pytest.param(QuickRegressor(), id="reg", marks=pytest.mark.slow),  # shares most of the code
    ],
)
def test_rivers_own_checks_pass(model: Any) -> None:
    random.seed(0)
    passed = set()
    for check in checks.yield_checks(model):
        if check.__name__ not in passed:  # others are the same check on other data
            check(model.clone())
            passed.add(check.__name__)
    assert len(passed) > 20
    assert not model._unit_test_skips()


@pytest.mark.slow
@pytest.mark.parametrize("model", [OnlineClassifier(), OnlineRegressor()], ids=["clf", "reg"])
def test_rivers_own_checks_pass_with_default_settings(model: Any) -> None:
    random.seed(0)
    checks.check_estimator(model)


@pytest.mark.heavy
def test_progressive_validation_beats_the_majority() -> None:
    model = preprocessing.MinMaxScaler() | OnlineClassifier(k=20, capacity=150)
    stream = datasets.Bananas().take(250)
    accuracy = evaluate.progressive_val_score(stream, model, metrics.Accuracy())
    assert accuracy.get() > 0.7


@pytest.mark.heavy
def test_a_model_is_what_the_newest_examples_make_it() -> None:
    stream = list(datasets.ImageSegments().take(60))
    model, fresh = (OnlineClassifier(k=10, capacity=25) for _ in range(2))
    for place, (x, y) in enumerate(stream):
        model.learn_one(x, y)
        if place >= 35:
            fresh.learn_one(x, y)
        if place == 45:
            model = pickle.loads(pickle.dumps(model))
        model.predict_one(x)
    assert len(model) == len(fresh) == 25
    for x, _ in stream:
        assert model.predict_proba_one(x) == fresh.predict_proba_one(x)


def test_a_regression_with_flat_weights_is_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    model = OnlineRegressor(k=30, prior=0.2, kernel=mbpa.Uniform())
    for row, target in zip(X, y, strict=True):
        model.learn_one(dict(enumerate(row)), target)
    standard, scaled = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    # Squared error is ½(…)² there, weights are 1/30, and the bias has the same prior.
    rows = np.hstack([standard, np.ones((30, 1))])
    oracle = Ridge(alpha=0.2 * 30, fit_intercept=False).fit(rows, scaled)
    query = rng.normal(size=3)
    at = np.append((query - X.mean(0)) / X.std(0), 1)
    expected = oracle.predict(at[None])[0] * y.std() + y.mean()
    assert math.isclose(model.predict_one(dict(enumerate(query))), expected, rel_tol=1e-6)


def test_missing_features_count_as_their_mean_and_unknown_ones_are_ignored() -> None:
    model = OnlineRegressor(k=5)
    for number in range(10):
        model.learn_one({"a": number, "b": number % 3}, number)
    plain = model.predict_one({"a": 2.0, "b": 0.9})
    assert model.predict_one({"a": 2.0, "b": 0.9, "c": 5}) == plain
    mean = model.predict_one({"a": 2.0, "b": np.mean([number % 3 for number in range(10)])})
    for missing in ({"a": 2.0}, {"a": 2.0, "b": None}, {"a": 2.0, "b": math.nan}):
        assert math.isclose(model.predict_one(missing), mean, rel_tol=1e-9)
    model.learn_one({"c": True}, 5.0)  # a feature that appears later
    assert math.isfinite(model.predict_one({"c": False}))


def test_features_that_no_example_has_any_more_take_no_room() -> None:
    model = OnlineClassifier(capacity=4)
    for number in range(20):
        model.learn_one({f"feature {number}": 1.0, "always": number}, number % 2)
    assert model._table.shape == (4, 5)
    assert len(model) == 4


def test_classes_appear_at_any_time_and_leave_with_their_last_example() -> None:
    model = OnlineClassifier(capacity=3)
    assert model.predict_proba_one({"a": 1}) == {}
    assert model.predict_one({"a": 1}) is None
    assert OnlineRegressor().predict_one({"a": 1}) == 0.0
    for place, label in enumerate(["x", None, 7, 7]):
        model.learn_one({"a": place}, label)
        assert label in model.predict_proba_one({"a": 0})
    assert set(model.predict_proba_one({"a": 0})) == {None, 7}
    assert model.predict_one({"a": 3}) == 7


def test_examples_without_features_are_learnt() -> None:
    model = OnlineClassifier()
    for label in ("a", "b", "b"):
        model.learn_one({}, label)
    assert model.predict_one({}) == "b"


@pytest.mark.parametrize("value", ["red", math.inf, [1], 1j, 10**400])
def test_features_that_are_no_numbers_are_refused(value: Any) -> None:
    model = OnlineClassifier()
    with pytest.raises(ValueError, match="features must be finite numbers, booleans, NaN or None"):
        model.learn_one({"a": value}, 1)
    with pytest.raises(ValueError, match="features must be finite numbers"):
        model.predict_one({"a": value})
    assert len(model) == 0


def test_targets_and_settings_are_checked() -> None:
    for wrong in (math.nan, math.inf, "1", None):
        with pytest.raises(ValueError, match="y must be a finite number"):
            OnlineRegressor().learn_one({"a": 1}, wrong)
    with pytest.raises(TypeError, match="unhashable"):
        OnlineClassifier().learn_one({"a": 1}, ["x"])
    with pytest.raises(ValueError, match="k must be at least 1"):
        OnlineClassifier(k=0)
    with pytest.raises(ValueError, match="prior must be a finite number above 0"):
        OnlineRegressor(prior=0)
    with pytest.raises(ValueError, match="capacity must be a whole number"):
        OnlineRegressor(capacity=1.5)  # type: ignore[arg-type]
