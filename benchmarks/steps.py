"""`python -m benchmarks.steps`: does `lr="auto"` do as well as a tuned step size?

Supports the default rule of `mbpa.Adapted()`. For five kinds of keys, the best fixed step is
searched on validation queries, in quarters of a decade, and compared with "auto" on test queries.
The kernel is the paper's; all other settings are the defaults. The constants of "auto" were chosen
on the same validation queries.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import mbpa
from benchmarks.situations import KINDS, KeyQueries, KeySituation
from benchmarks.tables import DocumentTable, format_rows
from experiments.language.passage import mix, perplexity, solve_weights
from mbpa.kernels import neighbor_weights
from mbpa.memory.neighbors import TENSORS

QUERIES_PER_BATCH = 64  # queries per call
WATCHED_QUERIES = 30  # queries per situation for which the loss of the neighbours is traced
QUARTER = 10**0.25
MAX_WORSE_RATES = 3  # consecutive worse rates after which the search ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("results") / ".cache")
    parser.add_argument("--out", type=Path, default=Path("results") / "steps.json")
    parser.add_argument("--document", type=Path, default=Path("docs") / "tuning.md")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--steps", nargs="*", type=int, default=[20, 5])
    parser.add_argument("--queries", type=int, default=1_000, help="maximum number per situation")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"torch": str(torch.__version__), "kinds": {}}
    if arguments.out.exists():  # keep results that are not measured this time
        report = json.loads(arguments.out.read_text("utf-8")) | {"torch": str(torch.__version__)}
    for kind in arguments.only:
        situations = [_fewer(each, arguments.queries) for each in KINDS[kind](arguments.cache)]
        for steps in arguments.steps:
            start = time.perf_counter()
            predictor = mbpa.Adapted(mbpa.Gradient("auto", steps), kernel=mbpa.InverseDistance())
            found = compare_steps(kind, situations, predictor)
            found["seconds"] = round(time.perf_counter() - start, 1)
            report["kinds"].setdefault(kind, {})[f"{steps} steps"] = found
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
            print(format_comparison(kind, steps, found), flush=True)
    page = arguments.document.read_text("utf-8")
    arguments.document.write_text(STEPS_TABLE.refresh(page, report), "utf-8")
    return 0


def compare_steps(
    kind: str, situations: Sequence[KeySituation], predictor: mbpa.Adapted
) -> dict[str, Any]:
    """Compare the best fixed step with "auto", by accuracy in percent or by perplexity."""
    is_language = kind == "LSTM states"
    measure: Callable[[list[Answers]], float] = _perplexity if is_language else _accuracy
    rule = predictor.rule
    assert isinstance(rule, mbpa.Gradient)
    parts = "validation", "test"
    own = {p: answer_queries(situations, mbpa.Parametric(), p) for p in parts}
    auto = {p: answer_queries(situations, predictor, p) for p in parts}
    tried: dict[float, tuple[float, float]] = {}

    def score(lr: float) -> tuple[float, float]:  # lower is better; the loss breaks ties
        fixed = replace(predictor, rule=replace(rule, lr=lr))
        answers = answer_queries(situations, fixed, "validation")
        tried[lr] = (measure(answers), _loss(answers))
        return (tried[lr][0] if is_language else -tried[lr][0], tried[lr][1])

    best = search_rate(score, float(f"{_usual_rate(situations, predictor):.1g}"))
    tuned = answer_queries(situations, replace(predictor, rule=replace(rule, lr=best)), "test")
    found: dict[str, Any] = {
        "measure": "perplexity" if is_language else "accuracy",
        "k": predictor.k,
        "queries": sum(len(situation.test.keys) for situation in situations),
        "parametric": measure(own["test"]),
        "auto": measure(auto["test"]),
        "tuned": measure(tuned),
        "tuned lr": best,
        "usual rate of auto": _usual_rate(situations, predictor),
        "loss": {
            "parametric": _loss(own["test"]),
            "auto": _loss(auto["test"]),
            "tuned": _loss(tuned),
        },
        "validation": {
            "auto": measure(auto["validation"]),
            "tried": {f"{lr:.3g}": score[0] for lr, score in sorted(tried.items())},
        },
        "neighbors": neighbors_loss(situations, predictor),
    }
    if is_language:
        fixed = replace(predictor, rule=replace(rule, lr=best))
        on_validation = answer_queries(situations, fixed, "validation")
        found["mixed with the LSTM"] = {
            "auto": _mix_perplexity(own, auto["validation"], auto["test"]),
            "tuned": _mix_perplexity(own, on_validation, tuned),
        }
    return found


Answers = tuple[Tensor, Tensor]
"""Log-probability of each correct answer, and whether the prediction was right."""


def answer_queries(
    situations: Sequence[KeySituation], predictor: mbpa.Predictor, part: str
) -> list[Answers]:
    found = []
    for situation in situations:
        questions: KeyQueries = getattr(situation, part)
        memory = mbpa.ExactMemory(1, questions.keys.shape[1])  # neighbours are known
        model = mbpa.MbPA(head=situation.head, memory=memory, predictor=predictor)
        for start in range(0, len(questions.keys), QUERIES_PER_BATCH):
            rows = slice(start, start + QUERIES_PER_BATCH)
            neighbors, answers = questions.neighbors.rows(rows), questions.answers[rows]
            said = model(keys=questions.keys[rows], neighbors=neighbors)
            found.append((said.gather(1, answers[:, None])[:, 0], said.argmax(1) == answers))
    return found


def search_rate(score: Callable[[float], tuple[float, float]], first: float) -> float:
    """Search from the first rate up and down until it only gets worse; return the best rate."""
    scores = {first: score(first)}
    for factor in (QUARTER, 1 / QUARTER):
        rate, worse = first, 0
        while worse < MAX_WORSE_RATES:
            rate *= factor
            best = min(scores.values())
            scores[rate] = score(rate)
            worse = 0 if scores[rate] < best else worse + 1
    return min(scores, key=lambda rate: scores[rate])


def neighbors_loss(situations: Sequence[KeySituation], predictor: mbpa.Adapted) -> dict[str, float]:
    """Return how often a step of "auto", or all steps together, raise the neighbours' loss."""
    total = rises = ends = 0
    for situation in situations:
        for query in range(min(WATCHED_QUERIES, len(situation.test.keys))):
            neighbors = situation.test.neighbors.rows(slice(query, query + 1)).first(predictor.k)
            losses = follow_losses(situation, predictor, neighbors)
            total += 1
            rises += any(b > a * (1 + 1e-5) for a, b in itertools.pairwise(losses))
            ends += losses[-1] > losses[0] * (1 + 1e-5)
    return {"queries": total, "rose once": 100 * rises / total, "rose in all": 100 * ends / total}


