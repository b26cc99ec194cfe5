"""Estimators for River (extra `river`): they learn from a stream, one example at a time.

Nothing is trained. A memory holds the newest examples. For each query, a linear model that knows
nothing adapts to the nearest of them: a local logistic or linear regression. So every answer
follows from the examples in the memory alone.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mbpa.adaptation import CROSS_ENTROPY, SQUARED_ERROR
from mbpa.errors import MissingExtraError
from mbpa.integrations.tabular import build_model, make_zero_linear, measure_columns, standardize
from mbpa.kernels import InverseDistance, Kernel
from mbpa.memory import validation
from mbpa.model import MbPA
from mbpa.predictors import Adapted
from mbpa.rules import AUTO, MAP, Gradient, Rule

try:
    from river import base
except ImportError as error:
    raise MissingExtraError("river", "river") from error

__all__ = ["OnlineClassifier", "OnlineRegressor"]


class _OnlineEstimator(base.Estimator):
    """What the classifier and the regressor have in common."""

    def __init__(
        self,
        k: int,
        kernel: Kernel | None,
        capacity: int,
    ) -> None:
        self.k = validation.count("k", k)
        self.kernel = kernel
        self.capacity = validation.count("capacity", capacity)
        self._columns: list[Hashable] = []
        self._table: NDArray[np.float64] = np.zeros((0, 0))  # examples × features; NaN: missing
        self._targets: list[Any] = []
        self._model: MbPA | None = None  # built when first needed after a change

    def __len__(self) -> int:
        """Return the number of examples in the memory."""
        return len(self._targets)

    def _learn(self, x: Mapping[Hashable, Any], y: Any) -> None:
        """Store an example; the oldest one gives way if there is no room."""
        numbers = _parse_features(x)
        columns, table = self._columns, self._table
        if not numbers.keys() <= set(columns):
            # Sorted, so that the order in which features are given cannot change a rounding.
            columns = sorted({*self._columns, *numbers}, key=repr)
            table = np.full((len(table), len(columns)), math.nan)
            table[:, [columns.index(name) for name in self._columns]] = self._table
        row = [numbers.get(name, math.nan) for name in columns]
        table = np.vstack([table, row])[-self.capacity :]
        is_used = np.asarray(~np.isnan(table).all(axis=0))  # by an example that is still there
        self._table = table[:, is_used]
        self._columns = [name for name, used in zip(columns, is_used.tolist(), strict=True) if used]
        self._targets = [*self._targets, y][-self.capacity :]
        self._model = None

    def _predict(self, x: Mapping[Hashable, Any]) -> NDArray[np.float64]:
        """Return the prediction for one query, given at least one example."""
        numbers = _parse_features(x)
        if self._model is None:
            self._means, self._spreads = measure_columns(self._table)
            self._model = self._build(self._locate(self._table))
        row = np.array([[numbers.get(name, math.nan) for name in self._columns]])
        prediction: NDArray[np.float64] = self._model(keys=self._locate(row))[0].numpy()
        return prediction

    def _locate(self, rows: NDArray[np.float64]) -> Tensor:
        """Return keys: the standardised features, and one that is zero if there are none."""
        keys = standardize(rows, self._means, self._spreads)
        return torch.from_numpy(keys if keys.shape[1] else np.zeros((len(keys), 1)))

    def _build_model(
        self, keys: Tensor, values: Tensor, outputs: int, rule: Rule | MAP, loss: str
    ) -> MbPA:
        """Return a model of the stored examples, with a head that is zero before it adapts."""
        head = make_zero_linear(keys.shape[1], outputs)
        kernel = InverseDistance() if self.kernel is None else self.kernel
        return build_model(head, keys, values, Adapted(rule, k=self.k, kernel=kernel, loss=loss))

    @abc.abstractmethod
    def _build(self, keys: Tensor) -> MbPA:
        """Return a model of the stored examples, given their keys."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}  # a memory holds a lock, and can be built again


