"""Claims on continual learning: section 4.1 and figure 3, by the results of permuted MNIST."""

from __future__ import annotations

import itertools

from experiments.claims.claim import (
    Claim,
    Evidence,
    Measured,
    Outcome,
    PytestNode,
    Verdict,
    cite,
    decide,
    format_all,
    run,
    tune,
)
from experiments.results import value_of

NAME = "permuted-mnist"
MARGIN = 0.5
"""Points of accuracy that count as a difference if there is one seed."""
FAR = 5.0
"""Points of accuracy that count as "considerably" less."""
RECOVERED = 0.9
"""Share of the lost accuracy that counts as recovering performance."""
FEW_STEPS = 20
"""The most steps that the paper searched."""
EXCEPTION = 100
"""Examples per task at which the paper finds EWC better."""
BYTES = 4
"""Size of a parameter or of a Fisher value. A pixel takes one byte, and so does a label."""
RUN, SEARCH = run(NAME), tune(NAME)


class _Scores:
    """Accuracies in percent, after all tasks unless `tasks` says otherwise."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.config = evidence, evidence.config(NAME)
        self.sizes: list[int] = sorted(self.config["memory_per_task"])
        self.tasks: int = self.config["tasks"]
        self.n = " / ".join(f"{size:,}" for size in self.sizes)

    def accuracy(
        self, method: str, size: int | None = None, stream: str = "sequence", tasks: int = 0
    ) -> Measured:
        return self.evidence.measure(
            NAME,
            "mean_accuracy",
            scale=100,
            method=method,
            memory_per_task=size,
            stream=stream,
            tasks_seen=tasks or self.tasks,
        )

    def by_size(self, method: str, stream: str = "sequence") -> dict[int, Measured]:
        return {size: self.accuracy(method, size, stream) for size in self.sizes}

    def is_ahead(self, one: Measured, *others: Measured) -> bool:
        return all(one.is_above(other, MARGIN) for other in others)


def _forgets(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    learnt = scores.accuracy("MLP", tasks=1)
    later = evidence.measure(
        NAME,
        "accuracy",
        scale=100,
        method="MLP",
        stream="sequence",
        task=0,
        tasks_seen=scores.tasks,
    )
    seen = (
        f"first task: {learnt.format()}% when learnt, {later.format()}% after {scores.tasks} tasks"
    )
    return decide([scores.is_ahead(learnt, later) and (learnt - later).mean > FAR], seen)


def _ewc_helps(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    ewc, plain = scores.accuracy("EWC"), scores.accuracy("MLP")
    return decide([scores.is_ahead(ewc, plain)], f"{ewc.format()}% against {plain.format()}%")


def _recovers(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    learnt, plain = scores.accuracy("MLP", tasks=1), scores.accuracy("MLP")
    lost = (learnt - plain).mean
    shares = [(one - plain).mean / lost for one in scores.by_size("MbPA").values()]
    steps = scores.config["alone"]["steps"]
    one_step = [
        max(
            100 * value_of(r)
            for r in evidence.list_trials(NAME, method="MbPA", memory_per_task=size, steps=1)
        )
        for size in scores.sizes
    ]
    seen = (
        f"of {lost:.1f} points lost, {format_all((100 * share for share in shares), 0)}% "
        f"come back in {' / '.join(map(str, steps))} steps, n = {scores.n}; one step alone "
        f"reaches {format_all(one_step)}% on held-out images"
    )
    enough = [share >= RECOVERED for share in shares]
    return decide([e and s <= FEW_STEPS for e, s in zip(enough, steps, strict=True)], seen)


def _fewer_updates(evidence: Evidence) -> Outcome:
    config = evidence.config(NAME)
    updates = config["epochs"] * config["examples"] // config["batch"]
    steps = config["alone"]["steps"]
    seen = f"{' / '.join(map(str, steps))} steps against {updates} updates for one task"
    return decide([each <= updates / 10 for each in steps], seen)


def _random_is_worse(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    near, random = scores.by_size("MbPA"), scores.by_size("random memories")
    seen = f"{format_all(random.values())}% against {format_all(near.values())}%, n = {scores.n}"
    return decide([(near[n] - random[n]).mean > FAR for n in scores.sizes], seen)


def _beats_mlp(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    ours, plain = scores.by_size("MbPA"), scores.accuracy("MLP")
    seen = f"{format_all(ours.values())}% against {plain.format()}%, n = {scores.n}"
    return decide([scores.is_ahead(one, plain) for one in ours.values()], seen)


def _beats_ewc(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    ours, ewc = scores.by_size("MbPA"), scores.accuracy("EWC")
    seen = f"{format_all(ours.values())}% against {ewc.format()}%, n = {scores.n}"
    return decide([scores.is_ahead(one, ewc) for n, one in ours.items() if n != EXCEPTION], seen)


def _ewc_wins_with_few(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    ours, ewc = scores.accuracy("MbPA", EXCEPTION), scores.accuracy("EWC")
    seen = f"MbPA {ours.format()}%, EWC {ewc.format()}%"
    if scores.is_ahead(ours, ewc):
        seen += "; MbPA is ahead here, too"
    return decide([scores.is_ahead(ewc, ours)], seen)


def _grows(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    ours = list(scores.by_size("MbPA").values())
    checks = [scores.is_ahead(more, fewer) for fewer, more in itertools.pairwise(ours)]
    return decide(checks, f"{format_all(ours)}%, n = {scores.n}")


def _needs_less_memory(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    hidden = scores.config["hidden"]
    network = BYTES * (785 * hidden + (hidden + 1) * hidden + (hidden + 1) * 10)
    ewc = 2 * scores.tasks * network
    ours = [scores.tasks * size * (784 + 1) for size in scores.sizes]
    seen = (
        f"{format_all(each / 1e6 for each in ours)} MB, n = {scores.n}; EWC as the paper "
        f"counts {ewc / 1e6:.1f} MB, with all penalties added up {2 * network / 1e6:.1f} MB"
    )
    return decide([each <= ewc / 2 for each in ours], seen)


def _survives_switches(evidence: Evidence) -> Outcome:
    scores = _Scores(evidence)
    stream = "switching"
    plain, guessed = (scores.accuracy(each, stream=stream) for each in ("MLP", "EWC"))
    told = scores.accuracy("EWC, told every switch", stream=stream)
    ours = scores.by_size("MbPA", stream)
    seen = (
        f"task changes every {scores.config['switch_every']} examples: MLP {plain.format()}%, EWC "
        f"{guessed.format()}%, EWC told every change {told.format()}%, "
        f"MbPA {format_all(ours.values())}%, n = {scores.n}"
    )
    hampered = [scores.is_ahead(plain, each) for each in (guessed, told)]
    return decide([*hampered, *(scores.is_ahead(one, plain) for one in ours.values())], seen)


def _make_combined_claim(other: str) -> Claim:
    """Return the claim that MbPA on top of another method improves on both."""
    stored = other != "EWC"

    def judge(evidence: Evidence) -> Outcome:
        scores = _Scores(evidence)
        both, ours = scores.by_size(f"MbPA + {other}"), scores.by_size("MbPA")
        alone = {n: scores.accuracy(other, n if stored else None) for n in scores.sizes}
        ahead = {n: scores.is_ahead(both[n], ours[n], alone[n]) for n in scores.sizes}
        which = " / ".join(f"{n:,}" for n in scores.sizes if ahead[n])
        seen = (
            f"{format_all(both.values())}%, alone {format_all(ours.values())}% and "
            f"{format_all(alone.values() if stored else [alone[scores.sizes[0]]])}%, n = {scores.n}"
        )
        some = f"; clearly ahead at n = {which}" if which and not all(ahead.values()) else ""
        return decide(ahead.values(), seen + some)

    says = {
        "EWC": "MbPA combined with EWC improves further (figure 3, right)",
        "replay": "MbPA combined with standard replay improves further",
        "DER++": "MbPA can be combined with any other algorithm; here with DER++, a later one",
    }
    holds_if = f"MbPA + {other} is clearly ahead of both at every n"
    return Claim("4.1", says[other], holds_if, judge, (RUN,), (13,) if other == "EWC" else (16,))


def _fewer_layers(evidence: Evidence) -> Outcome:
    sizes = sorted(evidence.config(NAME)["memory_per_task"])
    trials = evidence.list_trials(NAME, method="MbPA")
    counts = sorted({int(r["layers"] or 0) for r in trials})
    best = {
        count: [
            max(
                100 * value_of(r)
                for r in trials
                if r["memory_per_task"] == size and r["layers"] == count
            )
            for size in sizes
        ]
        for count in counts
    }
    told = "; ".join(
        f"{count} of {counts[-1]} layers {format_all(best[count])}" for count in counts
    )
    fewer = [max(best[count][place] for count in counts[:-1]) for place in range(len(sizes))]
    checks = [some >= whole for some, whole in zip(fewer, best[counts[-1]], strict=True)]
    return decide(checks, f"{told}%, n = {' / '.join(f'{size:,}' for size in sizes)}")


FORGETS = Claim(
    "abstract, 1",
    "After a shift of the training data, a network performs badly on what it knew before",
    f"the MLP loses more than {FAR:g} points on its first task",
    _forgets,
    (RUN,),
    (11, 17),
)
BEATS_MLP = Claim(
    "4.1",
    "MbPA outperforms the MLP",
    "it is clearly ahead at every n",
    _beats_mlp,
    (RUN,),
    (11, 14),
)
BEATS_EWC = Claim(
    "4.1",
    "MbPA is superior to EWC at every memory size but n = 100",
    "it is clearly ahead at every other n",
    _beats_ewc,
    (RUN,),
    (13, 15),
)
EWC_WINS_WITH_FEW = Claim(
    "4.1",
    "With 100 examples per task, EWC is better",
    "EWC is clearly ahead at n = 100",
    _ewc_wins_with_few,
    (RUN,),
    (12, 13),
)
RECOVERS = Claim(
    "4.1",
    "Once a task is forgotten, only a few gradient steps on selected memories recover performance",
    f"at every n, at most {FEW_STEPS} steps bring back {RECOVERED:.0%} of what the MLP lost",
    _recovers,
    (RUN, SEARCH),
    (15,),
)
SWITCHES = Claim(
    "4.1",
    "Without task boundaries, MbPA allows frequent switches, which hamper the Fisher "
    "information of EWC",
    "EWC is clearly behind the MLP, MbPA clearly ahead of it at every n",
    _survives_switches,
    (RUN,),
    (18,),
)
WITH_EWC, WITH_REPLAY, WITH_DER = (
    _make_combined_claim(other) for other in ("EWC", "replay", "DER++")
)

CLAIMS = (
    FORGETS,
    Claim(
        "1",
        "Elastic weight consolidation is promising against forgetting",
        "EWC is clearly ahead of the MLP",
        _ewc_helps,
        (RUN,),
        (13,),
    ),
    RECOVERS,
    Claim(
        "4.1",
        "This is few compared with the updates that reach the solution from random weights",
        "at every n, steps are at most a tenth of the updates for one task",
        _fewer_updates,
        (RUN,),
        (11,),
    ),
    Claim(
        "4.1",
        "Updates on memories chosen at random are considerably less useful",
        f"they are more than {FAR:g} points behind at every n",
        _random_is_worse,
        (RUN,),
    ),
    BEATS_MLP,
    BEATS_EWC,
    EWC_WINS_WITH_FEW,
    Claim(
        "4.1",
        "Performance grows with the number of examples stored",
        "every larger n is clearly ahead of the one before",
        _grows,
        (RUN,),
        (12,),
    ),
    Claim(
        "4.1",
        "MbPA needs much less memory than EWC",
        "it takes at most half of what the paper counts for EWC, at every n",
        _needs_less_memory,
        (RUN,),
        (13,),
    ),
    Claim(
        "4.1",
        "EWC has to store parameters and Fisher matrices of all tasks seen so far",
        "no smaller state gives the same penalty",
        cite(
            Verdict.FAILS,
            "the penalties add up to one parabola: two numbers per parameter, however many tasks",
        ),
        (
            PytestNode(
                "tests/experiments/test_baselines.py", "test_ewc_pulls_as_the_sum_over_tasks_does"
            ),
        ),
        (13,),
    ),
    Claim(
        "4.1",
        "MbPA stores no task identifiers and uses no task boundaries",
        "what is stored depends on the position in the stream alone",
        cite(Verdict.HOLDS, "one example of every window of the stream is stored, at random"),
        (
            PytestNode(
                "tests/experiments/test_permuted_mnist.py",
                "test_one_example_of_every_window_is_stored_and_fewer_are_a_part_of_more",
            ),
        ),
        (12,),
    ),
    SWITCHES,
    WITH_EWC,
    WITH_REPLAY,
    WITH_DER,
    Claim(
        "3",
        "Adapting only a subset of the parameters counters overfitting to few neighbours",
        "adapting fewer layers is at least as accurate, at every n, on held-out images",
        _fewer_layers,
        (SEARCH,),
        (15,),
    ),
)
