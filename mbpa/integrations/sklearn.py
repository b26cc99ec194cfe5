"""Estimators for scikit-learn (extra `sklearn`): a small network with an episodic memory.

`fit` trains the network and writes the examples to the memory. `partial_fit` only writes: what it
is given is known at once, and `forget` takes it back without a trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mbpa.errors import MissingExtraError
from mbpa.explanation import Explanation
from mbpa.integrations.tabular import (
    Trunk,
    build_model,
    make_zero_linear,
    measure_columns,
    standardize,
    train_network,
)
from mbpa.kernels import InverseDistance, Kernel
from mbpa.memory import validation
from mbpa.predictors import Adapted
from mbpa.rules import MAP

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtraError("scikit-learn 1.6 or newer", "sklearn") from error

__all__ = ["MbPAClassifier", "MbPARegressor"]


@dataclass(frozen=True, eq=False)
class _Examples:
    """The examples in the memory, oldest first."""

    keys: Tensor
    targets: NDArray[Any]
    """Labels as the user gave them, or standardised targets (N, O)."""
    ids: list[Hashable]
    is_trained: NDArray[np.bool_]
    """Which examples the network was trained with."""

    def __add__(self, other: _Examples) -> _Examples:
        return _Examples(
            torch.cat([self.keys, other.keys]),
            np.concatenate([self.targets, other.targets]),
            self.ids + other.ids,
            np.concatenate([self.is_trained, other.is_trained]),
        )

    def take(self, rows: NDArray[np.int64]) -> _Examples:
        ids = [self.ids[row] for row in rows.tolist()]
        return _Examples(
            self.keys[torch.from_numpy(rows)], self.targets[rows], ids, self.is_trained[rows]
        )


class _MbPAEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the classifier and the regressor have in common."""

    _loss: Literal["cross_entropy", "squared_error"]

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (64,),
        *,
        alpha: float = 0.01,
        epochs: int = 100,
        learning_rate: float = 0.01,
        batch_size: int | None = None,
        k: int = 50,
        prior: float = 0.01,
        kernel: Kernel | None = None,
        capacity: int = 100_000,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.alpha = alpha
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.k = k
        self.prior = prior
        self.kernel = kernel
        self.capacity = capacity
        self.random_state = random_state

    # Learning

    def _fit(self, X: NDArray[np.float64], targets: NDArray[Any], ids: Any) -> None:
        """Train the network, and replace all examples."""
        settings = self._parse_settings()
        self._make_predictor()  # raises if it cannot be made, before any training
        random = check_random_state(self.random_state)
        parsed_ids = None if ids is None else _parse_ids(ids, len(X))
        self._means, self._spreads = measure_columns(X)
        features = self._standardize(X)
        trunk, head = train_network(
            features,
            self._encode(targets),
            self._count_outputs(),
            self._loss,
            **settings,
            seed=random.randint(np.iinfo(np.int32).max),
        )
        self._trunk: Trunk = trunk
        self._head: nn.Linear = head
        self._has_own_ids, self._given = ids is not None, 0
        examples = self._make_examples(features, targets, parsed_ids, is_trained=True)
        if len(X) > self.capacity:
            rows = np.sort(random.choice(len(X), self.capacity, replace=False))
            examples = examples.take(rows)
        self._set_examples(examples)

    def _add(self, X: NDArray[np.float64], targets: NDArray[Any], ids: Any) -> None:
        """Write examples; the oldest ones give way if there is no room."""
        if (ids is not None) != self._has_own_ids:
            raise ValueError(
                "ids must be given in every call since fit or in none, got "
                + ("none this time" if ids is None else "some this time only")
            )
        parsed_ids = None if ids is None else _parse_ids(ids, len(X))
        features = self._standardize(X)
        with self._undo_on_error():  # numbers that were given as ids, too
            examples = self._examples + self._make_examples(
                features, targets, parsed_ids, is_trained=False
            )
            first = max(0, len(examples.ids) - self.capacity)
            self._set_examples(examples.take(np.arange(first, len(examples.ids))))

    def forget(self, ids: Iterable[Hashable], *, allow_trained: bool = False) -> Self:
        """Remove the examples with these ids.

        If they were given to `partial_fit`, and the memory has never been full, then all
        predictions and attributes are from now on, to the bit, those of an estimator with the same
        network that was never given them. Default ids of later examples are the exception: numbers
        are not used twice. If the memory has been full, examples that gave way to the forgotten
        ones do not come back.

        Args:
            ids: ids in `example_ids_`. All examples with one of these ids are removed.
            allow_trained: also accept examples that `fit` trained the network with. They are
                removed from the memory, but the network keeps what it learnt from them. To forget
                them entirely, call `fit` without them.
        """
        check_is_fitted(self)
        wanted = set(_parse_ids(ids))
        if unknown := wanted.difference(self._examples.ids):
            raise ValueError(
                f"ids must be those of stored examples, got {sorted(unknown, key=repr)[:8]}"
            )
        is_wanted = np.array([each in wanted for each in self._examples.ids], bool)
        if (trained := int((is_wanted & self._examples.is_trained).sum())) and not allow_trained:
            raise ValueError(
                f"ids must be those of examples given to partial_fit, got {trained} that the "
                "network was trained with: call fit without them, or pass allow_trained=True to "
                "remove them from the memory only"
            )
        self._set_examples(self._examples.take(np.flatnonzero(~is_wanted)))
        return self

    def _make_examples(
        self, features: Tensor, targets: NDArray[Any], ids: list[Hashable] | None, is_trained: bool
    ) -> _Examples:
        count = len(features)
        if ids is None:
            ids = list(range(self._given, self._given + count))
        self._given += count
        # Row by row: in a batch, the rounding of a key would depend on the rows beside it, some of
        # which may be forgotten.
        keys = torch.cat([self._embed(row) for row in features.split(1)])
        return _Examples(keys, targets, ids, np.full(count, is_trained))

    def _set_examples(self, examples: _Examples) -> None:
        """Replace the examples; if that fails, nothing changes."""
        with self._undo_on_error():
            self._examples = examples
            self._find_classes()
            self._build()

    @contextmanager
    def _undo_on_error(self) -> Iterator[None]:
        """Leave the estimator as it was if the context is left by an exception."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _build(self) -> None:
        """Build the model from the network and the examples."""
        head, predictor = self._make_head(), self._make_predictor()
        values = self._encode(self._examples.targets)
        self.model_ = build_model(head, self._examples.keys, values, predictor)

    def _make_predictor(self) -> Adapted:
        kernel = InverseDistance() if self.kernel is None else self.kernel
        return Adapted(MAP(self.prior), k=self.k, kernel=kernel, loss=self._loss)

    # Predicting

    @property
    def example_ids_(self) -> list[Hashable]:
        """Ids of the examples in the memory, oldest first."""
        check_is_fitted(self)
        return list(self._examples.ids)

    def explain(self, X: ArrayLike) -> Explanation:
        """Explain predictions: the neighbours, their weights, the outputs before and after.

        Neighbours are numbered by their position in `example_ids_`.

        Args:
            X: shape (n_samples, n_features).
        """
        return self.model_.explain(keys=self._locate(X))

    def _predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return log-probabilities, or standardised values."""
        keys = self._locate(X)
        prediction: NDArray[np.float64] = self.model_(keys=keys).numpy()
        return prediction

    def _locate(self, X: ArrayLike) -> Tensor:
        """Return the keys of queries."""
        check_is_fitted(self)
        checked = validate_data(self, X, dtype=np.float64, reset=False)
        return self._embed(self._standardize(checked))

    def _standardize(self, X: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(standardize(X, self._means, self._spreads))

    def _embed(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            keys: Tensor = self._trunk(features)
        return keys

    # Differences between the two

    def _encode(self, targets: NDArray[Any]) -> Tensor:
        """Return targets as the memory stores them."""
        raise NotImplementedError

    def _count_outputs(self) -> int:
        raise NotImplementedError

    def _find_classes(self) -> None:
        """Update the classes to those of the examples; a regressor has none."""

    def _make_head(self) -> nn.Linear:
        return self._head

    # Settings and state

    def _parse_settings(self) -> dict[str, Any]:
        """Return the arguments of `train_network`; raise `ValueError` for those out of range."""
        validation.count("k", self.k)
        validation.count("capacity", self.capacity)
        size = self.batch_size
        return {
            "hidden_layer_sizes": validation.parse_shape(
                "hidden_layer_sizes", self.hidden_layer_sizes
            ),
            "alpha": _parse_rate("alpha", self.alpha),
            "epochs": validation.count("epochs", self.epochs, least=0),
            "learning_rate": _parse_rate("learning_rate", self.learning_rate),
            "batch_size": None if size is None else validation.count("batch_size", size),
        }

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "model_"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "_examples"):
            self._build()  # a memory holds a lock, and is determined by the examples


class MbPAClassifier(ClassifierMixin, _MbPAEstimator):  # type: ignore[misc]
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


class MbPARegressor(RegressorMixin, _MbPAEstimator):  # type: ignore[misc]
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


def _parse_ids(ids: Any, count: int | None = None) -> list[Hashable]:
    """Return ids as a list; numbers of numpy become plain ones, which are equal to them."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"ids must be a list of ids, got {ids!r}")
    parsed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    try:
        hash(tuple(parsed))
    except TypeError:
        raise ValueError(f"ids must be hashable, such as numbers or strings, got {ids!r}") from None
    if count is not None and len(parsed) != count:
        raise ValueError(f"ids must be one for each of the {count} rows of X, got {len(parsed)}")
    return parsed


def _parse_rate(name: str, rate: Any) -> float:
    must = "be a finite number, not negative"
    parsed = validation.parse_number(name, rate, must)
    if parsed < 0:
        raise ValueError(f"{name} must {must}, got {rate!r}")
    return parsed