def follow_losses(
    situation: KeySituation, predictor: mbpa.Adapted, neighbors: mbpa.Neighbors
) -> list[float]:
    """Return the weighted loss of one query's neighbours, before and after each step."""
    (rate,) = rates_of(situation, predictor, neighbors)
    head = copy.deepcopy(situation.head)
    keys, values = neighbors.keys[0], neighbors.values[0]
    weights = neighbor_weights(predictor.kernel, neighbors)[0]
    optimizer = torch.optim.SGD(head.parameters(), lr=rate)
    losses = []
    for _ in range(predictor.rule.steps + 1):
        loss = weights @ functional.cross_entropy(head(keys), values, reduction="none")
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def rates_of(
    situation: KeySituation, predictor: mbpa.Adapted, neighbors: mbpa.Neighbors
) -> list[float]:
    """Return the step sizes that "auto" chooses for these queries."""
    from mbpa.adaptation import Problem
    from mbpa.adaptation.step_size import resolve_step_size

    keys, weights = neighbors.keys, neighbor_weights(predictor.kernel, neighbors)
    with torch.no_grad():
        outputs = situation.head(keys[:, 0])
        names = tuple(name for name, _ in situation.head.named_parameters())
        loss = "cross_entropy"
        problem = Problem(
            situation.head, predictor.rule, loss, names, keys[:, 0], outputs, keys,
            neighbors.values, weights,
        )  # fmt: skip
        return resolve_step_size(problem, None, False).weights.sum(1).tolist()


