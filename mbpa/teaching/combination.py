"""Combination of several witnesses into probabilities and an in-scope score.

For each label there are up to three witnesses: the belief (`belief`), the largest cosine to a
stored example, and, for old labels, the log-probability of the trained head. Weighted sums of them
give p_old over the old labels and p_new over the new ones. A gate t then decides between the two:
p(c) = σ(−t) p_old(c) or σ(t) p_new(c). To keep old answers, a new label must win by a margin.

The in-scope score is the probability that a query belongs to any of the labels, by how near their
examples are. It multiplies p(c), so nothing unlike all examples gets a confident answer. All
weights are fitted by maximum likelihood on rehearsals, which makes probabilities calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

COSINE_SCALE = 10.0  # brings cosines to the size of the other witnesses
RIDGE = 1e-3
GATE_RIDGE = 1e-4
OLD_COUNT = 100.0  # counted as examples of an old label in the in-scope score
FREE_COUNT = 1000.0  # new labels with so many examples compete with old ones freely
TIE_MARGIN = 1e-3  # in logits
MARGINS = torch.linspace(0, 8, 81)  # tried, in logits
MAX_LOST_POINTS = 1.0  # of accuracy on old labels, by default
REHEARSED_FRACTION = 0.5  # of the loss that is allowed; on other queries the loss is larger
OUT_OF_SCOPE_SHARE = 0.02  # of all queries, assumed by the in-scope score
LOST_POINTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
"""Losses, in points, for which the margin is known."""
ANSWERED_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the queries out of scope that may be answered, for which the threshold is known."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the witnesses say about B queries, for O old and N new labels."""

    old_belief: Float[Tensor, "B O"]
    old_cosine: Float[Tensor, "B O"]
    head: Float[Tensor, "B O"]
    """Log-probabilities of the trained head."""
    new_belief: Float[Tensor, "B N"]
    new_cosine: Float[Tensor, "B N"]
    new_counts: Float[Tensor, "N"]
    """Number of examples of each new label."""

    def stack_old(self) -> Float[Tensor, "B O W"]:
        return torch.stack([self.old_belief, COSINE_SCALE * self.old_cosine, self.head], 2)

    def stack_new(self) -> Float[Tensor, "B N W"]:
        sizes = self.new_counts.log().expand(self.new_belief.shape)
        return torch.stack([self.new_belief, COSINE_SCALE * self.new_cosine, sizes], 2)

    def select(
        self, queries: Bool[Tensor, "B"] | None = None, new: Bool[Tensor, "N"] | None = None
    ) -> Evidence:
        """Return the evidence about some of the queries, with some of the new labels."""
        rows = slice(None) if queries is None else queries
        columns = slice(None) if new is None else new
        return Evidence(
            self.old_belief[rows],
            self.old_cosine[rows],
            self.head[rows],
            self.new_belief[rows][:, columns],
            self.new_cosine[rows][:, columns],
            self.new_counts[columns],
        )


@dataclass(frozen=True, eq=False)
class RehearsedEvidence:
    """Evidence about queries whose labels are known."""

    evidence: Evidence
    answers: Int[Tensor, "B"]
    """Position of the label among the old labels, or among the new ones."""
    is_new: Bool[Tensor, "B"]
    examples: int | None
    """Number of examples of every new label; `None`: it varies."""


