"""The conformance suites pass what keeps the contract, and name the part that is broken."""

import ast
import contextlib
import inspect
import math
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mbpa
from mbpa.memory import Candidates
from mbpa.testing import check_memory, check_rule
from mbpa.testing.claims import require_same

# Backends


class DictMemory(mbpa.Memory):
    """A minimal backend: a dict in which every entry is a candidate."""

    def _clear(self) -> None:
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            self.stored[slot] = key.clone(), value.clone()

    def _get(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        # Neither an empty slot nor no slot at all may be asked for: both would fail here.
        keys, values = zip(*(self.stored[slot] for slot in slots.tolist()), strict=True)
        return torch.stack(keys), torch.stack(values)

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        return Candidates(torch.tensor(list(self.stored)).expand(len(queries), -1), None)


class Choosy(DictMemory):
    """Proposes as few candidates as allowed, deleted ones among them."""

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        slots = torch.tensor(list(self.stored))
        distances = (self._get(slots)[0] - queries[:, None]).square().sum(-1)
        chosen = distances.topk(k, largest=False)
        return Candidates(slots[chosen.indices], chosen.values[:, -1])


class Approximate(DictMemory):
    """Never finds a tenth of its entries."""

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        slots = torch.tensor([slot for slot in self.stored if slot % 10 != 3], dtype=torch.int64)
        return Candidates(slots.expand(len(queries), -1), None)


class RowPerSlot(mbpa.Memory):
    """One row per slot; all used slots are searched, and deleted rows stay in place."""

    def _clear(self) -> None:
        self.rows = torch.full((self.capacity, self.key_size), math.nan, dtype=self.dtype)
        self.answers = torch.zeros(self.capacity, *self.value_shape, dtype=self.value_dtype)

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.rows[slots], self.answers[slots] = keys, values

    def _get(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows[slots], self.answers[slots]

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        distances = (self.rows[: self._used_slots] - queries[:, None]).square().sum(-1)
        assert distances.isfinite().all(), "all of these slots have held an entry"
        chosen = distances.topk(k, largest=False)
        return Candidates(chosen.indices, chosen.values[:, -1])


HOOKS = {"_clear", "_put", "_get", "_get_keys", "_get_values", "_nearest", "_delete"}


def test_our_own_backend_uses_what_is_documented_for_any_backend() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(mbpa.ExactMemory)))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "self" and node.attr.startswith("_")
    }
    inherited = {*dir(mbpa.Memory), *vars(DictMemory(3, 2))}
    assert used & inherited <= {*HOOKS, "_used_slots", "_copy_attributes"}


@pytest.mark.parametrize("backend", [DictMemory, Choosy, RowPerSlot])
def test_a_backend_that_keeps_the_contract_passes(backend: type[mbpa.Memory]) -> None:
    state = torch.get_rng_state()
    check_memory(lambda capacity, key_dim: backend(capacity, key_dim))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.heavy
def test_an_approximate_backend_passes_as_approximate_only() -> None:
    for backend in (Approximate, DictMemory):
        check_memory(lambda capacity, key_dim, b=backend: b(capacity, key_dim), exact=False)
    with pytest.raises(AssertionError, match=r"ids of the \d+ nearest: expected .*, got "):
        check_memory(lambda capacity, key_dim: Approximate(capacity, key_dim))


class ForgetsToOverwrite(DictMemory):
    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            self.stored.setdefault(slot, (key.clone(), value.clone()))


