"""Replayed predictions and reads equal computed ones, also after everything that may change."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

import mbpa
from mbpa.replay import REPEATS, Replayer, assume, is_recording, is_replayed

Test = TypeVar("Test", bound=Callable[..., None])
CLASSES, SIZE, ENTRIES = 7, 16, 20_000


def needs_gpu(test: Test) -> Test:
    """Mark a test that runs only where there is a CUDA device."""
    is_missing = not torch.cuda.is_available()
    skipped: Test = pytest.mark.skipif(is_missing, reason="needs a CUDA device")(test)
    marked: Test = pytest.mark.gpu(skipped)
    return marked


def test_assumptions_are_checked_at_once_unless_recording() -> None:
    assert assume(torch.tensor(True))
    assert not assume(torch.tensor(False))
    assert not is_recording()


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert not is_replayed(torch.zeros(1, 2))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def make_model(rule: mbpa.Rule | mbpa.MAP | None = None) -> mbpa.MbPA:
    torch.manual_seed(0)
    memory = mbpa.ExactMemory(ENTRIES, SIZE, device="cuda")
    predictor = mbpa.Adapted(rule or mbpa.Gradient(0.05, 5), k=10)
    model = mbpa.MbPA(head=nn.Linear(SIZE, CLASSES).cuda(), memory=memory, predictor=predictor)
    labels = torch.randint(CLASSES, (ENTRIES,), generator=torch.Generator().manual_seed(1)).cuda()
    model.write(keys=draw(ENTRIES, SIZE), values=labels)
    return model


def predict_both(
    model: mbpa.MbPA, queries: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    replayed = [model(keys=queries) for _ in range(REPEATS + 2)]
    assert all(torch.equal(each, replayed[0]) for each in replayed)
    with monkeypatch.context() as patch:
        patch.setenv("MBPA_REPLAY", "0")
        return replayed[-1], model(keys=queries)


@needs_gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "rule",
    [mbpa.Gradient(0.05, 5), mbpa.Gradient(steps=5), mbpa.Gradient(0.05), mbpa.MAP(0.1)],
    ids=["gradient", "auto", "one step", "map"],
)
def test_replayed_predictions_are_the_computed_ones(
    rule: mbpa.Rule, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(rule)
    for seed in range(3):
        replayed, computed = predict_both(model, draw(batch, SIZE, seed=seed), monkeypatch)
        assert torch.equal(replayed, computed)


@needs_gpu
def test_a_replay_follows_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, queries = make_model(), draw(2, SIZE, seed=5)

    def check() -> Tensor:
        replayed, computed = predict_both(model, queries, monkeypatch)
        assert torch.equal(replayed, computed)
        return replayed

    results = [check()]
    model.write(keys=queries, values=[3, 4])  # overwrites the oldest
    results.append(check())
    found = model.memory.read(queries, 1)
    model.memory.delete(found.ids[:, 0])
    results.append(check())
    model.memory.replace_keys(model.memory.ids[:50], queries[:1].expand(50, -1))
    results.append(check())
    assert isinstance(model.head, nn.Linear)
    model.head.weight.data[2] += 1
    results.append(check())
    model.grow(CLASSES + 3)
    assert check().shape == (2, CLASSES + 3)
    for before, after in itertools.pairwise(results):
        assert not torch.equal(before, after)


@needs_gpu
def test_balanced_weights_follow_writes_that_leave_the_form_of_a_prediction() -> None:
    """A full memory keeps its size when it is overwritten; only its counts of labels change."""
    model = make_model()
    kernel = mbpa.Balanced(mbpa.InverseDistance())
    model.predictor = mbpa.Adapted(mbpa.Gradient(0.05, 5), k=10, kernel=kernel)
    queries = draw(2, SIZE, seed=5)
    for turn in range(REPEATS + 3):
        labels = torch.full((ENTRIES // 10,), turn % CLASSES, device="cuda")
        model.write(keys=draw(ENTRIES // 10, SIZE, seed=turn), values=labels)
        twin = copy.deepcopy(model).cpu()
        assert (model(keys=queries).cpu() - twin(keys=queries.cpu())).abs().max() < 1e-4
        after = model.compare(queries).after
        assert (after.cpu() - twin(keys=queries.cpu())).abs().max() < 1e-4


@needs_gpu
def test_replayed_reads_are_the_computed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_model().memory
    for seed in range(3):
        queries = draw(2, SIZE, seed=seed)
        replayed = [memory.read(queries, 9, keys_for=4) for _ in range(REPEATS + 2)][-1]
        with monkeypatch.context() as patch:
            patch.setenv("MBPA_REPLAY", "0")
            computed = memory.read(queries, 9, keys_for=4)
        for name, value in vars(computed).items():
            same = getattr(replayed, name)
            assert torch.equal(same, value) if isinstance(value, Tensor) else same == value


@needs_gpu
def test_a_wrong_assumption_is_computed_anew() -> None:
    replayer, calls = Replayer(), []

    def compute(numbers: Tensor) -> tuple[Tensor, ...]:
        calls.append(is_recording())
        if assume((numbers > 0).all()):
            return (numbers.sqrt(),)
        return (numbers * 0,)

    positive, negative = torch.ones(4).cuda(), -torch.ones(4).cuda()
    for _ in range(REPEATS + 3):
        assert torch.equal(replayer.run("form", compute, positive)[0], positive)
    assert calls.count(True) == 1
    count = len(calls)
    assert torch.equal(replayer.run("form", compute, negative)[0], 0 * negative)
    assert len(calls) == count + 1
    replayer.run("form", compute, positive)
    assert len(calls) == count + 1


@needs_gpu
def test_what_cannot_be_recorded_is_computed() -> None:
    replayer = Replayer()

    def compute(numbers: Tensor) -> tuple[Tensor, ...]:
        return (numbers * float(numbers.sum()),)  # waits for the GPU

    numbers = torch.ones(4).cuda()
    for _ in range(REPEATS + 3):
        assert replayer.run("form", compute, numbers)[0].tolist() == [4.0] * 4


@needs_gpu
def test_invalid_queries_are_refused_by_a_replay() -> None:
    model, queries = make_model(), draw(1, SIZE)
    for _ in range(REPEATS + 2):
        model(keys=queries)
    with pytest.raises(ValueError, match="must be finite"):
        model(keys=queries * float("nan"))


@needs_gpu
def test_threads_do_not_disturb_one_another() -> None:
    model = make_model()
    queries = [draw(1, SIZE, seed=seed) for seed in range(8)]
    expected = [model(keys=each) for each in queries]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(model(keys=queries[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_gpu
def test_inference_mode_makes_no_difference() -> None:
    model, queries = make_model(), draw(1, SIZE)
    expected = model(keys=queries)
    for is_inference in (True, True, True, True, True, False, True):
        with torch.inference_mode(is_inference):
            assert torch.equal(model(keys=queries), expected)