class OnlineClassifier(_OnlineEstimator, base.Classifier):
    """A classifier for streams: a local logistic regression on the nearest examples.

    Features are numbers or booleans. They are standardised by the examples in the memory. A feature
    that is missing, `None` or NaN counts as the mean of that feature, one that no example in the
    memory has is ignored, and features may appear at any time. Labels may be any hashable values,
    and new ones may appear at any time.

    Args:
        k: number of nearest examples to adapt to.
        steps: number of gradient steps, whose size is chosen for each query. With more, predictions
            follow the nearest examples more closely, and take longer.
        kernel: weights the nearest examples by their distance. Default: `mbpa.InverseDistance()`.
        capacity: number of newest examples to keep. Time and space are proportional to it. With
            fewer, the classifier follows a changing stream faster.

    Example:
        >>> from mbpa.integrations.river import OnlineClassifier
        >>> model = OnlineClassifier()
        >>> for x, y in [({"a": 0.0}, "no"), ({"a": 0.2}, "no"), ({"a": 3.0}, "yes")]:
        ...     model.learn_one(x, y)
        >>> model.predict_one({"a": 2.5, "b": 1.0})
        'yes'
    """

    def __init__(
        self,
        k: int = 50,
        steps: int = 20,
        kernel: Kernel | None = None,
        capacity: int = 1000,
    ) -> None:
        super().__init__(k, kernel, capacity)
        self.steps = validation.count("steps", steps)

    def learn_one(self, x: Mapping[Hashable, Any], y: Hashable) -> None:
        """Store an example.

        Args:
            x: features by name.
            y: the label.
        """
        hash(y)  # raises TypeError for labels that cannot be keys of a dictionary
        self._learn(x, y)

    def predict_proba_one(
        self, x: Mapping[Hashable, Any], **kwargs: Any
    ) -> dict[base.typing.ClfTarget, float]:
        """Return the probability of each label in the memory; nothing if it is empty.

        Args:
            x: features by name.
            kwargs: not used.
        """
        if not self._targets:
            _parse_features(x)
            return {}
        probabilities = np.exp(self._predict(x))
        return dict(zip(self._labels, (probabilities / probabilities.sum()).tolist(), strict=True))

    @property
    def _labels(self) -> list[Any]:
        """The labels in the memory, in the order in which they were first met."""
        return list(dict.fromkeys(self._targets))

    @property
    def _multiclass(self) -> bool:
        return True

    def _build(self, keys: Tensor) -> MbPA:
        places = {label: place for place, label in enumerate(self._labels)}
        values = torch.tensor([places[label] for label in self._targets])
        rule = Gradient(AUTO, steps=self.steps)
        return self._build_model(keys, values, len(places), rule, CROSS_ENTROPY)


class OnlineRegressor(_OnlineEstimator, base.Regressor):
    """A regressor for streams: a local linear regression on the nearest examples.

    Features are treated as by `OnlineClassifier`. Targets are standardised, too.

    Args:
        k: number of nearest examples to adapt to.
        prior: cost of moving the parameters away from zero (`mbpa.MAP`), above 0. With a smaller
            one, predictions follow the nearest examples more closely.
        kernel: weights the nearest examples by their distance. Default: `mbpa.InverseDistance()`.
        capacity: number of newest examples to keep. Time and space are proportional to it. With
            fewer, the regressor follows a changing stream faster.

    Example:
        >>> from mbpa.integrations.river import OnlineRegressor
        >>> model = OnlineRegressor()
        >>> for number in range(20):
        ...     model.learn_one({"a": number}, 3 * number)
        >>> round(model.predict_one({"a": 10}))
        30
    """

    def __init__(
        self,
        k: int = 50,
        prior: float = 0.01,
        kernel: Kernel | None = None,
        capacity: int = 1000,
    ) -> None:
        super().__init__(k, kernel, capacity)
        self.prior = MAP(prior).prior

    def learn_one(self, x: Mapping[Hashable, Any], y: float) -> None:
        """Store an example.

        Args:
            x: features by name.
            y: the target, a finite number.
        """
        self._learn(x, validation.parse_number("y", y))

    def predict_one(self, x: Mapping[Hashable, Any]) -> float:
        """Return the predicted target; 0 if the memory is empty.

        Args:
            x: features by name.
        """
        if not self._targets:
            _parse_features(x)
            return 0.0
        standard = self._predict(x)
        mean, spread = measure_columns(np.array(self._targets)[:, None])
        return float(standard[0] * spread[0] + mean[0])

    def _build(self, keys: Tensor) -> MbPA:
        targets = np.array(self._targets)[:, None]
        mean, spread = measure_columns(targets)
        values = torch.from_numpy((targets - mean) / spread)
        return self._build_model(keys, values, 1, MAP(self.prior), SQUARED_ERROR)


def _parse_features(x: Mapping[Hashable, Any]) -> dict[Hashable, float]:
    """Return the features that are not missing; raise `ValueError` for what is not a number."""
    numbers = {}
    for name, value in x.items():
        if value is None:
            continue
        try:
            number = float(value) if isinstance(value, Real | np.bool_) else math.inf
        except OverflowError:  # an integer beyond the range of floats
            number = math.inf
        if math.isinf(number):
            raise ValueError(
                f"features must be finite numbers, booleans, NaN or None, got {name!r}: {value!r}; "
                "river.preprocessing.OneHotEncoder turns other values into numbers"
            )
        if not math.isnan(number):
            numbers[name] = number
    return numbers