@dataclass(frozen=True, eq=False)
class Combination:
    """Weights of the witnesses, of the gate and of the in-scope score."""

    old_weights: Float[Tensor, "W"]
    new_weights: Float[Tensor, "W"]
    gate_weights: Float[Tensor, "G"]
    scope_weights: Float[Tensor, "S"]
    margin_counts: Float[Tensor, "K"]
    """Numbers of examples per new label that were rehearsed, rising."""
    margins: Float[Tensor, "L K"]
    """By how much a new label must lead, by points lost (`LOST_POINTS`) and number of examples."""
    break_even: Float[Tensor, ""]
    """Least confidence with which answers were more often right than wrong in the rehearsals, where
    some queries were out of scope."""
    thresholds: Float[Tensor, "T"]
    """Least confidence with which at most `ANSWERED_SHARES` of the queries out of scope were
    answered."""
    rehearsed: Float[Tensor, "2 K 2"]
    """Accuracy in the rehearsals, by number of examples, on new and on old labels; first with the
    default limit on lost points, then without a limit."""

    def log_probs(self, evidence: Evidence, lost_points: float | None) -> Float[Tensor, "B C"]:
        """Return log p of the old labels, then of the new ones.

        Args:
            lost_points: accuracy on old labels to give up in rehearsals, in points; `None`: any.
        """
        old = (evidence.stack_old() @ self.old_weights).log_softmax(1)
        new = (evidence.stack_new() @ self.new_weights).log_softmax(1)
        if not old.shape[1] or not new.shape[1]:
            return torch.cat([old, new], 1)
        features, counts = describe_gate(evidence, self.old_weights, self.new_weights)
        gate = features @ self.gate_weights
        if lost_points is not None:
            # The best new label must lead by a margin. Where it does not, the gate moves only as
            # far as a tie, which the old label wins: a larger move would exaggerate confidence.
            lead = new.amax(1) - old.amax(1) + gate
            is_kept = lead < self._find_margin(counts, lost_points)
            gate = gate - is_kept * (lead + TIE_MARGIN).clamp_min(0)
        return torch.cat(
            [
                old + functional.logsigmoid(-gate)[:, None],
                new + functional.logsigmoid(gate)[:, None],
            ],
            1,
        )

    def score_scope(
        self, evidence: Evidence, log_probs: Float[Tensor, "B C"]
    ) -> Float[Tensor, "B"]:
        """Return the probability that each query belongs to one of the labels.

        It depends on how near the most probable label's examples are, not on how probable it is,
        and assumes that `OUT_OF_SCOPE_SHARE` of all queries are out of scope.
        """
        if not log_probs.shape[1]:
            return log_probs.new_zeros(len(log_probs))
        return (describe_scope(evidence, log_probs) @ self.scope_weights).sigmoid()

    def find_threshold(self, answered_share: float) -> float:
        """Return the confidence above which at most this share of queries out of scope is answered.

        The confidence is the probability of the most probable label times the in-scope score.
        """
        shares, wanted = torch.tensor(ANSWERED_SHARES), torch.tensor([answered_share])
        wanted = wanted.clamp(shares[0], shares[-1])
        return float(_interpolate(wanted, shares, self.thresholds[:, None].cpu()))

    def _find_margin(self, counts: Float[Tensor, "B"], lost_points: float) -> Float[Tensor, "B"]:
        """Interpolate the margin by points lost and by the logarithm of the number of examples."""
        points = torch.tensor(LOST_POINTS)
        wanted = torch.tensor([lost_points]).clamp(points[0], points[-1])
        margins = _interpolate(wanted, points, self.margins.cpu())[0].to(counts.device)
        places = torch.cat([self.margin_counts, counts.new_tensor([FREE_COUNT])]).log()
        values = torch.cat([margins, margins.new_zeros(1)])
        logs = counts.log().clamp(places[0], places[-1])
        return _interpolate(logs, places, values[:, None])[:, 0]

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to(self, device: torch.device) -> Self:
        return type(self)(**{name: value.to(device) for name, value in self.tensors().items()})


def _interpolate(
    wanted: Float[Tensor, "B"], places: Float[Tensor, "K"], values: Float[Tensor, "K V"]
) -> Float[Tensor, "B V"]:
    """Interpolate linearly between values at rising places."""
    right = torch.searchsorted(places, wanted.contiguous(), right=True).clamp(1, len(places) - 1)
    share = ((wanted - places[right - 1]) / (places[right] - places[right - 1]))[:, None]
    return values[right - 1] * (1 - share) + values[right] * share