class MixesValuesUp(DictMemory):
    def _get(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super()._get(slots)
        return keys, values.flip(0)


class RoundsKeys(DictMemory):
    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        super()._put(slots, keys.round(), values)


class KeepsOldValues(DictMemory):
    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        kept = [
            self.stored.get(slot, (0, value))[1]
            for slot, value in zip(slots.tolist(), values, strict=True)
        ]
        super()._put(slots, keys, torch.stack(kept) if kept else values)


class MissesEntries(DictMemory):
    """Searches every other slot, and claims that nothing lies beyond."""

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        slots = torch.tensor(list(self.stored)[::2]).expand(len(queries), -1)
        return Candidates(slots, torch.full((len(queries),), math.inf))


class SearchesOldKeys(Choosy):
    """An index that is not told when the key of a slot changes."""

    def _clear(self) -> None:
        super()._clear()
        self.index: dict[int, Tensor] = {}

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        super()._put(slots, keys, values)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self.index.setdefault(slot, key.clone())

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        slots = torch.tensor(list(self.index))
        distances = (torch.stack(list(self.index.values())) - queries[:, None]).square().sum(-1)
        chosen = distances.topk(k, largest=False)
        return Candidates(slots[chosen.indices], chosen.values[:, -1] + 1e9)


class CountsOnDeletion(Choosy):
    """Ignores deletions, so that deleted entries take the places of live ones."""

    def _delete(self, slots: Tensor) -> None:
        pass


class DeletesTooMuch(DictMemory):
    def _delete(self, slots: Tensor) -> None:
        for slot in slots.tolist():
            self.stored.pop(slot, None)
            if slot + 1 in self.stored:
                self.stored[slot + 1] = tuple(map(torch.zeros_like, self.stored[slot + 1]))


class FindsTwice(DictMemory):
    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        found = super()._nearest(queries, k)
        return Candidates(torch.cat([found.slots, found.slots], 1), found.beyond)


class ScalesKeysInPlace(DictMemory):
    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        super()._put(slots, keys, values)
        keys.mul_(2)


class ShiftsQueriesInPlace(DictMemory):
    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        found = super()._nearest(queries, k)
        queries.add_(1)
        return found


class HandsOutItsStorage(mbpa.ExactMemory):
    def _get(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        if torch.equal(slots, torch.arange(len(slots))):
            return self._keys[: len(slots)], self._values[: len(slots)]
        return super()._get(slots)


class AcceptsAnything(mbpa.ExactMemory):
    def _parse_keys(self, keys: Tensor, **_: bool) -> Tensor:
        return keys.reshape(len(keys), self.key_size)


class HasNoLock(mbpa.ExactMemory):
    def __init__(self, capacity: int, key_dim: int) -> None:
        super().__init__(capacity, key_dim)
        self._lock = contextlib.nullcontext()

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._keys[slots] = keys
        time.sleep(1e-3)
        super()._put(slots, keys, values)


class StartsIdsAnew(mbpa.ExactMemory):
    def clear(self) -> None:
        super().clear()
        self._ring.next_id = 0


class HasNoIdea(DictMemory):
    """Finds the farthest."""

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        slots = torch.tensor(list(self.stored))
        distances = (self._get(slots)[0] - queries[:, None]).square().sum(-1)
        return Candidates(slots[distances.topk(k).indices], None)


BROKEN_BACKENDS: list[tuple[type[mbpa.Memory], str]] = [
    (ForgetsToOverwrite, r"keys in entries\(\) after write: expected .*, got "),
    (MixesValuesUp, r"values in entries\(\) after write: expected .*, got "),
    (RoundsKeys, r"keys in entries\(\) after write.*: expected .*, got "),
    (KeepsOldValues, r"values in entries\(\) after write: expected .*, got "),
    (MissesEntries, r"ids of the \d+ nearest: expected .*, got "),
    (SearchesOldKeys, r"ids of the \d+ nearest: expected .*, got "),
    (CountsOnDeletion, r"ids of the \d+ nearest: expected .*, got "),
    (DeletesTooMuch, r"keys in entries\(\) after delete: expected .*, got "),
    (FindsTwice, "an entry is found once: expected 4, got 2"),
    (ScalesKeysInPlace, "write leaves its keys as they are: expected .*, got "),
    (ShiftsQueriesInPlace, "read leaves its queries as they are: expected .*, got "),
    (HandsOutItsStorage, "what was returned, after a write.*: expected .*, got "),
    (AcceptsAnything, "write of keys NaN: expected a ValueError, got none"),
    (HasNoLock, "threads: expected|belong together: expected .*, got "),
    (StartsIdsAnew, r"next_id after clear: expected \d+, got 0"),
]


@pytest.mark.parametrize(("backend", "part"), BROKEN_BACKENDS)
def test_a_broken_backend_is_caught_by_the_part_it_breaks(
    backend: type[mbpa.Memory], part: str
) -> None:
    with pytest.raises(AssertionError, match=part) as caught:
        check_memory(lambda capacity, key_dim: backend(capacity, key_dim))
    assert caught.value.__notes__[0].startswith("in check_memory, part ")


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        (HasNoIdea, r"neighbours found among the 10 nearest of 10 queries: expected ≥ 50, got \d+"),
        (FindsTwice, "an entry is found once"),
        (MixesValuesUp, "values in entries"),
    ],
)
def test_an_approximate_backend_may_only_miss_some_neighbours(
    backend: type[mbpa.Memory], part: str
) -> None:
    with pytest.raises(AssertionError, match=part):
        check_memory(lambda capacity, key_dim: backend(capacity, key_dim), exact=False)


