"""A plain reference model of the service: its examples and its answers.

Nothing here imports mbpa. Examples are kept in dicts and lists. Predictions are computed one query
at a time in float64, following the description of the method in `docs/serving.md`: nearest
neighbours, kernel weights, gradient steps on a copy of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Key = NDArray[np.float32]

MAX_REMEMBERED_REQUESTS = 10_000
MAX_NEW_LABELS_PER_CALL = 100
LEAST_SURPRISE = 0.1  # see `Gradient(lr="auto")` in docs/tuning.md
FLOAT32_ROUNDOFF = 2.0**-23  # relative error
SPREAD_DRAWS = 8
ROUNDING = 1e-6  # difference of squared distances that float32 may not resolve


@dataclass(frozen=True, eq=False)
class ReferenceExample:
    """An example that is present.

    Args:
        key: float32 numbers, shape (D,).
        is_trained: whether the head was trained with it.
    """

    label: str
    text: str | None
    key: Key
    is_trained: bool

    @property
    def content(self) -> tuple[str, bytes]:
        """Content that the order of equally near examples may depend on."""
        return self.label, self.key.tobytes()


class Call(NamedTuple):
    """A named call to learn: the first id assigned to it, and the examples that it wrote."""

    first: int
    written: tuple[ReferenceExample, ...]


class Outcome(NamedTuple):
    """The required response to a request: a status, and the body if it is 200."""

    status: int
    body: dict[str, Any] | None = None


class Reference:
    """The examples of a run and the calls that changed them.

    Args:
        labels: trained labels, in the order of the head's rows.
        trained: examples that the run was made from; their ids count from 1.
        encode: returns the key of a text.
    """

    def __init__(
        self,
        labels: Sequence[str],
        trained: Sequence[ReferenceExample],
        encode: Callable[[str], Key],
    ) -> None:
        self._all_trained_labels = tuple(labels)
        self._encode = encode
        self._requests: dict[str, Call] = {}
        self.examples = dict(enumerate(trained, 1))
        self.last_id = len(trained)
        self.change = 1  # writing the run was one write

    # Contents

    @property
    def trained_labels(self) -> list[str]:
        """Labels that still have an example they were trained with, in the order of the head."""
        held = {each.label for each in self.examples.values() if each.is_trained}
        return [label for label in self._all_trained_labels if label in held]

    @property
    def labels(self) -> list[str]:
        """All labels: trained ones in the order of the head, then new ones by name."""
        trained = self.trained_labels
        return trained + sorted({each.label for each in self.examples.values()} - set(trained))

    def count_labels(self) -> dict[str, Any]:
        """Return the response to `GET /labels`."""
        trained = self.trained_labels
        held = [each.label for each in self.examples.values()]
        return {
            "labels": [
                {"label": label, "examples": held.count(label), "trained": label in trained}
                for label in self.labels
            ]
        }

    def count(self) -> dict[str, int]:
        """Return the part of `GET /stats` that depends on the examples."""
        labels = len(self.labels)
        return {
            "examples": len(self.examples),
            "taught": sum(not each.is_trained for each in self.examples.values()),
            "labels": labels,
            "new_labels": labels - len(self.trained_labels),
            "change": self.change,
        }

    # Changes

    def learn(self, body: dict[str, Any]) -> Outcome:
        """Apply a well-formed call to `/learn` and return its outcome."""
        given = tuple(
            (
                each["label"].strip(),
                each.get("text"),
                None if (key := each.get("embedding")) is None else _encode_key(key),
            )
            for each in body["examples"]
        )
        request = body.get("request")
        call = None if request is None else self._requests.get(request)
        if call is not None:
            return self._repeat(call, given)
        if len({label for label, _, _ in given} - set(self.labels)) > MAX_NEW_LABELS_PER_CALL:
            return Outcome(422)
        first = self.last_id + 1
        for label, text, key in given:
            self.last_id += 1
            vector = self._encode(text or "") if key is None else np.frombuffer(key, "<f4")
            self.examples[self.last_id] = ReferenceExample(label, text, vector, is_trained=False)
        self.change += 1
        if request is not None:
            written = tuple(self.examples[id] for id in range(first, self.last_id + 1))
            self._requests[request] = Call(first, written)
            if len(self._requests) > MAX_REMEMBERED_REQUESTS:
                del self._requests[next(iter(self._requests))]
        return self._acknowledge(first, len(given))

    def _repeat(
        self, call: Call, given: tuple[tuple[str, str | None, bytes | None], ...]
    ) -> Outcome:
        """Answer a repeated request id, whether its examples were forgotten or not."""
        is_same = len(given) == len(call.written) and all(map(_is_same, given, call.written))
        return self._acknowledge(call.first, len(given)) if is_same else Outcome(422)

    def _acknowledge(self, first: int, count: int) -> Outcome:
        ids = list(range(first, first + count))
        return Outcome(200, {"ids": ids, "labels": len(self.labels)})

    def forget(self, body: dict[str, Any]) -> Outcome:
        """Apply a well-formed call to `/forget` and return its outcome."""
        if body.get("label") is not None:
            label = body["label"].strip()
            gone = [id for id, each in self.examples.items() if each.label == label]
        else:
            gone = sorted(set(body["ids"]) & self.examples.keys())
        for id in gone:
            del self.examples[id]
        self.change += bool(gone)
        return Outcome(200, {"ids": gone})


def _is_same(given: tuple[str, str | None, bytes | None], known: ReferenceExample) -> bool:
    """Return whether an example equals a known one; an example with a text may lack its key."""
    label, text, key = given
    if (label, text) != (known.label, known.text):
        return False
    return key == known.key.tobytes() if key is not None else text is not None


def _encode_key(numbers: Sequence[float]) -> bytes:
    return np.array(numbers, "<f4").tobytes()


# Predictions


@dataclass(frozen=True)
class Method:
    """How a run adapts.

    Args:
        lr: step size; "auto" derives one per query from its neighbours.
        bandwidth: bandwidth of a Gaussian kernel; `None`: inverse squared distance with ε = 1e-3.
        scale, offset: settings of rows for new labels.
        has_rows: whether new labels get rows from their examples; otherwise rows of zeros.
    """

    lr: float | Literal["auto"]
    steps: int
    k: int
    bandwidth: float | None = None
    decay: float = 0.0
    momentum: float = 0.0
    has_rows: bool = False
    scale: float = 3.0
    offset: float = 0.5


class Expected(NamedTuple):
    """The expected result for one query; probabilities are in the order of the labels."""

    before: Vector
    after: Vector
    weights: Vector
    distances: Vector
    """Euclidean distances of the neighbours."""
    change: float


class Oracle:
    """Predictions by the documented method, slow and in float64.

    Args:
        weight: trained rows, shape (C, D).
        bias: trained biases, shape (C,).
        labels: trained labels, one per row.
        trained: all examples that the run was made from; rows of new labels are placed relative to
            their mean direction.
    """

    def __init__(
        self,
        method: Method,
        weight: Vector,
        bias: Vector,
        labels: Sequence[str],
        trained: Sequence[ReferenceExample],
    ) -> None:
        self._method, self._weight, self._bias = method, weight, bias
        self._rows = {label: row for row, label in enumerate(labels)}
        directions = [
            _normalize(_add_keys([each for each in trained if each.label == label]))
            for label in labels
        ]
        self._middle = np.mean(directions, axis=0)

    def build_head(self, reference: Reference) -> tuple[Vector, Vector]:
        """Return the weights (C, D) and biases (C,) for the current labels."""
        method, trained = self._method, set(reference.trained_labels)
        held: dict[str, list[ReferenceExample]] = {}
        for each in reference.examples.values():
            held.setdefault(each.label, []).append(each)
        weights, biases = [], []
        for label in reference.labels:
            if label in trained:
                weights.append(self._weight[self._rows[label]])
                biases.append(self._bias[self._rows[label]])
            elif method.has_rows:
                direction = _normalize(_add_keys(held[label]))
                moved = method.scale * (direction - self._middle)
                weights.append(self._weight.mean(0) + moved)
                biases.append(self._bias.mean() + method.offset)
            else:
                weights.append(np.zeros(self._weight.shape[1]))
                biases.append(0.0)
        return np.array(weights), np.array(biases)

    def predict(
        self,
        query: Key,
        neighbors: Sequence[ReferenceExample],
        labels: Sequence[str],
        head: tuple[Vector, Vector],
        noise: np.random.Generator | None = None,
    ) -> Expected:
        """Return the expected result for a query, given its neighbours from nearest to farthest.

        Args:
            head: returned by `build_head`, for these labels.
            noise: perturbs the parameters after each step by as much as float32 rounds them.
        """
        method = self._method
        at = query.astype(np.float64)
        keys = np.array([each.key for each in neighbors], dtype=np.float64)
        columns = {label: column for column, label in enumerate(labels)}
        wanted = np.zeros((len(keys), len(labels)))
        wanted[range(len(keys)), [columns[each.label] for each in neighbors]] = 1
        squares = ((keys - at) ** 2).sum(1)
        weights = self._weigh(squares)
        start = np.column_stack(head)
        inputs = np.column_stack([keys, np.ones(len(keys))])
        rate = self._choose_rate(weights, inputs, wanted, _softmax(inputs @ start.T))
        moved, velocity = start.copy(), np.zeros_like(start)
        for _ in range(method.steps):
            errors = weights[:, None] * (_softmax(inputs @ moved.T) - wanted)
            velocity = method.momentum * velocity + errors.T @ inputs
            moved = moved - rate * velocity - method.decay * (moved - start)
            if noise is not None:
                moved = moved * (1 + FLOAT32_ROUNDOFF * noise.uniform(-1, 1, moved.shape))
        asked = np.append(at, 1.0)
        return Expected(
            before=_softmax((start @ asked)[None])[0],
            after=_softmax((moved @ asked)[None])[0],
            weights=weights,
            distances=np.sqrt(squares),
            change=float(np.linalg.norm(moved - start)),
        )

    def measure_spread(
        self,
        query: Key,
        neighbors: Sequence[ReferenceExample],
        labels: Sequence[str],
        head: tuple[Vector, Vector],
    ) -> float:
        """Return how far rounding to float32 can move a prediction; too long steps amplify it."""
        exact = self.predict(query, neighbors, labels, head)
        spread = 0.0
        for seed in range(SPREAD_DRAWS):
            noise = np.random.default_rng(seed)
            other = self.predict(query, neighbors, labels, head, noise)
            moved = abs(other.change - exact.change) / max(1.0, exact.change)
            spread = max(spread, moved, float(np.abs(other.after - exact.after).max()))
        return spread

    def _weigh(self, squares: Vector) -> Vector:
        width = self._method.bandwidth
        if width is None:
            weights: Vector = 1 / (1e-3 + squares)
        else:
            weights = np.exp(-(squares - squares.min()) / (2 * width**2))
        return np.asarray(weights / weights.sum())

    def _choose_rate(self, weights: Vector, inputs: Vector, wanted: Vector, said: Vector) -> float:
        if self._method.lr != "auto":
            return float(self._method.lr)
        surprise = float(weights @ (1 - (said * wanted).sum(1)))
        slope = max(surprise, LEAST_SURPRISE) * float(weights @ (inputs**2).sum(1))
        return 2 / slope


def explain_misplaced(reference: Reference, query: Key, found: Sequence[int], k: int) -> str | None:
    """Check the neighbours of a query, ids from nearest to farthest; return what is wrong, if any.

    The order is exact except among distances that float32 cannot distinguish. Examples with the
    same key come in the order of their labels, and from newest to oldest within a label.
    """
    examples = reference.examples
    if len(found) != min(k, len(examples)) or len(set(found)) != len(found):
        return f"there must be {min(k, len(examples))} distinct neighbours, got {list(found)}"
    if missing := [id for id in found if id not in examples]:
        return f"neighbours {missing} do not exist"
    ids = list(examples)
    keys = np.array([examples[id].key for id in ids], dtype=np.float64)
    squares = ((keys - query.astype(np.float64)) ** 2).sum(1).tolist()
    near = dict(zip(ids, squares, strict=True))
    for one, next_one in pairwise(found):
        if near[one] > near[next_one] + ROUNDING:
            return f"neighbour {one} is farther than {next_one}, which comes after it"
    chosen = set(found)
    for id in ids:
        if id not in chosen and near[id] < near[found[-1]] - ROUNDING:
            return f"example {id} is nearer than neighbour {found[-1]}, and was left out"
    return _explain_misplaced_copies(reference, found)


def _explain_misplaced_copies(reference: Reference, found: Sequence[int]) -> str | None:
    examples = reference.examples
    columns = {label: column for column, label in enumerate(reference.labels)}
    wanted = {examples[id].key.tobytes() for id in found}
    copies: dict[bytes, list[int]] = {}
    for id, each in examples.items():
        if (key := each.key.tobytes()) in wanted:
            copies.setdefault(key, []).append(id)
    for key, ids in copies.items():
        ranked = sorted(ids, key=lambda id: (columns[examples[id].label], -id))
        here = [id for id in found if examples[id].key.tobytes() == key]
        if here != ranked[: len(here)]:
            return f"examples with one key must come as {ranked}, got {here}"
    return None


def _add_keys(examples: Sequence[ReferenceExample]) -> Vector:
    return np.asarray(np.array([each.key for each in examples], dtype=np.float64).sum(0))


def _normalize(vector: Vector) -> Vector:
    return vector / max(math.sqrt(float(vector @ vector)), 1e-12)


def _softmax(outputs: Vector) -> Vector:
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))
