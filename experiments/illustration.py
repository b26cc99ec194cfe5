"""Local fitting, illustrated: one-dimensional regression, after figure 2 of the paper.

A small network is trained briefly on a few points and cannot explain all of them. The points are
also written to a memory. Near a query, attention over the memory fits a constant to the neighbours,
whereas MbPA fits the network to them. The paper has a drawing; this experiment also measures the
error of each method at many unseen inputs, for several draws of the points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from experiments.config_checks import check_minima
from experiments.experiment import BySeed, Context, Experiment
from experiments.illustration_report import sections
from experiments.results import Record
from experiments.search import Grid, expand_grid
from mbpa.device import use_one_thread

LOWEST_INPUT, HIGHEST_INPUT = -2.0, 2.0
"""Range of points and queries."""
TUNING_SEEDS = 1_000
"""Added to the seeds when hyper-parameters are chosen, for other points and other networks."""
GRIDS: dict[str, Grid] = {
    "attention": {
        "attention_k": (1, 2, 3, 5, 8),
        "attention_bandwidth": (0.03, 0.05, 0.1, 0.2, 0.4),
    },
    "MbPA": {
        "mbpa_k": (3, 5, 8),
        "mbpa_bandwidth": (0.05, 0.1, 0.2),
        "mbpa_lr": (0.02, 0.05, 0.1),
        "mbpa_steps": (10, 100),  # three times as many gain one percent
    },
}
"""Values that `tune` tries, by field of the config."""


@dataclass(frozen=True)
class IllustrationConfig:
    """Protocol and hyper-parameters, the latter chosen by `experiments tune illustration`."""

    seeds: tuple[int, ...] = tuple(range(5))
    """Random seeds, one repetition each: positions of the points, noise, initial weights."""
    points: int = 24
    """Number of training points, which are also written to the memory."""
    noise: float = 0.05
    """Standard deviation of the noise, added to the points only."""
    width: int = 32
    """Width of the network's hidden layer."""
    training_steps: int = 100
    """Number of training steps, so few that the network explains only some of the points."""
    training_lr: float = 1e-2
    """Learning rate of the training."""
    attention_k: int = 8
    """Number of neighbours that attention averages."""
    attention_bandwidth: float = 0.1
    """Bandwidth of the Gaussian kernel of attention."""
    mbpa_k: int = 8
    """Number of neighbours that MbPA adapts to."""
    mbpa_bandwidth: float = 0.1
    """Bandwidth of the Gaussian kernel of MbPA."""
    mbpa_lr: float = 0.05
    """Learning rate of the adaptation."""
    mbpa_steps: int = 100
    """Number of adaptation steps."""
    queries: int = 200
    """Number of evenly spaced inputs at which errors are measured."""
    figure_seed: int = 0
    """Seed whose curves are recorded for the figure."""
    figure_query: float = -1.15
    """Query whose adapted network is drawn; by default at the edge of a gap, as in the paper."""
    figure_points: int = 121
    """Number of points per curve in the figure."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds must name at least one, got none")
        check_minima(self, dict.fromkeys(("points", "width", "queries", "figure_points"), 2))
        counts = "attention_k", "mbpa_k", "mbpa_steps", "training_steps"
        check_minima(self, dict.fromkeys(counts, 1))
        for name in ("attention_bandwidth", "mbpa_bandwidth", "mbpa_lr", "training_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not LOWEST_INPUT <= self.figure_query <= HIGHEST_INPUT:
            raise ValueError(
                f"figure_query must be between {LOWEST_INPUT} and {HIGHEST_INPUT}, "
                f"got {self.figure_query}"
            )

    def predictors(self) -> dict[str, mbpa.Predictor]:
        """Return the methods to compare, by name."""
        rule = mbpa.Gradient(lr=self.mbpa_lr, steps=self.mbpa_steps)
        around = mbpa.gaussian(self.attention_bandwidth)
        return {
            "parametric": mbpa.Parametric(),
            "attention": mbpa.NeighborVote(around, k=self.attention_k),
            "MbPA": mbpa.Adapted(rule, k=self.mbpa_k, kernel=mbpa.gaussian(self.mbpa_bandwidth)),
        }


def true_function(x: Float[Tensor, "N 1"]) -> Float[Tensor, "N 1"]:
    """Return the function to be learnt."""
    return torch.sin(2.5 * x) + 0.5 * x * torch.cos(5 * x)


@use_one_thread()
def run(config: IllustrationConfig, context: Context) -> BySeed:
    """Run all repetitions; the same config gives the same records on the same device."""
    kept = context.workspace.load("records")
    records: BySeed = dict(kept["by_seed"]) if kept else {}
    with context.bar(len(config.seeds), "fitting", "seeds", initial=len(records)) as bar:
        for seed in config.seeds:
            if seed not in records:
                records[seed] = _measure_seed(config, seed, context.device)
                context.workspace.save("records", {"by_seed": records})
                bar.update()
    return records


@use_one_thread()
def tune(
    config: IllustrationConfig, context: Context, *, grids: Mapping[str, Grid] = GRIDS
) -> BySeed:
    """Score every setting of the grids at other points than those of `run`, and choose the best."""
    seeds = tuple(seed + TUNING_SEEDS for seed in config.seeds)
    scenes = [_Scene.draw(config, seed, context.device) for seed in seeds]
    kept = context.workspace.load("errors")
    errors: list[float] = kept["errors"] if kept else []
    tried = [(method, setting) for method in grids for setting in expand_grid(grids[method])]
    with context.bar(len(tried), "searching", "settings", initial=len(errors)) as bar:
        for method, setting in tried[len(errors) :]:
            predictor = replace(config, **setting).predictors()[method]
            errors.append(statistics.fmean(scene.error(predictor) for scene in scenes))
            context.workspace.save("errors", {"errors": errors})
            bar.update()
    records: list[Record] = []
    for method in grids:
        found = [(e, s) for e, (m, s) in zip(errors, tried, strict=True) if m == method]
        records += [
            {
                "method": method,
                **setting,
                "name": "mean_squared_error",
                "value": _round_digits(error),
            }
            for error, setting in found
        ]
        best = min(found, key=lambda pair: pair[0])[1]
        records += [
            {"method": method, "setting": name, "name": "chosen", "value": value}
            for name, value in best.items()
        ]
    return {None: records}


# One repetition


@dataclass(frozen=True, eq=False)
class _Scene:
    """Points, and a network poorly trained on them."""

    config: IllustrationConfig
    x: Float[Tensor, "N 1"]
    y: Float[Tensor, "N 1"]
    head: nn.Module

    @classmethod
    def draw(cls, config: IllustrationConfig, seed: int, device: torch.device) -> _Scene:
        with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
            torch.manual_seed(seed)
            x = (
                (LOWEST_INPUT + (HIGHEST_INPUT - LOWEST_INPUT) * torch.rand(config.points, 1))
                .sort(0)
                .values
            )
            y = true_function(x) + config.noise * torch.randn(config.points, 1)
            head = nn.Sequential(nn.Linear(1, config.width), nn.Tanh(), nn.Linear(config.width, 1))
        x, y, head = x.to(device), y.to(device), head.to(device)
        optimizer = torch.optim.Adam(head.parameters(), lr=config.training_lr)
        for _ in range(config.training_steps):
            optimizer.zero_grad()
            (head(x) - y).square().mean().backward()
            optimizer.step()
        return cls(config, x, y, head)

    def model(self, predictor: mbpa.Predictor) -> mbpa.MbPA:
        """Return the network with a memory of the points."""
        memory = mbpa.ExactMemory(
            capacity=len(self.x),
            key_dim=1,
            value_shape=(1,),
            value_dtype=self.y.dtype,
            device=self.x.device,
        )
        model = mbpa.MbPA(head=self.head, memory=memory, predictor=predictor)
        model.write(self.x, self.y)
        return model

    def error(self, predictor: mbpa.Predictor) -> float:
        """Return the mean squared error against the true function."""
        queries = self.evenly(self.config.queries)
        predicted = self.model(predictor)(queries)
        return float((predicted - true_function(queries)).double().square().mean())

    def evenly(self, count: int) -> Float[Tensor, "N 1"]:
        return torch.linspace(LOWEST_INPUT, HIGHEST_INPUT, count, device=self.x.device)[:, None]


def adapt_function(
    model: mbpa.MbPA, query: Float[Tensor, "1 1"]
) -> Callable[[Float[Tensor, "N 1"]], Float[Tensor, "N 1"]]:
    """Return the head as adapted for this query, as a function that can be evaluated anywhere.

    `model(query)` gives only its value at the query, so this repeats the rule's steps one by one.
    """
    why, predictor = model.explain(query), model.predictor
    assert isinstance(predictor, mbpa.Adapted)
    assert why.neighbors is not None
    assert why.weights is not None
    keys, values, weights = why.neighbors.keys[0], why.neighbors.values[0], why.weights[0]

    def function(params: Any, x: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model.head, params, (x,))
        return outputs

    def loss(params: Any) -> Tensor:
        return weights @ (function(params, keys) - values).square().sum(1) / 2

    start = {name: p.detach() for name, p in model.head.named_parameters()}
    params: Mapping[str, Tensor] = start
    rule, state = predictor.rule, None
    assert isinstance(rule, mbpa.Rule)
    for _ in range(rule.steps):
        grads = torch.func.grad(loss)(params)
        params, state = rule.update(params, grads, start, state)
    return lambda x: function(params, x)


def _measure_seed(config: IllustrationConfig, seed: int, device: torch.device) -> list[Record]:
    scene = _Scene.draw(config, seed, device)
    records: list[Record] = [
        {
            "method": method,
            "split": "test",
            "name": "mean_squared_error",
            "value": _round_digits(scene.error(predictor)),
        }
        for method, predictor in config.predictors().items()
    ]
    return records + _record_figure(scene) if seed == config.figure_seed else records


def _record_figure(scene: _Scene) -> list[Record]:
    """Return the records of everything that the figure shows."""
    config = scene.config
    x, query = scene.evenly(config.figure_points), scene.x.new_tensor([[config.figure_query]])
    models = {name: scene.model(predictor) for name, predictor in config.predictors().items()}
    records = _points("truth", "curve", x, true_function(x))
    for method, model in models.items():
        records += _points(method, "curve", x, model(x))
        records += _points(method, "prediction", query, model(query))
    records += _points("truth", "prediction", query, true_function(query))
    adapted = adapt_function(models["MbPA"], query)
    records += _points("MbPA", "adapted for the query", x, adapted(x).detach())
    why = models["MbPA"].explain(query)
    assert why.neighbors is not None
    assert why.weights is not None
    weights = dict(zip(why.neighbors.ids[0].tolist(), why.weights[0].tolist(), strict=True))
    for number, record in enumerate(_points("memory", "entry", scene.x, scene.y)):
        weight = weights.get(number)  # ids are the entries' numbers
        records.append({**record, "weight": None if weight is None else _round_digits(weight)})
    return records


def _points(method: str, name: str, x: Tensor, y: Tensor) -> list[Record]:
    pairs = zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True)
    return [
        {"method": method, "name": name, "x": _round_digits(a), "value": _round_digits(b)}
        for a, b in pairs
    ]


def _round_digits(value: float) -> float:
    return float(f"{value:.6g}")


EXPERIMENT = Experiment(
    name="illustration",
    summary="local fitting in one dimension: the network, attention, and the network adapted",
    reproduces="paper, section 2.2, figure 2",
    presets={
        "smoke": IllustrationConfig(seeds=(0,), queries=50, figure_points=41),
        "quick": IllustrationConfig(),
        "paper": IllustrationConfig(seeds=tuple(range(20)), queries=1_000),
    },
    run=run,
    sections=sections,
    tune=tune,
)
