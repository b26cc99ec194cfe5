"""A stream is scored before it is learnt, and blocks of any size give the scores of one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mbpa

CLASSES, D = 5, 3
PREDICTORS = {
    "adapted": mbpa.Adapted(mbpa.Gradient(0.7, 3, decay=0.1), k=4),
    "one step": mbpa.Adapted(mbpa.Gradient(0.7, 1), k=4),
    "mixture": mbpa.Mixture(
        mbpa.Parametric(),
        mbpa.Adapted(mbpa.Gradient(0.7, 2), k=3),
        mbpa.NeighborVote(mbpa.exp_dot(0.3), k=50),
        weights=(0.6, 0.2, 0.2),
    ),
    "balanced": mbpa.Mixture(
        mbpa.Adapted(mbpa.Gradient(0.7, 2), k=4, kernel=mbpa.Balanced(mbpa.InverseDistance())),
        mbpa.NeighborVote(mbpa.Balanced(mbpa.Gaussian(1.0), 0.5), k=9, smoothing=0.1),
        weights=(0.5, 0.5),
    ),
}


def make_model(predictor: mbpa.Predictor, capacity: int) -> mbpa.MbPA:
    torch.manual_seed(0)
    return mbpa.MbPA(
        head=nn.Linear(D, CLASSES).double(),
        memory=mbpa.ExactMemory(capacity, D, dtype=torch.float64),
        predictor=predictor,
    )


def stream(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, D, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (length,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_see_what_a_memory_of_half_precision_would_have_stored(dtype: torch.dtype) -> None:
    inputs, labels = stream(40, 3)
    scores = []
    for block in (1, 7, 40):
        torch.manual_seed(0)
        model = mbpa.MbPA(
            head=nn.Linear(D, CLASSES),
            memory=mbpa.ExactMemory(30, D, dtype=dtype),
            predictor=mbpa.Adapted(mbpa.Gradient(0.7, 3), k=4),
        )
        scores.append(mbpa.score_stream(model, inputs.float(), labels, block=block))
    assert all((each - scores[0]).abs().max() < 1e-5 for each in scores)


def one_by_one(model: mbpa.MbPA, inputs: Tensor, labels: Tensor) -> Tensor:
    """Predict and then write each item through the public interface."""
    scores = []
    for x, y in zip(inputs, labels, strict=True):
        scores.append(model(x[None])[0, y])
        model.write(x[None], y[None])
    return torch.stack(scores)


@given(
    name=st.sampled_from(sorted(PREDICTORS)),
    length=st.integers(1, 30),
    block=st.integers(1, 35),
    capacity=st.integers(1, 20),
    before=st.integers(0, 25),
    deleted=st.booleans(),
    seed=st.integers(0, 1000),
)
def check_blocks_against_one_by_one(
    name: str, length: int, block: int, capacity: int, before: int, deleted: bool, seed: int
) -> None:
    models = [make_model(PREDICTORS[name], capacity) for _ in range(2)]
    earlier = stream(before, seed + 1)
    for model in models:
        ids = model.write(*earlier)
        if deleted:
            model.memory.delete(ids[model.memory.holds(ids)][::3])
    inputs, labels = stream(length, seed)
    expected = one_by_one(models[0], inputs, labels)
    scores = mbpa.score_stream(models[1], inputs, labels, block=block)
    assert (scores - expected).abs().max() <= 1e-9
    left, right = (model.memory.entries() for model in models)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("examples", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_blocks_of_any_size_agree_with_one_by_one(examples: int) -> None:
    settings(max_examples=examples)(check_blocks_against_one_by_one)()


@given(
    name=st.sampled_from(sorted(PREDICTORS)),
    moment=st.integers(0, 29),
    block=st.integers(1, 30),
    capacity=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def check_shuffled_future(name: str, moment: int, block: int, capacity: int, seed: int) -> None:
    inputs, labels = stream(30, seed)
    order = torch.cat(
        [
            torch.arange(moment),
            moment + torch.randperm(30 - moment, generator=torch.Generator().manual_seed(seed)),
        ]
    )
    scores = mbpa.score_stream(make_model(PREDICTORS[name], capacity), inputs, labels, block=block)
    other = labels[order].clone()
    other[moment:] = (other[moment:] + 1) % CLASSES
    shuffled = mbpa.score_stream(
        make_model(PREDICTORS[name], capacity), inputs[order], other, block=block
    )
    assert torch.equal(scores[:moment], shuffled[:moment])


@pytest.mark.heavy
@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_shuffling_the_future_leaves_past_scores_unchanged(examples: int) -> None:
    settings(max_examples=examples)(check_shuffled_future)()


def test_the_first_item_of_an_empty_memory_gets_the_parametric_score() -> None:
    model = make_model(PREDICTORS["mixture"], 10)
    inputs, labels = stream(8, 0)
    scores = mbpa.score_stream(model, inputs, labels)
    assert scores[0] == model.head(inputs[:1]).log_softmax(1)[0, labels[0]]


def test_streams_run_under_autocast() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, D), nn.Tanh(), nn.Linear(D, CLASSES))

    def scores(dtype: torch.dtype) -> Tensor:
        embed, head = mbpa.split(network, at="2")
        model = mbpa.MbPA(
            embed, head, memory=mbpa.ExactMemory(20, D), predictor=PREDICTORS["mixture"]
        )
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return mbpa.score_stream(model, inputs, labels, block=7)

    inputs, labels = torch.randn(30, 4), torch.randint(CLASSES, (30,))
    mixed = scores(torch.bfloat16)
    assert mixed.dtype == torch.float32
    assert (mixed - scores(torch.float32)).abs().max() < 0.1


def test_progress_is_shown_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    mbpa.score_stream(make_model(PREDICTORS["adapted"], 5), *stream(9, 0), block=3, progress=True)
    shown = capsys.readouterr()
    assert "scoring" in shown.err
    assert "3/3" in shown.err
    assert not shown.out


@pytest.mark.usefixtures("unchecked_annotations")
def test_bad_streams_are_refused_and_nothing_is_written() -> None:
    model = make_model(PREDICTORS["adapted"], 5)
    inputs, labels = stream(4, 0)
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        mbpa.score_stream(model, inputs, labels, block=0)
    with pytest.raises(ValueError, match=r"targets must have shape \(4,\), got \(3,\)"):
        mbpa.score_stream(model, inputs, labels[:3])
    with pytest.raises(ValueError, match=r"labels must be below 5.*got 9"):
        mbpa.score_stream(model, inputs, torch.tensor([0, 1, 2, 9]), block=2)
    for block in (2.5, True):
        with pytest.raises(ValueError, match=f"block must be a whole number, got {block}"):
            mbpa.score_stream(model, inputs, labels, block=block)
    inputs[3, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        mbpa.score_stream(model, inputs, labels, block=4)
    assert len(model.memory) == 0
    memory = mbpa.ExactMemory(5, D, value_shape=(CLASSES,), value_dtype=torch.float32)
    regression = mbpa.MbPA(
        head=nn.Linear(D, CLASSES), memory=memory, predictor=mbpa.NeighborVote(k=2)
    )
    with pytest.raises(ValueError, match="scores labels, the memory holds regression targets"):
        mbpa.score_stream(regression, inputs[:3].float(), labels[:3])


BAD_LABELS = [
    (torch.tensor([0.0, 1.7]), "must be labels of an integer dtype, got torch.float32"),
    ([0.0, 1.7], "must be labels of an integer dtype, got torch.float32"),
    (torch.tensor([True, False]), "must be labels of an integer dtype, got torch.bool"),
    (torch.tensor([0j, 1j]), "must be labels of an integer dtype, got torch.complex64"),
    (["cat", "dog"], "must be whole numbers from 0, got strings; map names to numbers, or use"),
    (torch.tensor([0, -1]), "labels must not be negative, got -1"),
    (torch.tensor([0, 9], dtype=torch.uint16), "labels must be below 5.*got 9"),
]


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("labels", "text"), BAD_LABELS)
def test_whatever_takes_labels_refuses_the_same(labels: Any, text: str) -> None:
    model = make_model(PREDICTORS["adapted"], 5)
    inputs, known = stream(4, 0)
    model.write(inputs, known)
    calls: list[Callable[[], object]] = [
        lambda: mbpa.score_stream(model, inputs[:2], labels),
        lambda: model.score_then_write(inputs[:2], labels),
        lambda: model.write(inputs[:2], labels),
        lambda: model.check_labels(labels),
        lambda: mbpa.tune(model, inputs[:2], labels),
        lambda: mbpa.tune(model, keys=inputs[:2], values=labels),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    assert len(model.memory) == 4


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    "in_form",
    [
        *(lambda labels, dtype=dtype: labels.to(dtype) for dtype in (torch.int8, torch.int32)),
        *(lambda labels, dtype=dtype: labels.to(dtype) for dtype in (torch.uint16, torch.uint64)),
        lambda labels: labels.numpy().astype("uint32"),
        lambda labels: labels.tolist(),
    ],
)
def test_whatever_takes_labels_takes_them_in_any_integer_dtype(
    in_form: Callable[[Tensor], Any],
) -> None:
    inputs, labels = stream(6, 0)
    model, other = (make_model(PREDICTORS["adapted"], 12) for _ in range(2))
    expected = mbpa.score_stream(model, inputs, labels)
    assert torch.equal(mbpa.score_stream(other, inputs, in_form(labels)), expected)
    model.write(inputs, labels)
    other.write(inputs, in_form(labels))
    assert torch.equal(model.memory.entries().values, other.memory.entries().values)
    found, same = mbpa.tune(model, inputs, labels), mbpa.tune(other, inputs, in_form(labels))
    assert str(found) == str(same)


def test_an_empty_stream_has_no_scores() -> None:
    model = make_model(PREDICTORS["adapted"], 5)
    assert mbpa.score_stream(model, *stream(0, 0)).shape == (0,)