def _usual_rate(situations: Sequence[KeySituation], predictor: mbpa.Adapted) -> float:
    found: list[float] = []
    for situation in situations:
        neighbors = situation.validation.neighbors.rows(slice(0, 100)).first(predictor.k)
        found += rates_of(situation, predictor, neighbors)
    return float(torch.tensor(found).median())


def _fewer(situation: KeySituation, most: int) -> KeySituation:
    def some(questions: KeyQueries) -> KeyQueries:
        chosen = torch.randperm(len(questions.keys), generator=torch.Generator().manual_seed(1))
        chosen = chosen[:most].sort().values
        neighbors = questions.neighbors
        fewer = {name: getattr(neighbors, name)[chosen] for name in TENSORS}
        return KeyQueries(
            questions.keys[chosen], questions.answers[chosen], replace(neighbors, **fewer)
        )

    return replace(situation, validation=some(situation.validation), test=some(situation.test))


def _accuracy(answers: list[Answers]) -> float:
    return 100 * float(torch.cat([right for _, right in answers]).double().mean())


def _join_logs(answers: list[Answers]) -> Tensor:
    return torch.cat([logs for logs, _ in answers])


def _loss(answers: list[Answers]) -> float:
    found = -float(_join_logs(answers).double().mean())
    return found if math.isfinite(found) else math.inf


def _perplexity(answers: list[Answers]) -> float:
    return perplexity(_join_logs(answers))


def _mix_perplexity(
    own: dict[str, list[Answers]], validation: list[Answers], test: list[Answers]
) -> float:
    """Return the perplexity of a mixture, with the weight that is best on validation."""
    weights = solve_weights(torch.stack([_join_logs(own["validation"]), _join_logs(validation)]))
    return perplexity(mix(torch.stack([_join_logs(own["test"]), _join_logs(test)]), weights))


def format_steps(report: dict[str, Any]) -> str:
    """Return a table of the comparisons, those with the most steps first."""
    head = ["keys", "steps", "queries", "head alone", "fixed step, tuned", '"auto"', "tuned lr"]
    head += ['median rate of "auto"', "neighbours' loss rose"]
    rows = [head]
    found = [
        (int(steps.split()[0]), kind, each)
        for kind, by_steps in report["kinds"].items()
        for steps, each in by_steps.items()
    ]
    for steps, kind, each in sorted(found, key=lambda one: -one[0]):
        unit = "%" if each["measure"] == "accuracy" else ""
        numbers = [f"{each[name]:.1f}{unit}" for name in ("parametric", "tuned", "auto")]
        rates = [f"{each[name]:.2g}" for name in ("tuned lr", "usual rate of auto")]
        watched = each["neighbors"]
        rose = f"{watched['rose once'] / 100 * watched['queries']:.0f} of {watched['queries']}"
        rows.append([kind, str(steps), str(each["queries"]), *numbers, *rates, rose])
    return format_rows(rows)


def format_comparison(kind: str, steps: int, found: dict[str, Any]) -> str:
    """Return a comparison in one line."""
    names = "parametric", "auto", "tuned"
    told = "  ".join(f"{name} {found[name]:.2f}" for name in names)
    return (
        f"{kind:15} T {steps:2}  {found['measure']:10} {told} (lr {found['tuned lr']:.3g}, auto "
        f"usually {found['usual rate of auto']:.3g})  loss {found['loss']}  {found['neighbors']} "
        f"{found.get('mixed with the LSTM', '')}"
    )


STEPS_TABLE = DocumentTable("steps", format_steps)


if __name__ == "__main__":
    sys.exit(main())
