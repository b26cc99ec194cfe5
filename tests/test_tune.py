"""Tuning scores a predictor as it will perform, and no entry sees itself."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import mbpa
from mbpa.evaluation import LabelledQueries, leave_one_out, leave_out
from mbpa.predictors import in_short


def make_model(
    entries: int = 40,
    *,
    predictor: mbpa.Predictor | None = None,
    has_labels: bool = True,
    copies: int = 1,
) -> mbpa.MbPA:
    """Three classes around three places, some far from theirs; each key `copies` times."""
    generator = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (entries,), generator=generator)
    noise = torch.randn(entries, 4, generator=generator, dtype=torch.float64)
    keys = (centers[labels] + 1.5 * noise).repeat(copies, 1)
    labels = torch.cat([(labels + shift) % 3 for shift in range(copies)])
    values = labels if has_labels else torch.stack([keys.sum(1), keys[:, 0]], 1)
    torch.manual_seed(1)
    head = nn.Linear(4, 3 if has_labels else 2).double()
    form = {} if has_labels else {"value_shape": (2,), "value_dtype": torch.float64}
    memory = mbpa.ExactMemory(len(keys), 4, dtype=torch.float64, **form)
    predictor = predictor or mbpa.Adapted(mbpa.Gradient(0.1, 3), k=5)
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    model.write(keys, values)
    return model


def predictions_without(model: mbpa.MbPA, predictor: mbpa.Predictor) -> Tensor:
    """Predict each entry with a memory that never held it."""
    ids, keys, values = model.memory.entries()
    found = []
    for place in range(len(ids)):
        others = torch.arange(len(ids)) != place
        form = {"value_shape": values.shape[1:], "value_dtype": values.dtype}
        memory = mbpa.ExactMemory(len(ids), 4, dtype=torch.float64, **form)
        memory.write(keys[others], values[others])
        alone = mbpa.MbPA(head=model.head, memory=memory, predictor=predictor)
        found.append(alone(keys=keys[place : place + 1])[0])
    return torch.stack(found)


def loss_and_accuracy(predictions: Tensor, labels: Tensor) -> tuple[float, float]:
    chosen = predictions[torch.arange(len(labels)), labels]
    return -float(chosen.mean()), float((predictions.argmax(1) == labels).double().mean())


PREDICTORS = [
    mbpa.Adapted(mbpa.Gradient("auto", 4), k=6),
    mbpa.Mixture(mbpa.Parametric(), mbpa.NeighborVote(mbpa.Gaussian(1.0), k=9), weights=(0.4, 0.6)),
    mbpa.NeighborVote(k=100, smoothing=0.1),  # more than there are
    mbpa.Adapted(mbpa.Gradient(0.5, 4), k=6, kernel=mbpa.Balanced(mbpa.InverseDistance())),
]


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("predictor", PREDICTORS, ids=lambda predictor: type(predictor).__name__)
def test_what_is_left_out_is_as_if_it_had_never_been_written(
    predictor: mbpa.Predictor, copies: int
) -> None:
    model = make_model(30 // copies, copies=copies)
    found = leave_one_out(model, predictor)
    assert found.ids.tolist() == model.memory.ids.tolist()
    assert found.values.equal(model.memory.entries().values)
    assert (found.predictions - predictions_without(model, predictor)).abs().max() < 1e-9


def test_an_entry_among_more_copies_than_are_read_is_left_out_too() -> None:
    """Copies tie with the entry itself, and may push it out of what is read."""
    model = make_model(3, copies=12)
    predictor = mbpa.NeighborVote(k=2, smoothing=0.1)
    expected = predictions_without(model, predictor)
    assert (leave_one_out(model, predictor).predictions - expected).abs().max() < 1e-9


@pytest.mark.heavy
def test_a_balanced_candidate_is_scored_as_it_would_predict() -> None:
    model, plain = make_model(), mbpa.InverseDistance()
    kernels = [plain, mbpa.Balanced(plain, 0.0), mbpa.Balanced(plain, 1.0)]
    adapted = [mbpa.Adapted(mbpa.Gradient(0.5, 4), k=9, kernel=kernel) for kernel in kernels]
    losses = {trial.predictor: trial.loss for trial in mbpa.tune(model, candidates=adapted).trials}
    assert losses[adapted[1]] == pytest.approx(losses[adapted[0]], rel=1e-12)
    labels = model.memory.entries().values
    for predictor in adapted:
        expected, _ = loss_and_accuracy(predictions_without(model, predictor), labels)
        assert losses[predictor] == pytest.approx(expected, rel=1e-9)


def test_regression_is_left_out_too() -> None:
    model = make_model(20, has_labels=False)
    found = leave_one_out(model)
    assert (found.predictions - predictions_without(model, model.predictor)).abs().max() < 1e-9
    tuned = mbpa.tune(model, candidates=mbpa.AdaptationGrid(k=(4,), steps=(3,), weight=(1.0, 0.5)))
    trial = next(trial for trial in tuned.trials if trial.predictor == model.predictor)
    expected = (found.predictions - found.values).square().sum(1).mean() / 2
    assert trial.loss == pytest.approx(float(expected), rel=1e-9)
    assert trial.accuracy is None


def test_entries_of_a_read_are_dropped_by_id_and_the_last_where_there_is_none() -> None:
    memory = make_model(10).memory
    _, keys, labels = memory.entries()
    found = memory.read(keys[:3], 5, keys_for=3)
    others = leave_out(found, torch.tensor([0, int(found.ids[1, 2]), 999]), labels[:3])
    assert others.ids[0].tolist() == found.ids[0, 1:].tolist()  # itself, the nearest
    assert others.ids[1].tolist() == found.ids[1, [0, 1, 3, 4]].tolist()
    assert others.ids[2].tolist() == found.ids[2, :4].tolist()
    for row in range(3):
        for place in range(2):  # keys stay those of their entries
            assert others.keys[row, place].equal(keys[int(others.ids[row, place])])


@pytest.mark.heavy
def test_a_trial_is_what_the_predictor_does_on_validation_data() -> None:
    model = make_model()
    other = make_model(25).memory.entries()
    keys, labels = other.keys + 0.1, other.values
    grid = mbpa.AdaptationGrid(decay=(0.0, 0.1), steps=(1, 3))
    result = mbpa.tune(model, keys=keys, values=labels, candidates=grid)
    assert len(result.trials) == 2 + 3 * 3 * 3 * 3  # decay does nothing in one step
    assert not result.left_out
    assert result.queries == 25
    for trial in result.trials:
        alone = mbpa.MbPA(head=model.head, memory=model.memory, predictor=trial.predictor)
        loss, accuracy = loss_and_accuracy(alone(keys=keys), labels)
        assert trial.loss == pytest.approx(loss, rel=1e-9)
        assert trial.accuracy == accuracy
    losses = [trial.loss for trial in result.trials]
    assert losses == sorted(losses)
    assert mbpa.tune(model, keys, labels, candidates=grid) == result


@pytest.mark.heavy
def test_a_trial_is_what_the_predictor_does_when_entries_are_left_out() -> None:
    model = make_model(20)
    result = mbpa.tune(model, candidates=PREDICTORS, objective="accuracy")
    assert len(result.trials) == len(PREDICTORS) + 2  # with the model's own, and none
    assert result.left_out
    labels = model.memory.entries().values
    for trial in result.trials:
        loss, accuracy = loss_and_accuracy(predictions_without(model, trial.predictor), labels)
        assert trial.loss == pytest.approx(loss, rel=1e-9)
        assert trial.accuracy == pytest.approx(accuracy)
    shares = [(-trial.accuracy, trial.loss) for trial in result.trials]
    assert shares == sorted(shares)


def test_bandwidths_are_in_units_of_the_distance_to_the_nearest_entry() -> None:
    model = make_model(25)
    keys = model.memory.entries().keys
    distances = torch.cdist(keys, keys) + 1e9 * torch.eye(25)
    grid = mbpa.AdaptationGrid(k=(5,), steps=(2,), bandwidth=(0.5,), weight=(1.0,))
    result = mbpa.tune(model, candidates=grid)
    (kernel,) = {
        trial.predictor.kernel
        for trial in result.trials
        if isinstance(trial.predictor, mbpa.Adapted) and trial.predictor != model.predictor
    }
    assert kernel.bandwidth == pytest.approx(0.5 * float(distances.amin(1).mean()), rel=1e-9)


def test_that_unit_is_measured_on_all_queries_however_many_there_are() -> None:
    """Entries are written near ones first, or far ones first."""
    draws = torch.Generator().manual_seed(0)
    near, far = (s * torch.randn(300, 4, generator=draws).double() for s in (0.01, 10.0))
    found = []
    for keys in (torch.cat((near, far)), torch.cat((far, near))):
        model = make_model(600)
        model.write(keys, torch.arange(600) % 3)  # in place of what it held
        grid = mbpa.AdaptationGrid(k=(5,), steps=(2,), bandwidth=(0.5,), weight=(1.0,))
        result = mbpa.tune(model, candidates=grid)
        found += [
            trial.predictor.kernel.bandwidth
            for trial in result.trials
            if isinstance(trial.predictor, mbpa.Adapted) and trial.predictor != model.predictor
        ]
    distances = torch.cdist(keys, keys) + 1e9 * torch.eye(600)
    assert found == pytest.approx([0.5 * float(distances.amin(1).mean())] * len(found), rel=1e-6)
    assert len(found) == 2


@pytest.mark.parametrize("count", [0, -1])
def test_some_entries_are_at_least_one(count: int) -> None:
    with pytest.raises(ValueError, match="queries must be at least 1"):
        leave_one_out(make_model(), queries=count)


def test_the_model_is_not_changed() -> None:
    model = make_model()
    before, own = model.memory.entries(), model.predictor
    weights = model.head.weight.clone()
    result = mbpa.tune(model, candidates=mbpa.AdaptationGrid(k=(5, 10), steps=(5,)))
    assert result.best != own
    assert model.predictor is own
    assert all(a.equal(b) for a, b in zip(before, model.memory.entries(), strict=True))
    assert model.head.weight.equal(weights)


def test_one_retrieval_serves_all_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = make_model(), []
    read = model.memory.read

    def counted(queries: Tensor, k: int, **named: int) -> mbpa.Neighbors:
        asked.append((len(queries), k))
        return read(queries, k, **named)

    monkeypatch.setattr(model.memory, "read", counted)
    mbpa.tune(model, candidates=mbpa.AdaptationGrid(k=(3, 17)))
    assert asked == [(40, 18)]


def test_some_entries_are_drawn_by_the_seed() -> None:
    model = make_model()
    some = leave_one_out(model, queries=10, seed=1)
    assert some.ids.tolist() == leave_one_out(model, queries=10, seed=1).ids.tolist()
    assert some.ids.tolist() != leave_one_out(model, queries=10, seed=2).ids.tolist()
    every = leave_one_out(model)
    assert (some.predictions - every.predictions[some.ids]).abs().max() < 1e-9
    grid = mbpa.AdaptationGrid(k=(3,), steps=(2,))
    assert mbpa.tune(model, candidates=grid, queries=10).queries == 10


def test_labels_count_equally_if_asked_for() -> None:
    model = make_model(30)
    model.write(torch.randn(3, 4).double(), torch.tensor([0, 0, 0]))
    found = leave_one_out(model)
    chosen = found.predictions.gather(1, found.values[:, None])[:, 0]
    expected = -sum(chosen[found.values == label].mean() for label in range(3)) / 3
    result = mbpa.tune(model, candidates=[model.predictor], balanced=True)
    trial = next(trial for trial in result.trials if trial.predictor == model.predictor)
    assert trial.loss == pytest.approx(float(expected), rel=1e-9)


def test_a_balanced_draw_takes_of_each_label_as_many_as_it_can() -> None:
    memory = mbpa.ExactMemory(100, 2)
    labels = torch.tensor([0] * 50 + [1] * 3 + [2] * 20)
    model = mbpa.MbPA(head=nn.Linear(2, 3), memory=memory, predictor=mbpa.Parametric())
    model.write(torch.randn(73, 2), labels)
    drawn = LabelledQueries.from_entries(model).sample(15, seed=1, balanced=True)
    assert drawn.values.bincount().tolist() == [6, 3, 6]
    assert drawn.ids.unique().tolist() == drawn.ids.tolist()
    assert drawn.weights.tolist() == pytest.approx(
        [15 / 3 / 6] * 6 + [15 / 3 / 3] * 3 + [15 / 3 / 6] * 6
    )


def test_wrong_labels_are_the_least_probable() -> None:
    """The list of probably mislabelled examples depends on this."""
    torch.manual_seed(0)
    centers = 6 * torch.eye(3)
    labels = torch.arange(3).repeat(20)
    keys = centers[labels] + 0.5 * torch.randn(60, 3)
    told = labels.clone()
    told[[4, 31]] = (told[[4, 31]] + 1) % 3
    memory = mbpa.ExactMemory(60, 3)
    model = mbpa.MbPA(head=nn.Linear(3, 3), memory=memory, predictor=mbpa.Adapted(k=10))
    model.write(keys, told)
    found = leave_one_out(model)
    chosen = found.predictions.gather(1, found.values[:, None])[:, 0]
    assert set(found.ids[chosen.argsort()[:2]].tolist()) == {4, 31}


def test_a_result_reads_as_a_table() -> None:
    grid = mbpa.AdaptationGrid(k=(5,), steps=(2,))
    result = mbpa.tune(make_model(20), candidates=grid)
    text = str(result).splitlines()
    assert text[0] == "11 predictors by loss, on 20 entries, each left out of the memory in turn"
    assert f"{result.trials[0].loss:.4f}" in text[1]
    assert len(text) == 12
    shown = next(line for line in text if "Gaussian" in line)
    assert re.search(r"Gaussian\(bandwidth=[\d.]{1,5}\)", shown), shown
    assert all(not re.search(r"\d{6}", line) for line in text)


def test_a_predictor_in_short_has_three_digits_where_it_had_more() -> None:
    kernel = mbpa.Gaussian(0.1288625697294871)
    assert in_short(kernel) == "Gaussian(bandwidth=0.129)"
    assert in_short(mbpa.Gaussian(12345.678901)) == "Gaussian(bandwidth=12346)"
    assert in_short(mbpa.Gradient(0.25, 20)) == str(mbpa.Gradient(0.25, 20))
    assert eval(repr(kernel), vars(mbpa)) == kernel, "what programs read has all digits"


def test_a_predictor_that_is_sure_of_a_wrong_answer_comes_last() -> None:
    model = make_model(20)
    result = mbpa.tune(model, candidates=[mbpa.NeighborVote(k=1)])
    assert result.trials[-1].predictor == mbpa.NeighborVote(k=1)
    assert result.trials[-1].loss == math.inf


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"objective": "f1"}, "objective must be 'loss' or 'accuracy', got 'f1'"),
        ({"values": [1]}, "values need inputs or keys="),
        ({"keys": torch.ones(2, 4)}, "give values, the labels or targets"),
        ({"keys": torch.ones(2, 4), "values": [1]}, r"values must have shape \(2,\), got \(1,\)"),
        ({"keys": torch.ones(2, 3), "values": [1, 1]}, r"keys must have shape \('Q', 4\)"),
        ({"keys": torch.ones(1, 4), "values": [7]}, "labels must be below 3"),
        ({"inputs": torch.ones(1, 4), "keys": torch.ones(1, 4)}, "one of the two"),
        ({"candidates": []}, "candidates must have at least one"),
        ({"candidates": ["vote"]}, "candidates must be predictors, got 'vote'"),
        ({"queries": 0}, "queries must be at least 1, got 0"),
        ({"candidates": mbpa.AdaptationGrid(steps=(0,))}, "steps must be"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_arguments_that_make_no_sense_are_refused(named: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mbpa.tune(make_model(), **named)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"k": ()}, "k must have at least one value"),
        ({"weight": (0.0,)}, "weight must be above 0"),
        ({"weight": (1.5,)}, "weight must be at most 1"),
        ({"bandwidth": (-1.0,)}, "must not be negative"),
    ],
)
def test_grids_that_make_no_sense_are_refused(
    named: dict[str, tuple[float, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mbpa.AdaptationGrid(**named)


def test_a_memory_with_nothing_to_leave_is_refused() -> None:
    for entries in (0, 1):
        model = make_model(2)
        model.memory.delete(model.memory.ids[: 2 - entries])
        with pytest.raises(ValueError, match=f"must hold two entries, it holds {entries}"):
            mbpa.tune(model)
        with pytest.raises(ValueError, match=f"must hold two entries, it holds {entries}"):
            leave_one_out(model)
    model.memory.clear()
    with pytest.raises(ValueError, match="it is empty"):
        mbpa.tune(model, torch.ones(1, 4).double(), [0])


def test_labels_that_the_head_does_not_know_are_refused() -> None:
    model = make_model(10)
    model.memory.write(torch.ones(1, 4).double(), [5])  # past the model, which would refuse
    for ask in (mbpa.tune, leave_one_out):
        with pytest.raises(ValueError, match=r"labels must be below 3.*got 5"):
            ask(model)
