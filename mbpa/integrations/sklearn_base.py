"""What the estimators for scikit-learn share: a network that is trained once, and a memory.

A subclass says how targets are stored and what the network returns for them. Everything that can be
added or forgotten later is an example with an id. The model is built anew from the examples after
every change, so that it depends on them alone.
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
    measure_columns,
    standardize,
    train_network,
)
from mbpa.kernels import InverseDistance, Kernel
from mbpa.memory import validation
from mbpa.model import MbPA
from mbpa.predictors import Adapted
from mbpa.rules import MAP

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingExtraError("scikit-learn 1.6 or newer", "sklearn") from error


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples in the memory, oldest first."""

    keys: Tensor
    targets: NDArray[Any]
    """Labels as the user gave them, or standardised targets (N, O)."""
    ids: list[Hashable]
    is_trained: NDArray[np.bool_]
    """Which examples the network was trained with."""

    def __add__(self, other: Examples) -> Examples:
        return Examples(
            torch.cat([self.keys, other.keys]),
            np.concatenate([self.targets, other.targets]),
            self.ids + other.ids,
            np.concatenate([self.is_trained, other.is_trained]),
        )

    def take(self, rows: NDArray[np.int64]) -> Examples:
        ids = [self.ids[row] for row in rows.tolist()]
        return Examples(
            self.keys[torch.from_numpy(rows)], self.targets[rows], ids, self.is_trained[rows]
        )


class MemoryEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of the classifier and the regressor, which document the arguments."""

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
        with self._undo_on_error():  # also the counter of default ids
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
    ) -> Examples:
        count = len(features)
        if ids is None:
            ids = list(range(self._given, self._given + count))
        self._given += count
        # Row by row: in a batch, the rounding of a key would depend on the rows beside it, some of
        # which may be forgotten.
        keys = torch.cat([self._embed(row) for row in features.split(1)])
        return Examples(keys, targets, ids, np.full(count, is_trained))

    def _set_examples(self, examples: Examples) -> None:
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
        self._model: MbPA | None = build_model(head, self._examples.keys, values, predictor)

    def _make_predictor(self) -> Adapted:
        kernel = InverseDistance() if self.kernel is None else self.kernel
        return Adapted(MAP(self.prior), k=self.k, kernel=kernel, loss=self._loss)

    # Predicting

    @property
    def model_(self) -> MbPA:
        """The model of the examples, with the present `k`, `prior` and `kernel`.

        It is built anew if one of these has changed, and after unpickling or copying.
        """
        check_is_fitted(self)
        if self._model is None or self._model.predictor != self._make_predictor():
            self._build()
        assert self._model is not None
        return self._model

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
        # A memory holds a lock, and is determined by the examples.
        return {**state, "_model": None} if "_model" in state else state


def _parse_ids(ids: Any, count: int | None = None) -> list[Hashable]:
    """Return ids as a list; numpy numbers become plain ones, which are equal to them."""
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