def test_an_error_in_a_backend_says_which_part_met_it() -> None:
    class NeverGrows(mbpa.ExactMemory):
        def _clear(self) -> None:
            if not hasattr(self, "_keys"):
                super()._clear()

    with pytest.raises(IndexError) as caught:
        check_memory(lambda capacity, key_dim: NeverGrows(capacity, key_dim))
    assert caught.value.__notes__ == ["in check_memory, part 'clears_and_resizes'"]


# Rules


class SignDescent(mbpa.Rule):
    """The example of the documentation."""

    steps = 3

    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {name: p - 0.1 * grads[name].sign() for name, p in params.items()}, None


class Nesterov(mbpa.Rule):
    """A rule with state."""

    steps = 3

    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        speed = grads if state is None else {n: 0.9 * state[n] + g for n, g in grads.items()}
        return {n: p - 0.1 * (0.9 * speed[n] + grads[n]) for n, p in params.items()}, speed


@pytest.mark.heavy
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(mbpa.Gradient(lr=0.5, steps=1), marks=pytest.mark.slow),
        mbpa.Gradient(lr=0.1, steps=3, decay=0.1, momentum=0.9),
        pytest.param(mbpa.RMSprop(lr=0.1, steps=2, initial_square=1.0), marks=pytest.mark.slow),
        mbpa.Adam(lr=0.1, steps=3, decay=0.1),
        mbpa.Gradient(lr=1e7, steps=6),  # diverges, in float32 beyond all bounds
        SignDescent(),
        Nesterov(),
    ],
)
def test_a_rule_that_keeps_the_contract_passes(rule: mbpa.Rule) -> None:
    state = torch.get_rng_state()
    check_rule(rule)
    assert torch.equal(torch.get_rng_state(), state)


