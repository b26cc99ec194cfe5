"""Adaptation alone: a batch of queries whose neighbours are known.

Supports the claim that adapted weights need never be built for any query. Each case compares the
engine, torch.func at its best chunk size, the autograd loop, the kernel vote and the head alone,
after checking that the results agree.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import mbpa
from benchmarks.oracle import adapt_one
from benchmarks.timing import time_in_turns
from mbpa.adaptation import Problem
from mbpa.adaptation.engine import SOLVERS
from mbpa.adaptation.per_query import solve_functional
from mbpa.kernels import neighbor_weights
from mbpa.memory import Neighbors
from mbpa.modules.head import own_precision

ROUNDS = 6  # batches that take turns, so that no inputs are found in a cache


@dataclass(frozen=True)
class Case:
    """The rule, the head and the sizes of one measurement."""

    name: str
    rule: mbpa.Rule
    sizes: tuple[int, ...] = (512, 1000)
    """Layer sizes of the head: keys, hidden layers, classes."""
    k: int = 50
    entries: int = 50_000
    batch: int = 256
    scale: float = 0.2
    """Standard deviation of the keys' numbers."""

    def head(self) -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for ins, outs in itertools.pairwise(self.sizes):
            linear = nn.Linear(ins, outs)
            nn.init.normal_(linear.weight, std=ins**-0.5 / (self.scale if not layers else 1))
            layers += [linear, nn.ReLU()]
        return layers[0] if len(layers) == 2 else nn.Sequential(*layers[:-1])


GRADIENT = mbpa.Gradient(0.1, 10)
LINEAR = Case("linear, 10 steps", GRADIENT)
ADAPTATION_CASES = {
    "cuda": [
        LINEAR,
        replace(LINEAR, name="linear, 1 step", rule=mbpa.Gradient(0.1, 1)),
        replace(LINEAR, name="linear, 1 step, batch 1024", rule=mbpa.Gradient(0.1), batch=1024),
        replace(LINEAR, name="linear, RMSprop", rule=mbpa.RMSprop(1e-3, 10, initial_square=1.0)),
        replace(LINEAR, name="linear, Adam", rule=mbpa.Adam(1e-3, 10)),
        Case("words, 1 step", mbpa.Gradient(1.0), (268, 10_000), 256, 5_000, 1024),
        Case("words, 20 steps", mbpa.Gradient(0.5, 20), (268, 10_000), 128, 5_000, 128),
        Case("words, 5 steps, K 256", mbpa.Gradient(0.5, 5), (268, 10_000), 256, 5_000, 64),
        Case("many words, 5 steps", mbpa.Gradient(0.5, 5), (241, 33_278), 128, 5_000, 64),
        Case("MLP", mbpa.Gradient(0.05, 10), (784, 400, 400, 10), 10, 20_000, 2048),
    ],
    "cpu": [
        replace(LINEAR, batch=64, entries=20_000),
        replace(LINEAR, name="linear, 1 step", rule=mbpa.Gradient(0.1), batch=64, entries=20_000),
        replace(
            LINEAR,
            name="linear, RMSprop",
            rule=mbpa.RMSprop(1e-3, 10, initial_square=1.0),
            batch=16,
            entries=20_000,
        ),
        Case("words, 1 step", mbpa.Gradient(1.0), (268, 10_000), 256, 5_000, 64),
        Case("words, 10 steps", mbpa.Gradient(0.5, 10), (268, 10_000), 128, 5_000, 8),
        Case("MLP", mbpa.Gradient(0.05, 10), (784, 400, 400, 10), 10, 5_000, 64),
    ],
}


