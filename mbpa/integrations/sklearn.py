"""Estimators for scikit-learn (extra `sklearn`): a small network with an episodic memory.

`fit` trains the network and writes the examples to the memory. `partial_fit` only writes: what it
is given is known at once, and `forget` takes it back without a trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mbpa.errors import MissingExtraError
from mbpa.integrations.sklearn_base import MemoryEstimator
from mbpa.integrations.tabular import make_zero_linear, measure_columns

try:
    from sklearn.base import ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data
except ImportError as error:
    raise MissingExtraError("scikit-learn 1.6 or newer", "sklearn") from error

__all__ = ["MbPAClassifier", "MbPARegressor"]


class MbPAClassifier(ClassifierMixin, MemoryEstimator):  # type: ignore[misc]  # sklearn has no types
    """A classifier that learns new examples and new classes at once, and can forget them.

    `fit` trains a small network on standardised features. `partial_fit` writes examples to a
    memory, without training. For each query the nearest examples are read, a copy of the network's
    last layer is adapted to them, and its prediction is returned (`mbpa.Adapted`).

    Args:
        hidden_layer_sizes: units of each hidden layer. The last layer sees the features, too, so
            that `()` is a linear model.
        alpha: strength of the L2 penalty on the weights while the network is trained. With noisy
            targets, a larger one is better.
        epochs: passes over the rows in `fit`.
        learning_rate: of Adam in `fit`; it falls linearly to zero.
        batch_size: rows per step in `fit`. Default: a twentieth of all, from 32 to 1024.
        k: number of nearest examples to adapt to.
        prior: cost of moving the last layer (`mbpa.MAP`), above 0. With a smaller one, predictions
            follow the nearest examples more closely; with a large one, they are the network's.
        kernel: weights the nearest examples by their distance. Default:
            `mbpa.InverseDistance()`, the paper's, which did better in trials than more local ones.
        capacity: maximum number of examples in the memory. If `fit` gets more, it keeps a random
            sample; afterwards the oldest give way.
        random_state: seed of the initial weights, of the order of rows and of the sample.

    Attributes:
        classes_: the classes in ascending order: those of `fit`, those declared by `classes=`, and
            those of examples in the memory.
        n_features_in_: number of features.
        feature_names_in_: names of the features, if `fit` got a data frame with names.
        example_ids_: ids of the examples in the memory, oldest first.
        model_: the `mbpa.MbPA`. Its keys are not the features.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from mbpa.integrations.sklearn import MbPAClassifier
        >>> X, y = load_iris(return_X_y=True, as_frame=True)
        >>> model = MbPAClassifier(random_state=0).fit(X[:100], y[:100])
        >>> model.classes_
        array([0, 1])
        >>> model.partial_fit(X[100:103], y[100:103]).classes_
        array([0, 1, 2])
        >>> model.forget([100, 101, 102]).classes_
        array([0, 1])
    """

    _loss = "cross_entropy"

    def fit(self, X: ArrayLike, y: ArrayLike, ids: Iterable[Hashable] | None = None) -> Self:
        """Train the network on these examples and write them to the memory.

        Everything learnt before is discarded.

        Args:
            X: shape (n_samples, n_features), dense and finite.
            y: labels, shape (n_samples,): integers, strings or booleans.
            ids: an id for each example, to pass to `forget`. Several examples may share one, such
                as that of the person that they come from. Default: 0, 1, 2, …
        """
        with self._undo_on_error():
            rows, given = validate_data(self, X, y, dtype=np.float64)
            check_classification_targets(given)
            labels = _parse_labels(given, None)
            self._trained_classes = self._declared_classes = self.classes_ = np.unique(labels)
            self._fit(rows, labels, ids)
        return self

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        ids: Iterable[Hashable] | None = None,
    ) -> Self:
        """Write examples to the memory, without training. Their classes may be new.

        On an estimator that is not fitted, this is `fit`: the network is trained on these examples
        and never again, so let them be many.

        Args:
            X: shape (n_samples, n_features), dense and finite.
            y: labels, shape (n_samples,).
            classes: classes to include in `classes_` even if they have no examples. Not needed.
            ids: as for `fit`; to be given in every call since `fit` or in none. By default the
                numbering continues.
        """
        if hasattr(self, "_examples"):
            rows, given = validate_data(self, X, y, dtype=np.float64, reset=False)
            check_classification_targets(given)
            labels = _parse_labels(given, self._trained_classes.dtype)
            with self._undo_on_error():
                self._declared_classes = self._parse_declared(classes)
                self._add(rows, labels, ids)
            return self
        with self._undo_on_error():
            self.fit(X, y, ids)
            self._declared_classes = self._parse_declared(classes)
            self._set_examples(self._examples)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each row.

        Args:
            X: rows of features (n_samples, n_features).
        """
        chosen = self._predict(X).argmax(1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return probabilities (n_samples, n_classes), with columns in the order of `classes_`.

        Args:
            X: rows of features (n_samples, n_features).
        """
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the logarithm of `predict_proba`, which does not underflow.

        Args:
            X: rows of features (n_samples, n_features).
        """
        return self._predict(X)

    def _find_classes(self) -> None:
        found = np.unique(np.concatenate([self._declared_classes, self._examples.targets]))
        # The type of strings is as long as the longest ever met, which may have been forgotten.
        self.classes_ = np.array(found.tolist()) if found.dtype.kind == "U" else found

    def _parse_declared(self, classes: ArrayLike | None) -> NDArray[Any]:
        if classes is None:
            return self._declared_classes
        labels = _parse_labels(np.asarray(classes), self._trained_classes.dtype)
        return np.unique(np.concatenate([self._declared_classes, labels]))

    def _encode(self, targets: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.searchsorted(self.classes_, targets))

    def _count_outputs(self) -> int:
        return len(self.classes_)

    def _make_head(self) -> nn.Linear:
        """Return a head with a row for each of `classes_`; those not trained are zero."""
        head = make_zero_linear(self._head.in_features, len(self.classes_))
        rows = self._encode(self._trained_classes)
        head.weight[rows], head.bias[rows] = self._head.weight, self._head.bias
        return head


class MbPARegressor(RegressorMixin, MemoryEstimator):  # type: ignore[misc]  # sklearn has no types
    """A regressor that learns new examples at once, and can forget them.

    It works like `MbPAClassifier`, with squared error, and takes one target or several.

    Args:
        hidden_layer_sizes: units of each hidden layer. The last layer sees the features, too, so
            that `()` is a linear model.
        alpha: strength of the L2 penalty on the weights while the network is trained. With noisy
            targets, a larger one is better.
        epochs: passes over the rows in `fit`.
        learning_rate: of Adam in `fit`; it falls linearly to zero.
        batch_size: rows per step in `fit`. Default: a twentieth of all, from 32 to 1024.
        k: number of nearest examples to adapt to.
        prior: cost of moving the last layer (`mbpa.MAP`), above 0. With a smaller one, predictions
            follow the nearest examples more closely; with a large one, they are the network's.
        kernel: weights the nearest examples by their distance. Default: `mbpa.InverseDistance()`.
        capacity: maximum number of examples in the memory. If `fit` gets more, it keeps a random
            sample; afterwards the oldest give way.
        random_state: seed of the initial weights, of the order of rows and of the sample.

    Attributes:
        n_features_in_: number of features.
        feature_names_in_: names of the features, if `fit` got a data frame with names.
        example_ids_: ids of the examples in the memory, oldest first.
        model_: the `mbpa.MbPA`. Its keys are not the features, and its values are standardised.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> from mbpa.integrations.sklearn import MbPARegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = MbPARegressor(random_state=0).fit(X[:200], y[:200])
        >>> model.partial_fit(X[200:400], y[200:400]).predict(X[400:]).shape
        (42,)
    """

    _loss = "squared_error"

    def fit(self, X: ArrayLike, y: ArrayLike, ids: Iterable[Hashable] | None = None) -> Self:
        """Train the network on these examples and write them to the memory.

        Everything learnt before is discarded.

        Args:
            X: shape (n_samples, n_features), dense and finite.
            y: targets, shape (n_samples,) or (n_samples, n_outputs).
            ids: an id for each example, to pass to `forget`. Several examples may share one, such
                as that of the person that they come from. Default: 0, 1, 2, …
        """
        with self._undo_on_error():
            rows, given = validate_data(
                self, X, y, dtype=np.float64, multi_output=True, y_numeric=True
            )
            self._target_shape = given.shape[1:]
            columns = given.astype(np.float64).reshape(len(given), -1)
            self._target_means, self._target_spreads = measure_columns(columns)
            self._fit(rows, self._standardize_targets(columns), ids)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, ids: Iterable[Hashable] | None = None
    ) -> Self:
        """Write examples to the memory, without training.

        On an estimator that is not fitted, this is `fit`: the network is trained on these examples
        and never again, so let them be many.

        Args:
            X: shape (n_samples, n_features), dense and finite.
            y: targets, of as many columns as in `fit`.
            ids: as for `fit`; to be given in every call since `fit` or in none. By default the
                numbering continues.
        """
        if not hasattr(self, "_examples"):
            return self.fit(X, y, ids)
        rows, given = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=False
        )
        if given.shape[1:] != self._target_shape:
            expected = ("n_samples", *self._target_shape)
            raise ValueError(f"y must have shape {expected}, as in fit, got {given.shape}")
        columns = given.astype(np.float64).reshape(len(given), -1)
        self._add(rows, self._standardize_targets(columns), ids)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return a value, or a row of values, for each row.

        Args:
            X: rows of features (n_samples, n_features).
        """
        values = self._predict(X) * self._target_spreads + self._target_means
        return values.reshape(len(values), *self._target_shape)

    def _standardize_targets(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        standard: NDArray[np.float64] = (columns - self._target_means) / self._target_spreads
        return standard

    def _encode(self, targets: NDArray[Any]) -> Tensor:
        return torch.from_numpy(targets)

    def _count_outputs(self) -> int:
        return len(self._target_means)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _parse_labels(y: NDArray[Any], trained: np.dtype[Any] | None) -> NDArray[Any]:
    """Return labels in the type of those that the network was trained with.

    Integers become int64 and other numbers float64, so that types do not depend on which labels
    were met before.
    """
    kind = _find_label_kind(y.dtype)
    if trained is None:
        wanted = {"numbers": np.dtype(np.float64 if y.dtype.kind == "f" else np.int64)}
        return _convert_labels(y, wanted.get(kind, y.dtype))
    if kind != _find_label_kind(trained):
        raise ValueError(
            f"y must hold {_find_label_kind(trained)}, like that of fit, got {kind}: {y[:3]}"
        )
    if kind == "strings" and trained.kind == "U":
        return np.array(y.tolist(), dtype=str)  # as long as needed
    return _convert_labels(y, trained)


def _convert_labels(y: NDArray[Any], wanted: np.dtype[Any]) -> NDArray[Any]:
    """Return labels in another type; raise `ValueError` if that would change any of them."""
    converted = y.astype(wanted)
    pairs = zip(y.tolist(), converted.tolist(), strict=True)
    if changed := [before for before, now in pairs if before != now]:
        raise ValueError(f"labels must be of type {wanted}, like the others, got {changed[:3]}")
    return converted


def _find_label_kind(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "b":
        return "booleans"
    return "numbers" if dtype.kind in "iuf" else "strings"