class MovesInPlace(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {name: p.sub_(grads[name]) for name, p in params.items()}, None


class ClipsInPlace(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {name: p - grads[name].clamp_(-0.1, 0.1) for name, p in params.items()}, None


class AddsNoise(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {n: p - grads[n] + torch.randn_like(p) for n, p in params.items()}, None


class AddsNoiseOfItsOwn(SignDescent):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        noise = float(torch.rand((), generator=self.generator))
        return {name: p - noise * grads[name] for name, p in params.items()}, None


class RemembersItself(SignDescent):
    speed: Any = None

    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        if state is None:
            self.speed = {name: 0 * g for name, g in grads.items()}
        self.speed = {name: 0.9 * self.speed[name] + g for name, g in grads.items()}
        return {name: p - self.speed[name] for name, p in params.items()}, "is on self"


class RemembersQueries(SignDescent):
    calls = 0

    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        self.calls += 1
        return {name: p - grads[name] / self.calls for name, p in params.items()}, None


class ChangesItsState(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        state = {name: g.clone() for name, g in grads.items()} if state is None else state
        moved = {name: p - state[name].mul_(0.5) for name, p in params.items()}
        return moved, state


class Branches(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        steep = max(float(g.abs().max()) for g in grads.values()) > 0.5
        return {n: p - (0.1 if steep else 1.0) * grads[n] for n, p in params.items()}, None


class ForgetsTheBias(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {n: p - grads[n] for n, p in params.items() if "bias" not in n}, None


class Widens(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {name: p - grads[name].double() for name, p in params.items()}, None


class DividesByZero(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {n: p - 0.1 * grads[n] / grads[n].abs().sum() for n, p in params.items()}, None


class KnowsThatItIsBatched(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        batched = any(torch._C._functorch.is_batchedtensor(g) for g in grads.values())
        return {n: p - (0.2 if batched else 0.1) * grads[n] for n, p in params.items()}, None


class WritesToTheHead(SignDescent):
    """Changes the head's own parameters in place."""

    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        if any(torch._C._functorch.is_batchedtensor(g) for g in grads.values()):
            for tensor in start.values():
                tensor.mul_(0.5)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, None


class Explodes(SignDescent):
    def update(self, params: Any, grads: Any, start: Any, state: Any) -> Any:
        return {n: p * math.inf if grads[n].ndim else p for n, p in params.items()}, None


BROKEN_RULES: list[tuple[type[mbpa.Rule], str]] = [
    (MovesInPlace, "update leaves params as they are: expected .*, got "),
    (ClipsInPlace, "update leaves grads as they are: expected .*, got "),
    (AddsNoise, "update draws no random numbers: expected the same RNG state, got another"),
    (AddsNoiseOfItsOwn, "update with the same arguments again: expected .*, got "),
    (RemembersItself, "update with the same arguments again: expected .*, got "),
    (RemembersQueries, "update with the same arguments again: expected .*, got "),
    (ChangesItsState, "update with the same arguments again: expected .*, got "),
    (Branches, "batching: expected .* without branching on the values of tensors .*, got "),
    (ForgetsTheBias, "every parameter, of the same shape and dtype: expected .*bias.*, got "),
    (Widens, r"shape and dtype: expected .*torch\.float32.*, got .*torch\.float64"),
    (DividesByZero, "parameters after gradients of zero: expected finite ones, got .*nan"),
    (KnowsThatItIsBatched, "prediction in a batch of 5 queries, .* to 1e-09: expected .*, got "),
    (WritesToTheHead, "the head's parameters after adaptation: expected .*, got "),
    (Explodes, "finite"),
]


@pytest.mark.parametrize(("rule", "part"), BROKEN_RULES)
def test_a_broken_rule_is_caught_by_the_part_it_breaks(rule: type[mbpa.Rule], part: str) -> None:
    with pytest.raises(AssertionError, match=part):
        check_rule(rule())


@pytest.mark.usefixtures("unchecked_annotations")
def test_an_object_that_is_no_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rule must be a mbpa.Rule, got 'gradient'"):
        check_rule("gradient")
    SignDescent.steps = 0
    try:
        with pytest.raises(ValueError, match="steps must be an integer of at least 1, got 0"):
            check_rule(SignDescent())
    finally:
        SignDescent.steps = 3


# The suites themselves


def test_the_suites_do_not_depend_on_assert_statements() -> None:
    package = Path(mbpa.testing.__file__).parent
    sources = list(package.glob("*.py"))
    assert len(sources) > 3
    for source in sources:
        nodes = list(ast.walk(ast.parse(source.read_text())))
        assert not any(isinstance(node, ast.Assert) for node in nodes), source
        names = {
            n.name.split(".")[0]
            for node in nodes
            if isinstance(node, ast.Import)
            for n in node.names
        }
        assert not names & {"pytest", "hypothesis"}, source


def test_a_failure_shows_the_first_difference_of_long_lists() -> None:
    expected = [[float(i)] * 3 for i in range(300)]
    actual = [*expected[:250], [0.0, 1.0, 2.0], *expected[251:]]
    with pytest.raises(AssertionError, match=r"^keys, at index 250: expected \[250.0, .*, got \[0"):
        require_same("keys", expected, actual)
    with pytest.raises(AssertionError, match=r"^keys: expected \[\[0.0, .* …, got \[\[0.0, "):
        require_same("keys", expected, expected[:-1])