def measure_adaptation(case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    """Check and time a case; times are in microseconds per query."""
    runs = _Runs(case, device)
    with own_precision(runs.queries):
        error, tolerance, path = runs.agreement()
        if not error <= tolerance:
            raise AssertionError(f"{case.name}: off by {error:.1e}, more than {tolerance:.1e}")
        batch = case.batch
        engine = time_in_turns(
            {
                "adaptation": runs.solver(path),
                "engine": runs.engine,
                "vote": runs.vote,
                "head": runs.head_alone,
            },
            device,
            budget,
        )
        slow = time_in_turns({"loop": runs.loop}, device, budget)
        chunked = {
            chunk: time_in_turns({"": lambda c=chunk: runs.functional(c)}, device, budget / 4)[""]
            / chunk
            for chunk in (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
            if chunk <= batch
        }
    best = min(chunked, key=lambda chunk: chunked[chunk])
    micro = {name: 1e6 * took / batch for name, took in engine.items()}
    micro["loop"] = 1e6 * slow["loop"]
    micro["torch.func"] = 1e6 * chunked[best]
    operations, moved = limit(case)
    return {
        "case": case.name,
        "rule": repr(case.rule),
        "sizes": list(case.sizes),
        "k": case.k,
        "entries": case.entries,
        "batch": batch,
        "path": path,
        "error": error,
        "tolerance": tolerance,
        "microseconds": micro,
        "torch.func chunk": best,
        "operations": operations,
        "bytes": moved,
    }


def limit(case: Case) -> tuple[float, float]:
    """Return the least operations and bytes per query on the path it takes.

    Bytes: the rows it gathers (all entries once, if a batch needs more), its answer, and keys where
    they are used; with moments per weight, also these, in each step. Operations: each product once,
    at the precision of the answer; for an MLP, the products with the weights that all queries
    share.
    """
    size, classes, count, steps = case.sizes[0], case.sizes[-1], case.k, case.rule.steps
    rows = min(count, case.entries / case.batch)
    inputs = 4 * (rows * classes + 2 * classes + (count * size if steps > 1 else 0))
    if len(case.sizes) > 2:
        first, *others = (ins * outs for ins, outs in itertools.pairwise(case.sizes))
        return 2 * count * (first + 2 * steps * sum(others)), 4 * count * size
    if isinstance(case.rule, mbpa.Gradient):
        gram = 2 * count * size * (count if steps > 1 else 1)
        return gram + 2 * count * classes * (count * (steps - 1) + 1), inputs
    moments = 3 if isinstance(case.rule, mbpa.Adam) else 2
    state = 2 * 4 * moments * size * classes * (steps - 1)
    return 2 * (2 * steps - 1) * count * size * classes, inputs + state


class _Runs:
    """One case, set up with a real memory that was read for several batches of queries."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.head = case.head().to(device)
        generator = torch.Generator(device).manual_seed(1)
        size, classes = case.sizes[0], case.sizes[-1]

        def normal(count: int) -> torch.Tensor:
            return case.scale * torch.randn(count, size, generator=generator, device=device)

        memory = mbpa.ExactMemory(case.entries, size, device=device)
        labels = torch.randint(classes, (case.entries,), generator=generator, device=device)
        memory.write(normal(case.entries), labels)
        self.engine_ = mbpa.Engine()
        self.turn = 0
        self.problems: list[tuple[Problem, Neighbors]] = []
        for _ in range(ROUNDS):
            self.queries = normal(case.batch)
            neighbors = memory.read(self.queries, case.k)
            problem = Problem(
                head=self.head,
                rule=case.rule,
                loss="cross_entropy",
                adapting=tuple(name for name, _ in self.head.named_parameters()),
                queries=self.queries,
                outputs=self.head(self.queries).detach(),
                keys=neighbors.keys,
                values=neighbors.values,
                weights=neighbor_weights(mbpa.inverse_distance(), neighbors),
                dots=neighbors.dots,
            )
            self.problems.append((problem, neighbors))

    def next(self) -> tuple[Problem, Neighbors]:
        self.turn += 1
        return self.problems[self.turn % ROUNDS]

    def engine(self) -> torch.Tensor:
        return self.engine_.adapt(*self.next()).outputs

    def solver(self, path: str) -> Callable[[], object]:
        """Return the adaptation alone, with the stored outputs of the neighbours already read."""
        stored = []
        for problem, neighbors in self.problems:
            if problem.linear is None:
                stored.append(None)
                continue
            store = self.engine_._store_for(problem, path)
            with store.lookup(problem.linear, neighbors, problem.keys) as rows:
                stored.append(rows)
        chunk = self.engine_._plan(self.problems[0][0], self.case.entries, False).chunk

        def solve() -> None:
            problem, _ = self.next()
            rows = stored[self.turn % ROUNDS]
            if chunk >= self.case.batch:
                SOLVERS[path](problem, rows, False)
                return
            for start in range(0, self.case.batch, chunk):
                part = slice(start, start + chunk)
                SOLVERS[path](problem.rows(part), rows and rows.rows(part), False)

        return solve

    def functional(self, chunk: int) -> None:
        solve_functional(self.next()[0].rows(slice(0, chunk)))

    def loop(self) -> torch.Tensor:
        return self._loop(self.head, self.next()[0], torch.float32, 0)

    def vote(self) -> torch.Tensor:
        problem, neighbors = self.next()
        weights = neighbor_weights(mbpa.inverse_distance(), neighbors)
        return torch.zeros_like(problem.outputs).scatter_add_(1, problem.values, weights).log()

    def head_alone(self) -> torch.Tensor:
        return self.head(self.next()[0].queries)

    def agreement(self, queries: int = 3) -> tuple[float, float, str]:
        """Return the distance from the loop in float64, the tolerance, and the path taken."""
        problem, neighbors = self.problems[0]
        adaptation = self.engine_.adapt(problem, neighbors)
        wide = copy.deepcopy(self.head).double()
        exact = torch.stack([self._loop(wide, problem, torch.float64, b) for b in range(queries)])
        same = torch.stack(
            [self._loop(self.head, problem, torch.float32, b) for b in range(queries)]
        )
        exact, same = exact.log_softmax(1), same.double().log_softmax(1)
        got = adaptation.outputs[:queries].double().log_softmax(1)
        own = float((same - exact).abs().max())
        return float((got - exact).abs().max()), max(1e-4, 3 * own), adaptation.path

    def _loop(self, head: nn.Module, problem: Problem, dtype: torch.dtype, b: int) -> torch.Tensor:
        with torch.enable_grad():
            adapted = adapt_one(
                head,
                self.case.rule,
                "cross_entropy",
                None,
                problem.keys[b].to(dtype),
                problem.values[b],
                problem.weights[b].to(dtype),
            )
        return adapted(problem.queries[b : b + 1].to(dtype))[0]


CURVES = {
    "k": (5, 20, 50, 100, 200),
    "classes": (10, 100, 1_000, 10_000),
    "key size": (16, 128, 512, 2_048),
    "steps": (1, 2, 5, 10, 20),
    "entries": (1_000, 10_000, 100_000),
    "batch": (1, 16, 64, 256, 1_024),
}


def vary_case(case: Case, axis: str, value: int) -> Case:
    """Return the case with one of its sizes changed."""
    if axis == "k":
        return replace(case, k=value)
    if axis == "classes":
        return replace(case, sizes=(case.sizes[0], value))
    if axis == "key size":
        return replace(case, sizes=(value, case.sizes[-1]))
    if axis == "steps":
        return replace(case, rule=replace(case.rule, steps=value))
    return replace(case, **{axis: value})


def curves(device: torch.device, budget: float) -> dict[str, dict[str, list[float]]]:
    """Return microseconds per query as a function of each size, the others as in the first case."""
    base = ADAPTATION_CASES[device.type][0]
    found: dict[str, dict[str, list[float]]] = {}
    for axis, values in CURVES.items():
        points = {"values": [], "engine": [], "torch.func": []}
        for value in values:
            runs = _Runs(vary_case(base, axis, value), device)
            batch = runs.case.batch
            chunk = min(batch, 64 if device.type == "cuda" else 8)
            with own_precision(runs.queries):
                took = time_in_turns({"engine": runs.engine}, device, budget)
                slow = time_in_turns(
                    {"": lambda r=runs, c=chunk: r.functional(c)}, device, budget / 4
                )
            points["values"].append(value)
            points["engine"].append(1e6 * took["engine"] / batch)
            points["torch.func"].append(1e6 * slow[""] / chunk)
            del runs
        found[axis] = points
    return found