def describe_gate(
    evidence: Evidence, old_weights: Float[Tensor, "W"], new_weights: Float[Tensor, "W"]
) -> tuple[Float[Tensor, "B G"], Float[Tensor, "B"]]:
    """Return the inputs of the gate, and the number of examples of the best new label."""
    old, new = evidence.stack_old() @ old_weights, evidence.stack_new() @ new_weights
    sure_new, best = new.log_softmax(1).max(1)
    sure_old = old.log_softmax(1).amax(1)
    counts = evidence.new_counts[best]
    sizes = counts.log()
    # Means rather than sums, so that the number of labels does not matter.
    lead = _average_exponentials(new) - _average_exponentials(old)
    nearest_old = COSINE_SCALE * evidence.old_cosine.amax(1)
    nearer = COSINE_SCALE * evidence.new_cosine.amax(1) - nearest_old
    features = [
        torch.ones_like(lead),
        sizes,
        lead,
        sure_old,
        sure_new,
        evidence.new_belief.amax(1) - evidence.old_belief.amax(1),
        nearer,
        nearest_old,
        evidence.head.amax(1),
        sizes * lead,
        sizes * nearer,
    ]
    return torch.stack(features, 1), counts


NEARNESS_COLUMNS = (2, 1)  # of the result of `describe_scope`: the belief and the cosine


def describe_scope(evidence: Evidence, log_probs: Float[Tensor, "B C"]) -> Float[Tensor, "B S"]:
    """Return the inputs of the in-scope score, all about the most probable label."""
    best = log_probs.argmax(1, keepdim=True)
    cosines = torch.cat([evidence.old_cosine, evidence.new_cosine], 1)
    beliefs = torch.cat([evidence.old_belief, evidence.new_belief], 1)
    olds = evidence.new_counts.new_full((evidence.old_belief.shape[1],), OLD_COUNT)
    counts = torch.cat([olds, evidence.new_counts])
    features = [
        torch.ones_like(best, dtype=cosines.dtype)[:, 0],
        COSINE_SCALE * cosines.gather(1, best)[:, 0],
        beliefs.gather(1, best)[:, 0],
        counts[best[:, 0]].log(),
    ]
    return torch.stack(features, 1)


