"""The check for linearizability: on histories by hand, on services that are broken, on ours."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from servers import running

from mbpa.serve.answers import Reason
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier
from reliability.histories import (
    REFUSED,
    Acknowledged,
    Counted,
    Lesson,
    ServiceState,
    describe_violation,
    record_history,
    separate_counts,
    step_service,
    write_small_run,
)
from reliability.linearizability import Check, Event, Verdict, check_history

EMPTY = ServiceState(frozenset(), next_id=1, change=0)


def step_register(state: int, event: Event) -> int | None:
    if event.kind == "write":
        return int(event.argument)
    return state if event.is_lost or event.result == state else None


def write(value: int, called: int, returned: int | None) -> Event:
    return Event(0, "write", value, called, returned)


def read(value: int, called: int, returned: int | None) -> Event:
    return Event(1, "read", None, called, returned, value)


def judge(*history: Event) -> Verdict:
    return check_history(history, 0, step_register).verdict


def judge_service(*history: Event, start: ServiceState = EMPTY) -> Verdict:
    return check_history(history, start, step_service).verdict


# Histories of a register, which starts at 0


def test_what_happens_one_after_the_other_is_linearizable():
    assert judge() is Verdict.LINEARIZABLE
    assert judge(read(0, 1, 2), write(1, 3, 4), read(1, 5, 6)) is Verdict.LINEARIZABLE


def test_a_read_during_a_write_may_see_either_value():
    assert judge(write(1, 1, 9), read(0, 2, 3), read(1, 4, 5)) is Verdict.LINEARIZABLE


def test_the_order_that_explains_a_history_is_returned():
    history = [write(1, 1, 10), write(2, 2, 9), read(1, 11, 12)]
    assert check_history(history, 0, step_register).order == (1, 0, 2)


def test_a_stale_read_is_a_violation():
    assert judge(write(1, 1, 2), read(0, 3, 4)) is Verdict.VIOLATION


def test_a_lost_write_is_a_violation():
    history = [write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)]
    assert judge(*history) is Verdict.VIOLATION


def test_an_inverted_order_of_reads_is_a_violation():
    """The first saw the write, so the second, which began later, must see it too."""
    assert judge(write(1, 1, 9), read(1, 2, 3), read(0, 4, 5)) is Verdict.VIOLATION


def test_concurrent_writes_must_have_one_order_for_all_who_read():
    writes = write(1, 1, 4), write(2, 1, 4)
    agreeing = read(1, 5, 6), read(1, 7, 8)
    assert judge(*writes, *agreeing) is Verdict.LINEARIZABLE
    assert judge(*writes, read(1, 5, 6), read(2, 7, 8)) is Verdict.VIOLATION


def test_what_was_never_answered_may_happen_late_or_never_but_not_early():
    assert judge(write(1, 1, None), read(0, 2, 3), read(1, 4, 5)) is Verdict.LINEARIZABLE
    assert judge(write(1, 1, None), read(0, 2, 3)) is Verdict.LINEARIZABLE
    assert judge(read(1, 1, 2), write(1, 3, None)) is Verdict.VIOLATION
    once = write(1, 1, None), read(1, 2, 3), write(0, 4, 5), read(1, 6, 7)
    assert judge(*once) is Verdict.VIOLATION


def test_a_search_that_takes_too_long_is_undecided():
    writes = [write(value, 1, 100) for value in range(1, 16)]
    check = check_history([*writes, read(99, 101, 102)], 0, step_register, limit_s=0.0)
    assert check.verdict is Verdict.UNDECIDED


# Histories of the service


def learn(result: Any, called: int, returned: int | None, *labels: str, request=None) -> Event:
    return Event(0, "learn", Lesson(labels, request), called, returned, result)


def look(kind: str, result: Any, called: int, returned: int, argument: Any = None) -> Event:
    return Event(1, kind, argument, called, returned, result)


def test_every_kind_of_answer_is_held_against_the_state():
    taught = learn(Acknowledged((1, 2), 2), 1, 2, "a", "b")
    for kind, right, wrong in (
        ("explain", frozenset({1, 2}), frozenset({1})),
        ("predict", frozenset("ab"), frozenset("a")),
        ("labels", frozenset({("a", 1), ("b", 1)}), frozenset({("a", 2), ("b", 1)})),
        ("count", 2, 1),
        ("stats", Counted(2, 2, 1), Counted(2, 2, 2)),
    ):
        assert judge_service(taught, look(kind, right, 3, 4)) is Verdict.LINEARIZABLE
        assert judge_service(taught, look(kind, wrong, 3, 4)) is Verdict.VIOLATION
    for argument, gone in (("b", (2,)), ((2, 9), (2,)), ("c", ())):
        forgotten = look("forget", gone, 3, 4, argument)
        assert judge_service(taught, forgotten) is Verdict.LINEARIZABLE
        assert judge_service(taught, look("forget", (1,), 3, 4, argument)) is Verdict.VIOLATION
    with pytest.raises(ValueError, match="kind must be one that the service has"):
        judge_service(look("sing", None, 1, 2))


def test_an_id_that_is_given_twice_is_a_violation():
    one, other = Acknowledged((1,), 1), Acknowledged((2,), 1)
    assert judge_service(learn(one, 1, 9, "a"), learn(other, 1, 9, "a")) is Verdict.LINEARIZABLE
    assert judge_service(learn(one, 1, 9, "a"), learn(one, 1, 9, "a")) is Verdict.VIOLATION


def test_an_id_that_comes_back_is_a_violation():
    taught = learn(Acknowledged((1,), 1), 1, 2, "a")
    gone = look("forget", (1,), 3, 4, "a")
    again = learn(Acknowledged((1,), 1), 5, 6, "a")
    assert judge_service(taught, gone, again) is Verdict.VIOLATION


def test_a_request_that_is_sent_again_happens_once():
    lost = learn(None, 1, None, "a", request="r")
    again = learn(Acknowledged((1,), 1), 3, 4, "a", request="r")
    once, twice = Counted(1, 1, 1), Counted(2, 1, 2)
    assert judge_service(lost, again, look("stats", once, 5, 6)) is Verdict.LINEARIZABLE
    assert judge_service(lost, again, look("stats", twice, 5, 6)) is Verdict.VIOLATION


def test_a_request_id_with_other_examples_is_refused_once_it_is_known():
    first = learn(Acknowledged((1,), 1), 1, 2, "a", request="r")
    refused = learn(REFUSED, 3, 4, "a", "b", request="r")
    assert judge_service(first, refused) is Verdict.LINEARIZABLE
    assert judge_service(refused) is Verdict.VIOLATION


def test_half_a_lesson_is_a_violation():
    during = look("explain", frozenset({1}), 2, 3)
    assert judge_service(learn(Acknowledged((1, 2), 1), 1, 4, "a", "a"), during) is (
        Verdict.VIOLATION
    )


def test_a_count_of_another_moment_is_found_unless_it_is_separated():
    """The first was before the second, by its id, and counts the label of the second."""
    one = learn(Acknowledged((1,), 2), 1, 9, "a")
    two = learn(Acknowledged((2,), 2), 1, 9, "b")
    assert judge_service(one, two) is Verdict.VIOLATION
    assert judge_service(*separate_counts([one, two])) is Verdict.LINEARIZABLE
    impossible = learn(Acknowledged((1,), 3), 1, 9, "a")
    assert judge_service(*separate_counts([impossible, two])) is Verdict.VIOLATION


def test_a_violation_is_described_by_what_could_not_follow():
    history = [learn(Acknowledged((1,), 1), 1, 2, "a"), look("count", 0, 3, 4)]
    check = check_history(history, EMPTY, step_service)
    said = describe_violation(history, check.order)
    assert said.startswith("1 of 2 operations can be explained")
    assert said.endswith(str(history[1]))


# Services in memory, right and broken


class Toy:
    """A service whose requests take effect at a moment of a simulated clock.

    Args:
        mutation: what is wrong with it; "" is nothing.
    """

    def __init__(self, mutation: str, random: Random) -> None:
        self.mutation, self.random = mutation, random
        self.live: dict[int, str] = {}
        self.next_id, self.change = 1, 0
        self.requests: dict[str, tuple[int, ...]] = {}
        self.past: list[Any] = [Counted(0, 0, 0)]

    def learn(self, lesson: Lesson, id: int | None = None) -> tuple[int, ...]:
        if lesson.request in self.requests and self.mutation != "writes a repeated request twice":
            return self.requests[lesson.request]
        first = self.next_id if id is None else id
        ids = tuple(range(first, first + len(lesson.labels)))
        self.next_id = ids[-1] + 1
        self.live |= dict(zip(ids, lesson.labels, strict=True))
        self.change += 1
        if lesson.request is not None:
            self.requests[lesson.request] = ids
        self.past.append(self.count())
        return ids

    def forget(self, label: str) -> tuple[int, ...]:
        gone = tuple(sorted(id for id, name in self.live.items() if name == label))
        for id in gone:
            if self.mutation != "forgets all but one" or id != gone[-1]:
                del self.live[id]
        self.change += bool(gone)
        self.past.append(self.count())
        return gone

    def count(self) -> Counted:
        return Counted(len(self.live), len({*self.live.values()}), self.change)

    def look(self, kind: str) -> Any:
        if kind == "explain":
            return frozenset(self.live)
        if kind == "labels":
            return frozenset(Counter(self.live.values()).items())
        is_stale = self.mutation == "reads a replica that lags"
        return self.past[-2:][0] if is_stale else self.count()


def simulate(seed: int, mutation: str = "", clients: int = 4, operations: int = 8) -> list[Event]:
    """A history of random requests to a toy service, each with three moments of its own."""
    random = Random(seed)
    toy = Toy(mutation, random)
    moments: list[tuple[int, int, Callable[[], None]]] = []
    history: list[Event] = []

    def at(moment: int, act: Callable[[], None]) -> None:
        heapq.heappush(moments, (moment, len(moments) + random.getrandbits(40), act))

    def begin(client: int, left: int, now: int) -> None:
        if not left:
            return
        called, effect = now + 1, now + random.randrange(2, 30)
        returned = effect + random.randrange(1, 20)
        is_lost = random.random() < 0.1
        kind = random.choice(("learn", "learn", "forget", "explain", "labels", "stats"))
        argument: Any = None
        if kind == "forget":
            argument = random.choice("abc")
        elif kind == "learn":
            name = random.choice((None, f"r{random.randrange(6)}"))
            labels = random.choice(("a", "b", "cc")) if name is None else "ab"
            argument = Lesson(tuple(labels), name)
        id: list[int | None] = [None]
        if mutation == "draws ids before it locks":
            at(called, lambda: id.__setitem__(0, toy.next_id))
        if mutation == "acknowledges before it applies" and kind == "forget":
            effect += 60
        results: list[Any] = []

        def apply() -> None:
            if kind == "learn":
                results.append(Acknowledged(toy.learn(argument, id[0]), None))
            elif kind == "forget":
                results.append(toy.forget(argument))
            else:
                results.append(toy.look(kind))

        def finish() -> None:
            result = results[0] if results else toy_forgets(toy, argument)
            ended = None if is_lost else returned
            history.append(Event(client, kind, argument, called, ended, result))
            begin(client, left - 1, returned)

        if not is_lost or random.random() < 0.5:
            at(effect + (40 if is_lost else 0), apply)
        at(returned, finish)

    for client in range(clients):
        begin(client, operations, 0)
    while moments:
        heapq.heappop(moments)[2]()
    return history


def toy_forgets(toy: Toy, label: Any) -> tuple[int, ...]:
    """Return the answer of a service that has not forgotten yet."""
    return tuple(sorted(id for id, name in toy.live.items() if name == label))


def check_simulated(seed: int, mutation: str = "") -> Check:
    return check_history(simulate(seed, mutation), EMPTY, step_service, limit_s=20.0)


def test_histories_of_a_right_service_pass():
    verdicts = {check_simulated(seed).verdict for seed in range(40)}
    assert verdicts == {Verdict.LINEARIZABLE}


@pytest.mark.parametrize(
    "mutation",
    [
        "acknowledges before it applies",
        "writes a repeated request twice",
        "reads a replica that lags",
        "draws ids before it locks",
        "forgets all but one",
    ],
)
def test_broken_services_are_caught(mutation):
    verdicts = Counter(check_simulated(seed, mutation).verdict for seed in range(20))
    assert verdicts[Verdict.VIOLATION] >= 10
    assert not verdicts[Verdict.UNDECIDED]


# Our service


@pytest.mark.heavy
def test_histories_of_the_service_are_linearizable(tmp_path):
    write_small_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier)) as url,
    ):
        port = int(url.rsplit(":", 1)[1])
        for number in range(3):
            start, history = record_history([port], number, seed=0, clients=4, operations=15)
            assert len(history) == 60
            check = check_history(separate_counts(history), start, step_service, limit_s=30.0)
            assert check.verdict is Verdict.LINEARIZABLE


class CachingClassifier(Classifier):
    """Repeats its last explanation."""

    last: list[Reason] | None = None

    def explain(self, items=None, *, keys=None, **options) -> list[Reason]:
        reasons = super().explain(items, keys=keys, **options)
        before, self.last = self.last or reasons, reasons
        return before


def test_a_service_that_answers_from_a_cache_is_caught(tmp_path):
    write_small_run(tmp_path / "run")
    with (
        CachingClassifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier)) as url,
    ):
        port = int(url.rsplit(":", 1)[1])
        start, history = record_history([port], 0, seed=0, clients=3, operations=25)
        check = check_history(separate_counts(history), start, step_service, limit_s=30.0)
        assert check.verdict is Verdict.VIOLATION
