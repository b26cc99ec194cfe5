"""MbPA as a whole: its face, its errors, growing, refreshing, saving and loading."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mbpa
from mbpa.adaptation import Adaptation
from mbpa.files import digest_json
from mbpa.predictors import Part

D, CLASSES = 6, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, D), nn.ReLU(), nn.Dropout(0.5), nn.Linear(D, CLASSES))


def make_model(predictor: mbpa.Predictor | None = None, capacity: int = 50) -> mbpa.MbPA:
    embed, head = mbpa.split(network(), at="3")
    return mbpa.MbPA(
        embed,
        head,
        memory=mbpa.ExactMemory(capacity, D),
        predictor=predictor or mbpa.Adapted(mbpa.Gradient(0.5, 4, decay=0.1), k=5),
    )


def examples(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


# Calling and writing


def test_inputs_and_keys_give_the_same_answer() -> None:
    model = make_model()
    inputs, labels = examples(30)
    ids = model.write(inputs[:20], labels[:20])
    assert ids.tolist() == list(range(20))
    more = model.write(keys=model.embed(inputs[20:]), values=labels[20:])
    assert more.tolist() == list(range(20, 30))
    assert torch.equal(model(inputs), model(keys=model.embed(inputs)))


def test_queries_may_have_any_leading_dimensions() -> None:
    model = mbpa.MbPA(
        head=nn.Linear(D, CLASSES),
        memory=mbpa.ExactMemory(100, D),
        predictor=mbpa.Adapted(mbpa.Gradient(0.5, 2), k=5),
    )
    torch.manual_seed(0)
    keys, labels = torch.randn(2, 3, 4, D), torch.randint(CLASSES, (2, 3, 4))
    assert model.write(keys, labels).shape == (24,)
    assert torch.equal(model.memory.entries().values, labels.flatten())
    out = model(keys)
    assert out.shape == (2, 3, 4, CLASSES)
    assert torch.equal(out.flatten(0, 2), model(keys.flatten(0, 2)))
    assert model(keys[0, 0, 0]).shape == (CLASSES,)
    assert model(keys[:0]).shape == (0, 3, 4, CLASSES)


def test_one_read_serves_any_number_of_predictors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    inputs, labels = examples(30)
    model.write(inputs, labels)
    keys = model.embed(inputs)
    neighbors = model.memory.read(keys, 9)
    monkeypatch.setattr("mbpa.model.MAX_READ_BYTES", 7 * 5 * D * 4)  # a few queries at a time
    assert torch.allclose(model(inputs, neighbors=neighbors), model(inputs), atol=1e-6)
    vote = mbpa.MbPA(
        head=model.head, memory=model.memory, predictor=mbpa.NeighborVote(k=9, smoothing=0.1)
    )
    assert torch.allclose(vote(keys, neighbors=neighbors), vote(keys), atol=1e-6)
    with pytest.raises(ValueError, match="neighbors must be those of 29 queries, got those of 30"):
        model(inputs[1:], neighbors=neighbors)
    with pytest.raises(ValueError, match="needs 5 neighbors and the keys of 5, got 4"):
        model(inputs, neighbors=neighbors.first(4))
    with pytest.raises(ValueError, match="the keys of 5, got 9 and the keys of 2"):
        model(inputs, neighbors=model.memory.read(keys, 9, keys_for=2))


def test_a_new_example_is_learnt_at_once_and_forgotten_when_deleted() -> None:
    model = make_model(mbpa.Adapted(mbpa.Gradient(5.0, 20), k=1))
    inputs, _ = examples(1)
    before = model(inputs)
    wrong = int(before.argmin())
    ids = model.write(inputs, torch.tensor([wrong]))
    assert int(model(inputs).argmax()) == wrong
    model.memory.delete(ids)
    assert torch.equal(model(inputs), before)


def test_writing_in_a_training_loop_follows_the_papers_order() -> None:
    classifier = network().train()
    embed, head = mbpa.split(classifier, at="3")
    model = mbpa.MbPA(
        embed,
        head,
        memory=mbpa.ExactMemory(50, D),
        predictor=mbpa.Adapted(mbpa.Gradient(0.5), k=5),
    )
    optimiser = torch.optim.SGD(classifier.parameters(), lr=0.1)
    inputs, labels = examples(8)
    keys = model.embed(inputs)
    nn.functional.cross_entropy(classifier(inputs), labels).backward()
    optimiser.step()
    model.write(keys=keys, values=labels)
    assert torch.equal(model.memory.entries().keys, keys)
    assert not torch.equal(model.embed(inputs), keys)  # the copy shares what was trained


def test_it_works_inside_inference_mode_and_with_gradients_enabled() -> None:
    for predictor in (
        mbpa.Adapted(mbpa.Gradient(0.5, 3), k=5),
        mbpa.Adapted(mbpa.RMSprop(0.1, 3), k=5),
        mbpa.Adapted(mbpa.Gradient(0.5, 3), k=5, loss=lambda o, v: nn.functional.cross_entropy(
            o, v, reduction="none")),
    ):  # fmt: skip
        model = make_model(predictor)
        model.write(*examples(20))
        inputs, _ = examples(5, seed=2)
        plain = model(inputs)
        assert not plain.requires_grad
        with torch.inference_mode():
            model.write(*examples(3, seed=3))
            changed = model(inputs)
            inside = make_model(predictor)
            inside.write(*examples(20))
            inside(inputs)
            assert torch.equal(inside(inputs), plain)
        assert torch.equal(changed, model(inputs))
        assert (changed - plain).abs().max() > 1e-3
        inside.write(*examples(3, seed=3))  # what was made in there works out here
        assert torch.equal(inside(inputs), changed)


def test_answers_from_many_threads_are_those_of_one() -> None:
    model = make_model(mbpa.Adapted(mbpa.Adam(0.05, 3), k=5, loss=lambda o, v: (
        nn.functional.cross_entropy(o, v, reduction="none"))))  # fmt: skip
    fast = make_model(mbpa.Adapted(mbpa.Gradient(0.5, 1), k=5))
    for each in (model, fast):
        each.write(*examples(40))
    inputs, _ = examples(6, seed=2)
    expected = model(inputs), fast(inputs)
    failures: list[str] = []

    def ask() -> None:
        for _ in range(5):
            if not torch.equal(model(inputs), expected[0]):
                failures.append("autograd")
            if not torch.equal(fast(inputs), expected[1]):
                failures.append("one step")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_predictions_during_writes_come_from_some_state_of_the_memory() -> None:
    """Each written entry moves the answer; a torn read would give an answer no state explains."""
    model = make_model(mbpa.Adapted(mbpa.Gradient(0.5, 1), k=5), capacity=10)
    inputs, labels = examples(60)
    query, _ = examples(1, seed=2)
    states = [model(query)]
    reference = make_model(mbpa.Adapted(mbpa.Gradient(0.5, 1), k=5), capacity=10)
    for x, y in zip(inputs, labels, strict=True):
        reference.write(x[None], y[None])
        states.append(reference(query))
    seen: list[Tensor] = []

    def ask() -> None:
        while len(model.memory) < 10 or model.memory.next_id < 60:
            seen.append(model(query))

    asker = threading.Thread(target=ask)
    asker.start()
    for x, y in zip(inputs, labels, strict=True):
        model.write(x[None], y[None])
    asker.join()
    for answer in seen:
        assert min(float((answer - state).abs().max()) for state in states) < 1e-5
    assert len(seen) > 1


def test_an_error_of_the_network_itself_tells_what_it_was_given() -> None:
    model = make_model()
    for call in (model, model.embed, partial(model.write, values=[0, 0]), model.explain):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
            call(torch.zeros(2, 7))
        assert raised.value.__notes__ == ["raised by embed, given shapes [(2, 7)]"]


# Explaining


def test_explain_tells_neighbours_weights_before_after_change_and_path() -> None:
    model = make_model()
    inputs, labels = examples(20)
    model.write(inputs, labels)
    queries, _ = examples(3, seed=2)
    why = model.explain(queries, labels=["ant", "bee", "cat"])
    assert torch.equal(why.after, model(queries))
    assert torch.equal(why.before, model.head(model.embed(queries)).log_softmax(1))
    assert why.weights.shape == (3, 5)
    assert why.weights.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert (why.change > 0).all()
    assert why.path == "span"
    assert len(why) == 3
    text = str(why[1])
    top = int(why.after[1].argmax())
    assert f"after   {['ant', 'bee', 'cat'][top]} {float(why.after[1, top].exp()):.1%}" in text
    assert f"moved by {float(why.change[1]):.3g} (path: span, estimated " in text
    nearest = f"id {int(why.neighbors.ids[1, 0])}: "
    root = float(why.neighbors.distances[1, 0]) ** 0.5
    assert nearest in text
    assert f"distance {root:.3g}" in text.partition(nearest)[2].splitlines()[0]
    assert "neighbours (5 of 5)" in text
    assert str(why).count("before") == 3
    assert str(list(why)[1]) == text
    with pytest.raises(IndexError, match="below 3, got 3"):
        why[3]


def test_estimated_times_are_printed_without_exponents() -> None:
    estimates = {"span": 263.4e-6, "dense": 12345.6e-6, "stored": 0.26e-6, "mlp": 99.7e-6}
    adaptation = Adaptation(torch.zeros(1, 3), None, path="span", seconds=estimates)
    adaptation = replace(adaptation, change=torch.zeros(1))
    part = Part("adapted", 1.0, torch.zeros(1, 3), None, adaptation)
    why = mbpa.Explanation(torch.zeros(1, 3), torch.zeros(1, 3), None, (part,), has_labels=True)
    expected = "path: span, estimated 263 µs per query, stored 0.26, mlp 100, dense 12,346"
    assert expected in str(why)


def test_explain_names_the_parts_of_a_mixture_and_an_empty_memory() -> None:
    mixture = mbpa.Mixture(
        mbpa.Parametric(),
        mbpa.NeighborVote(k=7),
        mbpa.Adapted(mbpa.Gradient(0.5), k=5),
        weights=(0.5, 0.2, 0.3),
    )
    model = make_model(mixture)
    queries, labels = examples(2)
    text = str(model.explain(queries[:1]))
    assert "no neighbours: this is the parametric prediction" in text
    assert "class " in text
    model.write(queries, labels)
    narrow = mbpa.Mixture(
        mbpa.Adapted(mbpa.Gradient(0.5), k=1), mbpa.NeighborVote(k=2), weights=(0.5, 0.5)
    )
    fewer = str(mbpa.MbPA(
        model.embed, model.head, memory=model.memory, predictor=narrow
    ).explain(queries[:1]))  # fmt: skip
    assert fewer.count("weight") == 1  # the adapted part took only one neighbour
    assert fewer.count("distance") == 2
    why = model.explain(queries[:1])
    text = str(why)
    assert "50% parametric" in text
    assert "20% vote" in text
    assert "30% adapted, parameters moved by" in text
    assert why.weights.shape[1] == 2


# Growing and refreshing


def test_grown_heads_learn_labels_never_seen_and_leave_the_users_alone() -> None:
    classifier = network()
    embed, head = mbpa.split(classifier, at="3")
    model = mbpa.MbPA(
        embed,
        head,
        memory=mbpa.ExactMemory(50, D),
        predictor=mbpa.Adapted(mbpa.Gradient(2.0, 20), k=3),
    )
    inputs, _ = examples(2)
    with pytest.raises(ValueError, match=r"below 3, .*got 4: grow\(classes=5\)"):
        model.write(inputs, torch.tensor([4, 4]))
    assert len(model.memory) == 0
    old = model(inputs)
    model.grow(classes=5)
    assert model.classes == 5
    assert model(inputs).shape == (2, 5)
    assert classifier[3].out_features == 3
    assert (model(inputs)[:, :3].log_softmax(1) - old).abs().max() < 1e-6
    model.write(inputs, torch.tensor([4, 4]))
    assert model(inputs).argmax(1).tolist() == [4, 4]
    classifier[3] = model.head  # adopting it
    classifier.eval()
    assert torch.equal(classifier(inputs).log_softmax(1), model.explain(inputs).before)
    with pytest.raises(ValueError, match="classes must be at least 5, got 4"):
        model.grow(classes=4)


def test_new_rows_start_at_the_given_bias() -> None:
    model = make_model()
    model.grow(classes=4, bias=-5.0)
    assert model.head.bias[3] == -5
    assert (model.head.weight[3] == 0).all()


def test_refresh_re_embeds_what_the_user_kept() -> None:
    classifier = network()
    embed, head = mbpa.split(classifier, at="3")
    model = mbpa.MbPA(
        embed,
        head,
        memory=mbpa.ExactMemory(20, D),
        predictor=mbpa.Adapted(mbpa.Gradient(0.5), k=5),
    )
    inputs, labels = examples(30)
    ids = model.write(inputs, labels)
    model.memory.delete(ids[12:15])
    stale = model.memory.entries()
    with torch.no_grad():
        classifier[0].weight.mul_(1.5)
    asked: list[int] = []

    def inputs_of(ids: Tensor) -> Tensor:
        asked.append(len(ids))
        return inputs[ids]

    model.refresh(inputs_of, batch_size=8)
    fresh = model.memory.entries()
    assert sum(asked) == len(stale.ids) == 17
    assert max(asked) <= 8
    assert torch.equal(fresh.ids, stale.ids)
    assert torch.equal(fresh.values, stale.values)
    assert (fresh.keys - model.embed(inputs[fresh.ids])).abs().max() < 1e-6
    assert (fresh.keys - stale.keys).abs().max() > 0.1


def test_refreshing_an_empty_memory_does_nothing() -> None:
    make_model().refresh(lambda ids: pytest.fail("nothing to embed"))


# Saving and loading


def own_rule() -> mbpa.Rule:
    class Halving(mbpa.Rule):
        steps = 2

        def update(self, params, grads, start, state):
            return {name: p - 0.5 * grads[name] for name, p in params.items()}, None

    return Halving()


SAVED = {
    "adapted": mbpa.Adapted(mbpa.Gradient(0.5, 4, decay=0.1, momentum=0.3), k=5),
    "power": mbpa.Adapted(mbpa.Gradient(0.5, 4), k=5, kernel=mbpa.InverseDistance(0.1, 2.5)),
    "options": mbpa.Adapted(
        mbpa.RMSprop(0.1, 2, initial_square=1.0),
        k=7,
        kernel=mbpa.gaussian(2.0),
        loss="cross_entropy",
        params=("bias",),
    ),
    "mixture": mbpa.Mixture(
        mbpa.Parametric(),
        mbpa.Adapted(mbpa.Adam(0.1, 3), kernel=mbpa.uniform()),
        mbpa.NeighborVote(mbpa.exp_dot(0.2), k=30, smoothing=0.1),
        weights=(0.5, 0.2, 0.3),
    ),
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("grown", [False, True])
def test_a_loaded_model_answers_as_the_saved_one_did(
    tmp_path: Path, name: str, grown: bool
) -> None:
    model = make_model(SAVED[name], capacity=25)
    if grown:
        model.grow(5)
        with torch.no_grad():
            model.head.weight[4] += 0.1
    inputs, labels = examples(40)
    ids = model.write(inputs, labels)
    model.memory.delete(ids[30:33])
    model.save(tmp_path / "run")
    embed, head = mbpa.split(network(), at="3")
    loaded = mbpa.MbPA.load(tmp_path / "run", embed, head)
    assert loaded.predictor == model.predictor
    queries, _ = examples(9, seed=2)
    assert torch.equal(loaded(queries), model(queries))
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.memory.entries(), model.memory.entries(), strict=True)
    )
    assert loaded.memory.capacity == 25
    for each in (model, loaded):  # ids and ages go on alike
        each.write(*examples(10, seed=3))
    assert torch.equal(loaded.memory.entries().ids, model.memory.entries().ids)
    assert torch.equal(loaded(queries), model(queries))
    assert loaded.classes == (5 if grown else 3)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    "number",
    [np.float32, np.float64, np.float16, np.asarray, torch.tensor, torch.nn.Parameter],
)
def test_numbers_of_numpy_and_torch_become_plain_and_are_saved(
    tmp_path: Path, number: Callable[[Any], Any]
) -> None:
    value = number(torch.tensor(0.5) if number is torch.nn.Parameter else 0.5)
    whole = np.int16(2) if number is np.float32 else torch.tensor(2)
    rules: list[mbpa.Rule] = [
        mbpa.Gradient(value, whole, value, value),
        mbpa.RMSprop(value, whole, value, value, value, value),
        mbpa.Adam(value, whole, value, value, value, value),
        mbpa.MAP(value, value, whole),
    ]
    kernels = (mbpa.inverse_distance(value, value), mbpa.gaussian(value), mbpa.exp_dot(value))
    for rule in rules:
        votes = [mbpa.NeighborVote(kernel, whole, value) for kernel in kernels]
        adapted = mbpa.Adapted(rule, whole, kernels[1])
        predictor = mbpa.Mixture(
            mbpa.Mixture(adapted, votes[0], weights=(value, value)),
            mbpa.Mixture(*votes[1:], weights=np.array([0.5, 0.5], np.float32)),
            weights=[value, value],
        )
        for part in (rule, *kernels, *votes):
            kinds = {type(field) for field in vars(part).values()} - {type(k) for k in kernels}
            assert kinds <= {int, float}, part
        model = make_model(predictor)
        model.save(tmp_path / "run")
        embed, head = mbpa.split(network(), at="3")
        assert mbpa.MbPA.load(tmp_path / "run", embed, head).predictor == predictor


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_heads_are_saved(
    tmp_path: Path, grown: bool, dtype: torch.dtype, bias: bool
) -> None:
    head = nn.Linear(D, CLASSES, bias=bias, dtype=dtype)
    model = mbpa.MbPA(head=head, memory=mbpa.ExactMemory(40, D), predictor=mbpa.Parametric())
    if grown:
        model.grow(CLASSES + 2)
    model.save(tmp_path)
    queries = torch.randn(6, D)
    loaded = mbpa.MbPA.load(tmp_path)
    assert torch.equal(loaded(queries), model(queries))
    loaded.save(tmp_path)
    assert torch.equal(mbpa.MbPA.load(tmp_path, head=head)(queries), model(queries))


@pytest.mark.parametrize("grown", [False, True])
def test_other_heads_are_asked_for_when_loading(tmp_path: Path, grown: bool) -> None:
    head = nn.Sequential(nn.Linear(D, CLASSES))
    memory = mbpa.ExactMemory(40, D)
    model = mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Parametric())
    if grown:
        model.grow(CLASSES + 2)
    model.save(tmp_path)
    with pytest.raises(
        ValueError, match="the head of this model was not saved, or is not linear: pass head="
    ):
        mbpa.MbPA.load(tmp_path)


def test_regression_memories_and_shaped_keys_are_saved(tmp_path: Path) -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Unflatten(1, (2, 3))).double()
    memory = mbpa.ExactMemory(
        9, (2, 2), dtype=torch.float64, value_shape=(2, 3), value_dtype=torch.float64
    )
    model = mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted(mbpa.Gradient(0.1, 2), k=3))
    torch.manual_seed(0)
    model.write(torch.randn(5, 2, 2).double(), torch.randn(5, 2, 3).double())
    model.save(tmp_path)
    queries = torch.randn(4, 2, 2).double()
    assert torch.equal(mbpa.MbPA.load(tmp_path, head=head)(queries), model(queries))
    assert model(queries).shape == (4, 2, 3)


def test_parts_of_ones_own_are_asked_for_when_loading(tmp_path: Path) -> None:
    predictor = mbpa.Adapted(own_rule(), k=5, kernel=lambda distances, dots: -distances)
    model = make_model(predictor)
    model.write(*examples(10))
    model.save(tmp_path)
    embed, head = mbpa.split(network(), at="3")
    with pytest.raises(ValueError, match=r"parts of your own, .*Halving, .*lambda.*predictor="):
        mbpa.MbPA.load(tmp_path, embed, head)
    loaded = mbpa.MbPA.load(tmp_path, embed, head, predictor=predictor)
    queries, _ = examples(4, seed=2)
    assert torch.equal(loaded(queries), model(queries))


def test_a_memory_of_ones_own_is_asked_for_when_loading(tmp_path: Path) -> None:
    class OwnMemory(mbpa.ExactMemory):
        pass

    embed, head = mbpa.split(network(), at="3")
    predictor = mbpa.NeighborVote(k=3)
    model = mbpa.MbPA(embed, head, memory=OwnMemory(30, D), predictor=predictor)
    model.write(*examples(10))
    model.save(tmp_path)
    with pytest.raises(ValueError, match="saved memory was a OwnMemory: pass an empty one"):
        mbpa.MbPA.load(tmp_path, embed, head)
    loaded = mbpa.MbPA.load(tmp_path, embed, head, memory=OwnMemory(40, D))
    queries, _ = examples(4, seed=2)
    assert torch.equal(loaded(queries), model(queries))


def test_damaged_or_newer_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    model = make_model()
    model.write(*examples(10))
    model.save(tmp_path)
    embed, head = mbpa.split(network(), at="3")
    payload = next(tmp_path.glob("memory-*.safetensors"))
    whole = payload.read_bytes()
    for damaged in (whole[:-5], whole[:-1] + bytes([whole[-1] ^ 1])):
        payload.write_bytes(damaged)
        with pytest.raises(mbpa.CheckpointError, match=payload.name):
            mbpa.MbPA.load(tmp_path, embed, head)
    payload.write_bytes(whole)
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    content = json.loads(text)
    content["format"] += 1
    manifest.write_text(json.dumps(content))
    with pytest.raises(mbpa.CheckpointError, match=r"manifest\.json.*newer"):
        mbpa.MbPA.load(tmp_path, embed, head)
    manifest.write_text(text[: len(text) // 2])
    with pytest.raises(mbpa.CheckpointError, match=r"manifest\.json"):
        mbpa.MbPA.load(tmp_path, embed, head)


def test_a_checkpoint_without_the_power_of_a_kernel_has_the_papers(tmp_path: Path) -> None:
    kernel = mbpa.InverseDistance()
    model = make_model(mbpa.Adapted(mbpa.Gradient(0.5, 4), k=5, kernel=kernel))
    model.write(*examples(10))
    model.save(tmp_path)
    manifest = tmp_path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["description"]["predictor"]["kernel"]["power"]
    content["sha256"] = digest_json(content)
    manifest.write_text(json.dumps(content))
    loaded = mbpa.MbPA.load(tmp_path, *mbpa.split(network(), at="3"))
    assert loaded.predictor == model.predictor
    queries, _ = examples(4, seed=2)
    assert torch.equal(loaded(queries), model(queries))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    from mbpa.checkpoint import save_checkpoint

    save_checkpoint(tmp_path, tensors={}, description={"hello": 1})
    with pytest.raises(mbpa.CheckpointError, match=r"manifest\.json does not describe an MbPA"):
        mbpa.MbPA.load(tmp_path, head=nn.Linear(D, CLASSES))


def test_a_head_that_does_not_fit_the_saved_one_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.grow(5)
    model.save(tmp_path)
    with pytest.raises(ValueError, match="head must be the one the model was saved with"):
        mbpa.MbPA.load(tmp_path, head=nn.Linear(D + 1, CLASSES))


# Bad input


def test_modules_that_are_random_or_update_themselves_run_in_eval_mode() -> None:
    memory, predictor = mbpa.ExactMemory(9, D), mbpa.NeighborVote(k=2)
    memory.write(torch.eye(D)[:2], [0, 1])
    for first in (nn.Dropout(0.1), nn.BatchNorm1d(D), nn.RReLU()):
        noisy = nn.Sequential(first, nn.Linear(D, CLASSES)).train()
        model = mbpa.MbPA(first, noisy, memory=memory, predictor=mbpa.Parametric())
        state = {name: tensor.clone() for name, tensor in noisy.state_dict().items()}
        found = model(torch.ones(2, D))
        assert all(torch.equal(state[name], each) for name, each in noisy.state_dict().items())
        assert all(each.training for each in noisy.modules())
        noisy.eval()
        with torch.no_grad():
            expected = noisy(first(torch.ones(2, D))).log_softmax(1)
        torch.testing.assert_close(found, expected)
        mbpa.MbPA(head=noisy.train(), memory=memory, predictor=predictor)(torch.ones(2, D))


@pytest.mark.usefixtures("unchecked_annotations")
def test_heads_that_do_not_fit_the_memory_are_refused() -> None:
    predictor = mbpa.NeighborVote(k=2)
    with pytest.raises(ValueError, match=r"take keys of shape \(B, 6\), but it raised"):
        mbpa.MbPA(head=nn.Linear(5, 3), memory=mbpa.ExactMemory(9, 6), predictor=predictor)
    with pytest.raises(ValueError, match=r"logits \(B, C\)"):
        mbpa.MbPA(head=nn.Linear(6, 3), memory=mbpa.ExactMemory(9, (2, 6)), predictor=predictor)
    targets = mbpa.ExactMemory(9, 6, value_shape=(2,), value_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"targets' shape \(2,\), got \(3,\)"):
        mbpa.MbPA(head=nn.Linear(6, 3), memory=targets, predictor=predictor)
    with pytest.raises(ValueError, match="head must be a Module, got None"):
        mbpa.MbPA(memory=mbpa.ExactMemory(9, 6), predictor=predictor)
    with pytest.raises(ValueError, match=r"on the head's device meta, got cpu"):
        mbpa.MbPA(
            head=nn.Linear(6, 3, device="meta"), memory=mbpa.ExactMemory(9, 6), predictor=predictor
        )


@pytest.mark.usefixtures("unchecked_annotations")
def test_bad_calls_are_refused_and_leave_the_memory_as_it_was() -> None:
    model = make_model()
    inputs, labels = examples(4)
    model.write(inputs, labels)
    before = model.memory.entries()
    calls = [
        (lambda: model(), "give inputs or keys="),
        (lambda: model(inputs, keys=inputs), "give inputs or keys="),
        (lambda: model(keys=torch.zeros(2, 5)), r"keys must end in the shape \(6,\), got \(2, 5\)"),
        (lambda: model.write(inputs), "write needs values"),
        (lambda: model.write(inputs, labels[:3]), r"values must have shape \(4,\)"),
        (
            lambda: model.write(inputs, labels.float()),
            "labels of an integer dtype, got torch.float",
        ),
        (lambda: model.write(inputs, torch.tensor([0, 1, 2, 3])), "labels must be below 3"),
        (lambda: model.write(inputs, torch.tensor([0, 1, 2, -1])), "must not be negative, got -1"),
        (lambda: model.write(keys=torch.full((1, D), torch.nan), values=[0]), "must be finite"),
        (lambda: model.write(keys=torch.zeros(1, D).long(), values=[0]), "floating dtype"),
        (lambda: model.write(keys=torch.zeros(1, D, device="meta"), values=[0]), "got meta"),
        (lambda: model(keys=torch.full((1, D), torch.inf)), "must be finite"),
        (lambda: model.memory.delete([99]), r"unknown ids \[99\]"),
        (lambda: mbpa.split(network(), at="fc"), "'fc'"),
        (lambda: mbpa.ExactMemory(0, D), "capacity must be at least 1, got 0"),
        (lambda: model.memory.read(torch.zeros(1, D), k=0), "k must be at least 1, got 0"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    after = model.memory.entries()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.memory.next_id == 4


def test_a_label_written_past_the_model_is_refused_before_it_does_harm() -> None:
    model = make_model()
    model.memory.write(torch.zeros(1, D), [7])
    with pytest.raises(ValueError, match="labels must be below 3"):
        model(torch.zeros(1, 4))


def test_embeddings_of_another_shape_are_refused() -> None:
    model = mbpa.MbPA(
        nn.Linear(4, D + 1),
        nn.Linear(D, CLASSES),
        memory=mbpa.ExactMemory(9, D),
        predictor=mbpa.NeighborVote(k=1),
    )
    with pytest.raises(ValueError, match=r"end in the memory's key shape \(6,\), got \(2, 7\)"):
        model(torch.zeros(2, 4))


class Total(nn.Linear):
    """A head that gives one number for the whole batch."""

    def forward(self, keys: Tensor) -> Tensor:
        return super().forward(keys).sum()


@pytest.mark.usefixtures("unchecked_annotations")
def test_parts_of_another_kind_are_refused() -> None:
    head, memory, predictor = nn.Linear(D, CLASSES), mbpa.ExactMemory(9, D), mbpa.Parametric()
    with pytest.raises(ValueError, match="predictor must be a Predictor, got Gradient"):
        mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Gradient(0.1))
    with pytest.raises(ValueError, match="memory must be a Memory, got 100"):
        mbpa.MbPA(head=head, memory=100, predictor=predictor)
    with pytest.raises(ValueError, match="for one key it gave tuple"):
        mbpa.MbPA(head=nn.LSTM(D, CLASSES), memory=memory, predictor=predictor)
    with pytest.raises(ValueError, match=r"for one key it gave \(\)"):
        mbpa.MbPA(head=Total(D, CLASSES), memory=memory, predictor=predictor)
    with pytest.raises(ValueError, match=r"path must be None or one of .*, got 'fast'"):
        mbpa.Engine(path="fast")


def test_a_path_that_cannot_compute_the_problem_is_refused() -> None:
    model = mbpa.MbPA(
        head=nn.Linear(D, CLASSES),
        memory=mbpa.ExactMemory(9, D),
        predictor=mbpa.Adapted(mbpa.Gradient(0.1, 3), k=2),
        engine=mbpa.Engine(path="one step"),
    )
    model.write(torch.eye(D)[:2], [0, 1])
    with pytest.raises(ValueError, match=r"path must be one of \['dense', .*got 'one step'"):
        model(torch.zeros(1, D))


# Heads of all kinds


def test_heads_that_work_in_place_change_neither_inputs_nor_memory() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(D, CLASSES).double()
    answers = []
    for in_place in (False, True):
        head = nn.Sequential(nn.LeakyReLU(0.3, inplace=in_place), layers)
        memory = mbpa.ExactMemory(30, D, dtype=torch.float64)
        model = mbpa.MbPA(
            head=head, memory=memory, predictor=mbpa.Adapted(mbpa.Gradient(0.5, 3), k=4)
        )
        keys = torch.randn(20, D, generator=torch.Generator().manual_seed(1)).double()
        kept = keys.clone()
        scores = mbpa.score_stream(model, keys, torch.arange(20) % CLASSES, block=6)
        answers.append((scores, model(keys)))
        assert torch.equal(keys, kept)
        assert torch.equal(memory.entries().keys, kept)
    for plain, in_place in zip(*answers, strict=True):
        assert (plain - in_place).abs().max() <= 1e-9


def test_a_linear_layer_with_a_forward_of_its_own_is_not_taken_for_a_matrix() -> None:
    head = nn.Linear(D, CLASSES)
    plain = head.forward
    head.forward = lambda keys: 3 * plain(keys)
    model = mbpa.MbPA(
        head=head,
        memory=mbpa.ExactMemory(9, D),
        predictor=mbpa.Adapted(mbpa.Gradient(0.1, 3), k=2),
    )
    model.write(torch.eye(D)[:2], [0, 1])
    assert model.explain(torch.zeros(1, D)).path == "functional"


def test_a_head_runs_in_eval_mode_whatever_mode_it_is_in() -> None:
    class Moody(nn.Linear):
        def forward(self, keys: Tensor) -> Tensor:
            noisy = nn.functional.dropout(super().forward(keys), 0.5, self.training)
            return noisy * (2 if self.training else 1)

    head = Moody(D, CLASSES)
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(D, CLASSES))
    for module in (head, spectral):
        model = mbpa.MbPA(
            head=module.train(),
            memory=mbpa.ExactMemory(9, D),
            predictor=mbpa.Adapted(mbpa.Gradient(0.0, 2), k=2),
        )
        model.write(torch.eye(D)[:2], [0, 1])
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        why = model.explain(torch.ones(3, D))
        assert (why.before - why.after).abs().max() < 1e-6  # lr is 0
        assert all(torch.equal(state[name], t) for name, t in module.state_dict().items())
        with torch.no_grad():
            expected = module.eval()(torch.ones(3, D)).log_softmax(1)
        assert (why.before - expected).abs().max() < 1e-6


def test_a_compiled_or_wrapped_head_is_run_plainly() -> None:
    for wrap in (partial(torch.compile, backend="eager"), nn.DataParallel):
        head = wrap(nn.Linear(D, CLASSES))
        device = next(head.parameters()).device  # DataParallel moves it to a GPU if there is one
        model = mbpa.MbPA(
            head=head,
            memory=mbpa.ExactMemory(9, D, device=device),
            predictor=mbpa.Adapted(mbpa.Gradient(0.1, 3), k=2),
        )
        model.write(torch.eye(D, device=device)[:2], [0, 1])
        assert model.explain(torch.zeros(1, D, device=device)).path == "span"


def test_a_head_that_cannot_be_batched_is_adapted_query_by_query_with_a_warning() -> None:
    class Branching(nn.Linear):
        def forward(self, keys: Tensor) -> Tensor:
            return super().forward(keys if float(keys.sum()) > -1e9 else -keys)

    torch.manual_seed(0)
    head, plain = Branching(D, CLASSES).double(), nn.Linear(D, CLASSES).double()
    plain.load_state_dict(head.state_dict())
    keys, queries = torch.randn(9, D).double(), torch.randn(4, D).double()
    models = [
        mbpa.MbPA(
            head=each,
            memory=mbpa.ExactMemory(9, D, dtype=torch.float64),
            predictor=mbpa.Adapted(mbpa.Adam(0.1, 3), k=4),
        )
        for each in (head, plain)
    ]
    for model in models:
        model.write(keys, torch.arange(9) % CLASSES)
    with pytest.warns(UserWarning, match="Branching cannot be run for many queries at once"):
        answer = models[0](queries)
    assert (answer - models[1](queries)).abs().max() <= 1e-9


def test_a_bound_method_of_a_network_in_training_mode_is_refused() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def features(self, inputs: Tensor) -> Tensor:
            return self.dropout(inputs)

    parts = {"memory": mbpa.ExactMemory(9, D), "predictor": mbpa.Parametric()}
    with pytest.raises(ValueError, match="embed must be in eval mode, got an active Dropout"):
        mbpa.MbPA(Network().features, nn.Linear(D, CLASSES), **parts)


def test_growing_a_head_whose_last_linear_layer_is_not_its_output_changes_nothing() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.unused = nn.Linear(D, CLASSES), nn.Linear(D, CLASSES)

        def forward(self, keys: Tensor) -> Tensor:
            return self.out(keys)

    model = mbpa.MbPA(head=Odd(), memory=mbpa.ExactMemory(9, D), predictor=mbpa.NeighborVote(k=1))
    with pytest.raises(ValueError, match="grown to 5, the head still gives 3"):
        model.grow(5)
    assert model.classes == CLASSES


# Sharing and sizes


def test_two_models_may_share_an_engine_and_labels_may_be_small_integers() -> None:
    torch.manual_seed(0)
    head, engine = nn.Linear(D, CLASSES), mbpa.Engine()
    queries = torch.randn(5, D)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        for predictor in (mbpa.Adapted(mbpa.Gradient(0.5), k=4), mbpa.NeighborVote(k=4)):
            memory = mbpa.ExactMemory(20, D, value_dtype=dtype)
            shared = mbpa.MbPA(head=head, memory=memory, predictor=predictor, engine=engine)
            shared.write(torch.randn(10, D), torch.arange(10) % CLASSES)
            alone = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
            assert torch.equal(shared(queries), alone(queries))


def test_many_queries_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.write(*examples(20))
    inputs, _ = examples(13, seed=2)
    whole = model(inputs)
    monkeypatch.setattr("mbpa.model.MAX_READ_BYTES", 5 * D * 4 * 4)
    assert (model(inputs) - whole).abs().max() < 1e-6


def test_refresh_refuses_another_number_of_inputs() -> None:
    model = make_model()
    inputs, labels = examples(20)
    model.write(inputs, labels)
    sizes = iter([11, 9])
    with pytest.raises(ValueError, match="one input per id, got 11 for 10 ids"):
        model.refresh(lambda ids: inputs[: next(sizes)], batch_size=10)


def test_a_parametric_model_does_not_search() -> None:
    model = make_model(mbpa.Parametric())
    model.write(*examples(5))
    model.memory.read = lambda *a, **k: pytest.fail("searched")
    inputs, _ = examples(3, seed=2)
    assert str(model.explain(inputs[:1])).endswith("this is the parametric prediction")
    assert model(inputs).shape == (3, CLASSES)


# The cost of importing


def test_importing_costs_at_most_150_ms_beyond_torch() -> None:
    script = (
        "import time, torch; start = time.process_time(); import mbpa; "
        "print(time.process_time() - start)"  # not what others on the machine take
    )
    seconds: list[float] = []
    while len(seconds) < 7 and min(seconds, default=1.0) > 0.150:  # the machine may be busy
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
        seconds.append(float(done.stdout))
    assert min(seconds) <= 0.150, seconds


def test_a_comparison_holds_both_predictions_and_the_neighbours() -> None:
    torch.manual_seed(0)
    model = mbpa.MbPA(
        head=nn.Linear(4, 3),
        memory=mbpa.ExactMemory(20, 4),
        predictor=mbpa.Adapted(mbpa.Gradient(0.5, 3), k=5),
    )
    model.write(keys=torch.randn(20, 4), values=torch.randint(3, (20,)))
    queries = torch.randn(6, 4)
    found, expected = model.compare(queries), model.explain(keys=queries)
    assert torch.equal(found.before, expected.before)
    assert torch.equal(found.after, model(keys=queries))
    assert found.neighbors is not None
    assert torch.equal(found.neighbors.ids, model.memory.read(queries, 5).ids)


@pytest.mark.parametrize(
    "rule", [mbpa.Gradient(0.1, 5), mbpa.Gradient("auto", 20), mbpa.Adam(0.01, 4), mbpa.MAP(0.1)]
)
def test_predictions_do_not_depend_on_earlier_ones_to_the_bit(rule: mbpa.Rule | mbpa.MAP) -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        head, keys = nn.Linear(16, 3), torch.randn(44, 16)
        queries, earlier = torch.randn(40, 16), 5 * torch.randn(1, 16)
        predictor = mbpa.Adapted(rule, k=5)
        fresh, used = (
            mbpa.MbPA(head=head, memory=mbpa.ExactMemory(100, 16), predictor=predictor)
            for _ in range(2)
        )
        for model in (fresh, used):
            model.write(keys, torch.arange(44) % 3)
        used(earlier)  # whose neighbours' outputs are kept
        assert torch.equal(fresh(queries), used(queries))