def _average_exponentials(scores: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    return scores.logsumexp(1) - math.log(scores.shape[1])


# Fitting


def fit_combination(
    rehearsed: Sequence[RehearsedEvidence], generator: torch.Generator
) -> Combination:
    """Fit all weights by maximum likelihood, and find the margins.

    Out-of-scope queries for the in-scope score are those of new labels, a random half of which is
    withheld.
    """
    old = [
        (part.evidence.stack_old()[~part.is_new], part.answers[~part.is_new])
        for part in rehearsed
        if part.examples is None  # evidence about old labels does not depend on the new ones
    ]
    new = [
        (part.evidence.stack_new()[part.is_new], part.answers[part.is_new]) for part in rehearsed
    ]
    old_weights, new_weights = _fit_choice(old), _fit_choice(new)
    gates = [describe_gate(part.evidence, old_weights, new_weights)[0] for part in rehearsed]
    gate_weights = _fit_decision(torch.cat(gates), torch.cat([part.is_new for part in rehearsed]))
    counts = sorted({part.examples for part in rehearsed if part.examples is not None})
    none = torch.empty(0)
    combined = Combination(
        old_weights,
        new_weights,
        gate_weights,
        scope_weights=none,
        margin_counts=torch.tensor(counts, dtype=torch.float32),
        margins=torch.zeros(len(LOST_POINTS), len(counts)),
        break_even=torch.tensor(0.0),
        thresholds=none,
        rehearsed=torch.zeros(2, len(counts), 2),
    )
    margins = [
        _find_margins(combined, [part for part in rehearsed if part.examples == count])
        for count in counts
    ]
    partly = [_PartlyTaught.draw(combined, part, generator) for part in rehearsed]
    combined = replace(combined, scope_weights=_fit_scope(partly), margins=torch.stack(margins, 1))
    confidences = [combined.score_scope(p.evidence, p.log_probs) * p.sureness for p in partly]
    right = torch.cat([part.is_right for part in partly])
    return replace(
        combined,
        break_even=torch.tensor(find_break_even(torch.cat(confidences), right)),
        thresholds=_find_thresholds(partly, confidences),
        rehearsed=torch.tensor(
            [
                [_measure_accuracy(combined, rehearsed, count, lost_points) for count in counts]
                for lost_points in (REHEARSED_FRACTION * MAX_LOST_POINTS, None)
            ]
        ),
    )


def _measure_accuracy(
    combined: Combination,
    rehearsed: Sequence[RehearsedEvidence],
    count: int,
    lost_points: float | None,
) -> tuple[float, float]:
    """Return the accuracy on new and on old labels, with this number of examples."""
    right, is_new = [], []
    for part in (each for each in rehearsed if each.examples == count):
        columns = part.answers + part.is_new * part.evidence.head.shape[1]
        right.append(combined.log_probs(part.evidence, lost_points).argmax(1) == columns)
        is_new.append(part.is_new)
    hits, news = torch.cat(right).double(), torch.cat(is_new)
    return float(hits[news].mean()), float(hits[~news].mean())


@dataclass(frozen=True, eq=False)
class _PartlyTaught:
    """A rehearsal in which half of the new labels were not taught: their queries have no answer."""

    evidence: Evidence
    log_probs: Float[Tensor, "B C"]
    is_inside: Bool[Tensor, "B"]
    is_right: Bool[Tensor, "B"]
    examples: int | None

    @classmethod
    def draw(
        cls, combined: Combination, part: RehearsedEvidence, generator: torch.Generator
    ) -> Self:
        labels, old = len(part.evidence.new_counts), part.evidence.head.shape[1]
        taught = torch.zeros(labels, dtype=torch.bool)
        taught[torch.randperm(labels, generator=generator)[: max(1, labels // 2)]] = True
        evidence = part.evidence.select(new=taught)
        log_probs = combined.log_probs(evidence, None)
        answers = part.answers.clamp_max(labels - 1)
        is_inside = ~part.is_new | taught[answers]
        columns = torch.where(part.is_new, old + taught.cumsum(0)[answers] - 1, part.answers)
        is_right = is_inside & (log_probs.argmax(1) == columns)
        return cls(evidence, log_probs, is_inside, is_right, part.examples)

    @property
    def sureness(self) -> Float[Tensor, "B"]:
        return self.log_probs.amax(1).exp()


def _fit_scope(partly: Sequence[_PartlyTaught]) -> Float[Tensor, "S"]:
    features = torch.cat([describe_scope(part.evidence, part.log_probs) for part in partly])
    is_inside = torch.cat([part.is_inside for part in partly])
    # With few examples, nearness may seem to speak against a query: then it does not count.
    used = torch.ones(features.shape[1], dtype=torch.bool)
    weights = _fit_decision(features, is_inside)
    for column in NEARNESS_COLUMNS:
        if weights[column] < 0:
            used[column] = False
            weights = torch.zeros_like(weights)
            weights[used] = _fit_decision(features[:, used], is_inside)
    rehearsed = (~is_inside).double().mean().clamp(1e-6, 1 - 1e-6)
    weights[0] += torch.logit(rehearsed) - torch.logit(torch.tensor(OUT_OF_SCOPE_SHARE))
    return weights


def find_break_even(confidence: Float[Tensor, "H"], right: Bool[Tensor, "H"]) -> float:
    """Return the lowest threshold that maximises the number of right minus wrong answers.

    Returns 0 if it is best to answer everything.
    """
    levels, group = confidence.unique(return_inverse=True)  # rising; ties share a group
    gains = torch.zeros(len(levels), dtype=torch.int64).scatter_add_(0, group, 2 * right.long() - 1)
    lowest = int(gains.flip(0).cumsum(0).flip(0).argmax())
    return float(levels[lowest]) if lowest else 0.0


def _find_thresholds(
    partly: Sequence[_PartlyTaught], confidences: Sequence[Float[Tensor, "_"]]
) -> Float[Tensor, "T"]:
    """Return the threshold for each of `ANSWERED_SHARES`.

    It holds for every number of examples that was rehearsed, so it is the highest of theirs.
    """
    found = []
    for count in {part.examples for part in partly}:
        outside = torch.cat(
            [
                confidence[~part.is_inside]
                for part, confidence in zip(partly, confidences, strict=True)
                if part.examples == count
            ]
        )
        if len(outside):
            found.append(outside.double().quantile(1 - torch.tensor(ANSWERED_SHARES).double()))
    return torch.stack(found).amax(0).float() if found else torch.ones(len(ANSWERED_SHARES))


def _find_margins(
    combined: Combination, rehearsed: Sequence[RehearsedEvidence]
) -> Float[Tensor, "L"]:
    """Return the least margin that loses at most each of `LOST_POINTS` of the old labels.

    The loss is counted from the accuracy of the head alone, or from that of the combination
    without new labels if that is lower: no margin can win this difference back.
    """
    leads, total, alone = [], 0, 0
    for part in rehearsed:
        evidence, answers = part.evidence.select(~part.is_new), part.answers[~part.is_new]
        old = len(evidence.head[0])
        log_probs = combined.log_probs(evidence, None)
        total, alone = total + len(answers), alone + int((evidence.head.argmax(1) == answers).sum())
        right = log_probs[:, :old].argmax(1) == answers
        lead = log_probs[:, old:].amax(1) - log_probs[:, :old].amax(1)
        leads.append(lead[right])
    wins = torch.cat(leads)
    kept = (wins[None] < MARGINS[:, None]).sum(1)
    lost = 100 * (min(alone, len(wins)) - kept) / total
    margins = []
    for points in LOST_POINTS:
        enough = (lost <= points).nonzero()[:, 0]
        margins.append(MARGINS[int(enough[0])] if len(enough) else MARGINS[-1])
    return torch.stack(margins)


def _fit_choice(
    parts: Sequence[tuple[Float[Tensor, "_ _ W"], Int[Tensor, "_"]]],
) -> Float[Tensor, "W"]:
    """Fit the weights of a conditional logistic regression."""
    total = sum(len(answers) for _, answers in parts)
    given = [(features.double(), answers) for features, answers in parts if len(answers)]

    def loss(weights: Tensor) -> Tensor:
        sums = [
            functional.cross_entropy(features @ weights, answers, reduction="sum")
            for features, answers in given
        ]
        return torch.stack(sums).sum() / total + RIDGE * weights.square().sum()

    return _minimize(loss, parts[0][0].shape[2]).float()


def _fit_decision(features: Float[Tensor, "B F"], answers: Bool[Tensor, "B"]) -> Float[Tensor, "F"]:
    """Fit the weights of a logistic regression; the first feature is 1."""
    given, wanted = features.double(), answers.double()
    middle, width = given.mean(0), given.std(0).clamp_min(1e-6)
    middle[0], width[0] = 0, 1
    scaled = (given - middle) / width

    def loss(weights: Tensor) -> Tensor:
        error = functional.binary_cross_entropy_with_logits(scaled @ weights, wanted)
        return error + GATE_RIDGE * weights[1:].square().sum()

    weights = _minimize(loss, features.shape[1]) / width
    weights[0] -= weights[1:] @ middle[1:]
    return weights.float()


def _minimize(loss: Callable[[Tensor], Tensor], size: int) -> Float[Tensor, "F"]:
    """Minimise a smooth convex function of a few weights."""
    weights = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = loss(weights)
        value.backward()
        return value

    optimizer.step(evaluate)
    return weights.detach()
