"""MbPA as an `nn.Module`: modes, moving, state dicts, copies, and keys that have become stale."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlite_memory import SqliteMemory
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mbpa
from mbpa.errors import StaleKeysWarning
from mbpa.modules import key_watch

D, CLASSES = 6, 3
Copier = Callable[[mbpa.MbPA], mbpa.MbPA]


def make_network(seed: int = 0) -> nn.Sequential:
    """Return a network whose embedding depends on its mode in every way."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, D), nn.BatchNorm1d(D), nn.Dropout(0.5), nn.Tanh(), nn.Linear(D, CLASSES)
    )


def make_model(
    memory: mbpa.Memory | None = None, *, is_split: bool = True, seed: int = 0
) -> mbpa.MbPA:
    network = make_network(seed)
    embed, head = mbpa.split(network, at="4") if is_split else (network[:4], network[4])
    return mbpa.MbPA(
        embed,
        head,
        memory=mbpa.ExactMemory(40, D) if memory is None else memory,
        predictor=mbpa.Mixture(
            mbpa.Adapted(mbpa.Gradient(0.5, 4), k=5),
            mbpa.NeighborVote(k=7),
            weights=(0.5, 0.5),
        ),
    )


def draw(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def make_used_model(memory: mbpa.Memory | None = None, **named: Any) -> mbpa.MbPA:
    """Return a model that has overwritten, deleted and grown."""
    model = make_model(memory, **named)
    ids = model.write(*draw(50))
    model.memory.delete(ids[20:31])
    model.grow(5)
    model.write(draw(2, seed=3)[0], torch.tensor([4, 3]))
    return model


QUERIES = draw(9, seed=2)[0]


def require_same(copied: mbpa.MbPA, model: mbpa.MbPA) -> None:
    assert torch.equal(copied(QUERIES), model(QUERIES))
    for one, other in zip(copied.memory.entries(), model.memory.entries(), strict=True):
        assert torch.equal(one, other)
    assert copied.memory.next_id == model.memory.next_id
    assert copied.classes == model.classes


def load_into_new(model: mbpa.MbPA) -> mbpa.MbPA:
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    loaded = make_model(seed=7)
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    return loaded


def load_whole(model: mbpa.MbPA) -> mbpa.MbPA:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


COPIERS: dict[str, Copier] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": load_whole,
    "state dict": load_into_new,
}


# The tree of modules


@pytest.mark.parametrize("is_split", [True, False])
def test_the_parameters_are_those_of_the_network(is_split: bool) -> None:
    network = make_network()
    embed, head = mbpa.split(network, at="4") if is_split else (network[:4], network[4])
    memory = mbpa.ExactMemory(9, D)
    model = mbpa.MbPA(embed, head, memory=memory, predictor=mbpa.Parametric())
    assert isinstance(model, nn.Module)
    assert {id(p) for p in model.parameters()} == {id(p) for p in network.parameters()}
    assert model.get_submodule("head") is head
    assert model.embedding is model.get_submodule("embedding") is embed
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_functions_are_not_registered_and_modules_cannot_be_assigned() -> None:
    head = nn.Linear(D, CLASSES)
    memory = mbpa.ExactMemory(9, D)
    model = mbpa.MbPA(torch.tanh, head, memory=memory, predictor=mbpa.Parametric())
    assert dict(model.named_children()) == {"head": head}
    assert model.embedding is torch.tanh
    for name in ("head", "embedding"):
        with pytest.raises(AttributeError, match=f"{name} cannot be assigned"):
            setattr(model, name, nn.Linear(D, CLASSES))


def test_parameters_can_be_replaced_for_a_call() -> None:
    model, other = make_used_model(), make_used_model(seed=5)
    model.warns_of_stale_keys = False  # the keys stay those of the model's own embedding
    before = model(QUERIES)
    parameters = dict(other.named_parameters())
    buffers = dict(other.named_buffers())
    other.memory.restore(model.memory.entries(), model.memory.next_id)
    found = torch.func.functional_call(model, {**parameters, **buffers}, (QUERIES,))
    assert torch.equal(found, other(QUERIES))
    assert torch.equal(model(QUERIES), before)


@pytest.mark.parametrize("is_split", [True, False])
def test_no_mode_changes_a_prediction_or_another_module(is_split: bool) -> None:
    network = make_network()
    embed, head = mbpa.split(network, at="4") if is_split else (network[:4], network[4])
    predictor = mbpa.Adapted(mbpa.Gradient(0.5, 4), k=5)
    model = mbpa.MbPA(embed, head, memory=mbpa.ExactMemory(40, D), predictor=predictor)
    model.write(*draw(30))
    expected = model(QUERIES)
    outer = nn.ModuleList([model])
    switches: list[Callable[[], object]] = [
        model.train,
        model.eval,
        outer.train,
        outer.eval,
        network.train,
        lambda: [each.train() for each in model.modules()],
        network.eval,
    ]
    for switch in switches:
        modes = [each.training for each in network.modules()]
        switch()
        if switch in (model.train, model.eval, outer.train, outer.eval):
            assert [each.training for each in network.modules()] == modes
        assert torch.equal(model(QUERIES), expected)
        assert torch.equal(model.embed(QUERIES), model.embed(QUERIES))
    assert model.train().training
    assert not model.eval().training
    with pytest.raises(ValueError, match="mode must be True or False, got 'yes'"):
        model.train("yes")


# Moving and converting


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_converted_model_is_one_made_in_that_dtype(dtype: torch.dtype) -> None:
    model = make_used_model()
    entries = model.memory.entries()
    expected = make_model(mbpa.ExactMemory(40, D, dtype=dtype))
    expected.grow(5)
    nn.Sequential(expected.embedding, expected.head).to(dtype)
    keys = entries.keys.to(dtype)
    expected.memory.restore(entries._replace(keys=keys), model.memory.next_id)
    assert model.to(dtype) is model
    assert model.memory.dtype == dtype
    assert model.memory.value_dtype == torch.int64
    assert torch.equal(model(QUERIES.to(dtype)), expected(QUERIES.to(dtype)))
    assert torch.equal(model.memory.ids, entries.ids)


def test_there_and_back_changes_no_bit() -> None:
    model = make_used_model()
    expected = model(QUERIES)
    model.double().float()
    require_same(model, make_used_model())
    assert torch.equal(model(QUERIES), expected)


def test_targets_follow_like_keys() -> None:
    memory = mbpa.ExactMemory(9, D, value_shape=(2,), value_dtype=torch.float32)
    predictor = mbpa.Adapted(mbpa.Gradient(0.1, 2), k=3)
    model = mbpa.MbPA(head=nn.Linear(D, 2), memory=memory, predictor=predictor)
    model.write(torch.randn(5, D), torch.randn(5, 2))
    assert model.double().memory.value_dtype == torch.float64
    assert model(torch.randn(3, D).double()).dtype == torch.float64


def test_a_refused_conversion_changes_nothing() -> None:
    model = make_model()
    model.write(*draw(10))
    model.memory.write(torch.full((1, D), 1e6), torch.tensor([0]))  # infinite in float16
    expected = model(QUERIES)
    with pytest.raises(ValueError, match="keys must be finite in torch"):
        model.half()
    assert next(model.parameters()).dtype == torch.float32
    assert model.memory.dtype == torch.float32
    assert torch.equal(model(QUERIES), expected)
    model.write(*draw(3, seed=4))
    graph = make_model(mbpa.GraphMemory(50, D))
    graph.write(*draw(10))
    before = graph(QUERIES)
    with pytest.raises(ValueError, match="device must be a CPU, got meta"):
        graph.to("meta")
    assert torch.equal(graph(QUERIES), before)


# State dicts


def test_a_state_dict_holds_weights_and_entries() -> None:
    model = make_used_model(is_split=False)
    state = model.state_dict()
    assert set(state) == {
        *(f"embedding.0.{name}" for name in ("weight", "bias")),
        *(f"embedding.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
        *("embedding.1.num_batches_tracked", "head.weight", "head.bias", "grown_classes"),
        *(f"memory.{name}" for name in ("ids", "keys", "values", "next_id")),
    }
    assert all(isinstance(each, Tensor) for each in state.values())
    entries = model.memory.entries()
    model.write(*draw(4, seed=9))  # a state dict is a copy as far as entries are concerned
    assert torch.equal(state["memory.keys"], entries.keys)
    assert torch.equal(state["memory.ids"], entries.ids)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_answers_to_the_bit_and_is_independent(copier: str) -> None:
    model = make_used_model()
    expected = model(QUERIES)
    copied = COPIERS[copier](model)
    require_same(copied, model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)
    copied.write(*draw(30, seed=5))
    copied.memory.delete(copied.memory.ids[:3])
    copied.grow(8)
    assert torch.equal(model(QUERIES), expected)
    assert model.classes == 5
    for each in (model, again := COPIERS[copier](model)):  # both go on alike
        each.write(*draw(30, seed=6))
        each.memory.delete(each.memory.ids[5:20:3])
        each.write(*draw(7, seed=8))
    require_same(again, model)


def test_copies_can_be_made_in_inference_mode_and_written_to_outside() -> None:
    model, loaded = make_used_model(), make_model(seed=7)
    expected = model(QUERIES)
    with torch.inference_mode():
        memories = copy.deepcopy(model.memory), pickle.loads(pickle.dumps(model.memory))
        state = model.state_dict()
    loaded.load_state_dict(state)
    require_same(loaded, model)
    for memory in (*memories, loaded.memory):
        memory.write(torch.ones(3, D), [0, 1, 2])
    assert torch.equal(model(QUERIES), expected)


def test_a_model_inside_a_module_is_saved_with_its_prefix() -> None:
    class Outer(nn.Module):
        def __init__(self, model: mbpa.MbPA) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.ModuleDict({"model": model})

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner["model"](self.first(inputs))

    outer, other = Outer(make_used_model()), Outer(make_model(seed=7))
    assert "inner.model.memory.keys" in outer.state_dict()
    assert "inner.model.embedding.model.0.weight" in outer.state_dict()
    assert not other.load_state_dict(outer.state_dict()).missing_keys
    assert torch.equal(other(QUERIES), outer(QUERIES))
    require_same(other.inner["model"], outer.inner["model"])
    copied = copy.deepcopy(outer).double()
    assert copied.inner["model"].memory.dtype == torch.float64


def change(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state dict with other values; dots in names are written as two underscores."""
    return {**state, **{name.replace("__", "."): value for name, value in changes.items()}}


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_refused_state_dict_changes_nothing(is_inside: bool) -> None:
    model = make_used_model()
    expected = model(QUERIES)
    good = make_used_model(seed=7).state_dict()
    small = make_model(mbpa.ExactMemory(20, D), seed=7)
    labels = good["memory.values"]
    refused: list[tuple[dict[str, Any], str]] = [
        (change(good, memory__keys=torch.ones(41, D)), "41 keys"),
        (change(good, memory__keys=torch.ones(len(labels), D + 1)), r"shape \(N, 6\)"),
        (change(good, memory__keys=good["memory.keys"] * float("nan")), "must be finite"),
        (change(good, memory__keys=good["memory.keys"].long()), "floating dtype"),
        (change(good, memory__keys="keys"), "entries must be tensors, got str"),
        (change(good, memory__values=labels + 3), "labels must be below the head's 5, got 7"),
        (change(good, memory__values=labels.float()), "labels of an integer dtype"),
        (change(good, memory__ids=good["memory.ids"].flip(0)), "ids must ascend"),
        (change(good, memory__ids=good["memory.ids"].int()), "row of torch.int64"),
        (change(good, memory__next_id=torch.tensor(3)), "below next_id=3"),
        (change(good, memory__next_id=3), "a tensor of one whole number, got 3"),
        (change(good, grown_classes=torch.tensor(2)), "another number of classes"),
    ]
    if not is_inside:  # torch loads what fits, submodule by submodule, before it raises
        without = {name: value for name, value in good.items() if name != "memory.ids"}
        refused += [
            (change(good, head__weight=torch.ones(4, D)), "size mismatch for head.weight"),
            (change(good, head__other=torch.ones(4, D)), r"Unexpected key.*head\.other"),
            (without, r"Missing key.*memory\.ids"),
        ]
        with pytest.raises(RuntimeError, match="at most capacity=20"):
            small.load_state_dict(good)
        assert len(small.memory) == 0
        assert small.classes == CLASSES
    loaded = nn.ModuleList([model]) if is_inside else model
    for state, message in refused:
        given = {f"0.{name}": value for name, value in state.items()} if is_inside else state
        entries = model.memory.entries()
        weights = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            loaded.load_state_dict(given)
        assert torch.equal(model.memory.entries().keys, entries.keys)
        if is_inside:
            model.load_state_dict(weights)
        assert torch.equal(model(QUERIES), expected), message
        assert model.classes == 5


def test_the_memory_of_a_model_keeps_its_capacity() -> None:
    model = make_used_model()
    large = make_model(mbpa.ExactMemory(100, D), seed=7)
    large.load_state_dict(model.state_dict())
    assert large.memory.capacity == 100
    require_same(large, model)


def test_a_state_dict_without_entries_leaves_the_memory_if_not_strict() -> None:
    model = make_used_model()
    entries = model.memory.entries()
    other = make_used_model(seed=7).state_dict()
    weights = {name: value for name, value in other.items() if "memory" not in name}
    found = model.load_state_dict(weights, strict=False)
    assert set(found.missing_keys) == {f"memory.{n}" for n in ("ids", "keys", "values", "next_id")}
    assert torch.equal(model.memory.entries().keys, entries.keys)
    assert torch.equal(model.head.weight, other["head.weight"])


def test_a_state_dict_is_rounded_to_the_dtype_of_the_model() -> None:
    model = make_used_model()
    small = make_model(mbpa.ExactMemory(40, D, dtype=torch.float16), seed=7)
    nn.Sequential(small.embedding, small.head).half()
    small.load_state_dict(model.state_dict())
    model.half()
    assert torch.equal(small(QUERIES.half()), model(QUERIES.half()))
    assert torch.equal(small.memory.entries().keys, model.memory.entries().keys)


@pytest.mark.parametrize("assign", [False, True])
def test_recurrent_networks_are_loaded_and_moved(assign: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(4, D, batch_first=True)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.cells(inputs)[0][:, -1]

    def make(seed: int) -> mbpa.MbPA:
        torch.manual_seed(seed)
        memory, predictor = mbpa.ExactMemory(9, D), mbpa.Adapted(k=3)
        return mbpa.MbPA(Recurrent(), nn.Linear(D, CLASSES), memory=memory, predictor=predictor)

    model, other = make(0), make(1)
    inputs = torch.randn(5, 7, 4)
    model.write(inputs, torch.arange(5) % CLASSES)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(other(inputs), model(inputs))
    assert torch.equal(other.embedding(inputs), model.embedding(inputs))
    assert other.double()(inputs.double()).dtype == torch.float64


# Memories


def test_graphs_are_copied_with_their_memory() -> None:
    memory = mbpa.GraphMemory(400, D, exact_below=20)
    ids = memory.write(torch.randn(300, D), torch.arange(300))
    memory.wait()
    memory.delete(ids[::7])
    memory.write(torch.randn(60, D), torch.arange(60))
    memory.wait()
    queries = torch.randn(50, D)
    for copied in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert copied.is_indexed
        assert copied.stale == memory.stale > 0
        assert torch.equal(copied.read(queries, 5).ids, memory.read(queries, 5).ids)
        before = memory.entries()
        copied.write(torch.randn(200, D), torch.arange(200))
        copied.rebuild()
        assert copied.stale == 0
        assert torch.equal(memory.entries().keys, before.keys)
        copied.close()
    memory.close()


@pytest.mark.parametrize("kind", [mbpa.ExactMemory, mbpa.GraphMemory])
def test_a_copy_has_every_write_whole_or_not_at_all(kind: type[mbpa.Memory]) -> None:
    named = {"exact_below": 50} if kind is mbpa.GraphMemory else {}
    memory = kind(300, D, **named)
    stop, failures = threading.Event(), []

    def write() -> None:
        number = 0
        while not stop.is_set():
            memory.write(torch.full((10, D), float(number % 97 + 1)), [number] * 10)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(15):
        entries = copy.deepcopy(memory).entries()
        groups = entries.values.reshape(-1, 10)
        expected = entries.values[:, None].remainder(97).add(1).expand(-1, D)
        if (groups != groups[:, :1]).any() or not torch.equal(entries.keys, expected.float()):
            failures.append(entries)
    stop.set()
    writer.join()
    memory.close()
    assert not failures


def test_a_large_empty_memory_makes_a_small_pickle() -> None:
    assert len(pickle.dumps(mbpa.ExactMemory(1_000_000, 100))) < 10_000


def test_memories_that_live_elsewhere_are_not_copied_or_saved(tmp_path: Path) -> None:
    memory = SqliteMemory(tmp_path / "entries", 40, D)
    model = make_model(memory)
    model.write(*draw(20))
    for copier in ("deepcopy", "pickle"):
        with pytest.raises(TypeError, match="a SqliteMemory cannot be copied or pickled"):
            COPIERS[copier](model)
    state = model.state_dict()
    assert not any(name.startswith("memory") for name in state)
    other = make_model(SqliteMemory(tmp_path / "others", 40, D), seed=7)
    other.load_state_dict(state)
    assert len(other.memory) == 0
    assert torch.equal(other.embed(QUERIES), model.embed(QUERIES))
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected key.*memory\.ids"):
        other.load_state_dict(make_model().state_dict())
    with pytest.raises(ValueError, match="dtype must be that of the stored entries"):
        memory.to(dtype=torch.float64)
    assert model.double().memory.dtype == torch.float32
    assert model(QUERIES.double()).shape == (9, CLASSES)


# In the company of others


class Embedded(Dataset[Tensor]):
    """Items that a model predicts, in the worker that loads them."""

    def __init__(self, model: mbpa.MbPA) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(QUERIES)

    def __getitem__(self, item: int) -> Tensor:
        return self.model(QUERIES[item : item + 1])[0]


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_have_a_model_of_their_own(method: str) -> None:
    model = make_used_model()
    expected = torch.stack([model(query[None])[0] for query in QUERIES])
    loader = DataLoader(Embedded(model), 4, num_workers=1, multiprocessing_context=method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
        assert torch.equal(torch.cat(list(loader)), expected)


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_code_around_a_model_gives_the_same(backend: str) -> None:
    model = make_used_model()
    first = nn.Linear(4, 4)

    @torch.no_grad()
    def predict(inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = first(inputs).tanh()
        ids = model.write(hidden[:2], torch.tensor([0, 1]))
        return model(hidden).exp() * 2, ids

    again = copy.deepcopy(model)
    compiled = torch.compile(predict, backend=backend)
    found = [compiled(QUERIES) for _ in range(2)]
    model = again
    for outputs, ids in found:
        expected, expected_ids = predict(QUERIES)
        assert torch.equal(outputs, expected)
        assert torch.equal(ids, expected_ids)
    assert torch.equal(torch.compile(model, backend=backend)(QUERIES), model(QUERIES))


def test_lightning_keeps_a_model_in_its_checkpoints(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Learner(lightning.LightningModule):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.network = make_network(seed)
            self.model = mbpa.MbPA(
                *mbpa.split(self.network, at="4"),
                memory=mbpa.ExactMemory(40, D),
                predictor=mbpa.Adapted(k=5),
            )

        def training_step(self, batch: list[Tensor]) -> Tensor:
            inputs, labels = batch
            keys = self.model.embed(inputs)
            assert self.network.training
            self.model.write(keys=keys, values=labels)
            return nn.functional.cross_entropy(self.network(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    learner = Learner()
    batches = DataLoader(torch.utils.data.TensorDataset(*draw(60)), batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer.fit(learner, batches)
        trainer.save_checkpoint(tmp_path / "kept.ckpt")
        loaded = Learner.load_from_checkpoint(tmp_path / "kept.ckpt", seed=7)
    assert len(loaded.model.memory) == 40
    assert loaded.model.memory.next_id == 60
    require_same(loaded.model, learner.model)


# Writing


def test_inputs_are_written_as_they_are_called() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, D)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            hidden = self.table(input_ids)
            return (hidden if attention_mask is None else hidden * attention_mask[..., None]).sum(1)

    head, predictor = nn.Linear(D, CLASSES), mbpa.NeighborVote(k=1)
    model = mbpa.MbPA(Masked(), head, memory=mbpa.ExactMemory(50, D), predictor=predictor)
    tokens, labels = torch.randint(10, (4, 5)), torch.tensor([0, 1, 2, 0])
    mask = torch.randint(2, (4, 5))
    batch = {"input_ids": tokens, "attention_mask": mask}
    expected = model.embed(tokens, mask)
    for ids in (
        model.write(**batch, values=labels),
        model.write(tokens, attention_mask=mask, values=labels),
        model.write(tokens, mask, values=labels),
        model.write(tokens, mask, labels),
        model.write(tokens, labels, attention_mask=mask),
        model.write(keys=expected, values=labels),
    ):
        assert torch.equal(model.memory.get_keys(ids), expected)
    ids = model.write(tokens, labels)
    assert torch.equal(model.memory.get_keys(ids), model.embed(tokens))
    for call in (
        lambda: model.write(tokens),
        lambda: model.write(**batch),
        lambda: model.write(tokens, attention_mask=mask),
        lambda: model.write(),
    ):
        with pytest.raises(ValueError, match="write needs values"):
            call()
    for named in (batch, {}):
        with pytest.raises(ValueError, match="give inputs or keys="):
            model.write(**named, values=labels, keys=expected if named else None)
    assert len(model.memory) == 28


# Other weights, and stale keys


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_model_is_not_loaded_around_other_weights(
    tmp_path: Path, grown: bool, is_split: bool
) -> None:
    def take(network: nn.Sequential) -> tuple[nn.Module, nn.Module]:
        return mbpa.split(network, at="4") if is_split else (network[:4], network[4])

    model = make_model(is_split=is_split)
    model.write(*draw(20))
    if grown:
        model.grow(5)
    model.save(tmp_path)
    network = make_network()
    require_same(mbpa.MbPA.load(tmp_path, *take(network)), model)
    require_same(mbpa.MbPA.load(tmp_path, take(network)[0]), model)  # with the saved head
    with torch.no_grad():
        network[4].bias[0] += 1e-3
    if grown:  # then the head comes from the checkpoint
        require_same(mbpa.MbPA.load(tmp_path, *take(network)), model)
    else:
        with pytest.raises(ValueError, match="head must have the weights that the model was saved"):
            mbpa.MbPA.load(tmp_path, *take(network))
    for name in ("0.weight", "1.running_mean"):
        network = make_network()
        network.state_dict()[name].flatten()[0] += 1e-3
        memory = mbpa.ExactMemory(40, D)
        with pytest.raises(ValueError, match=r"embed must .* got others: the keys in"):
            mbpa.MbPA.load(tmp_path, *take(network), memory=memory)
        assert len(memory) == 0
        loaded = mbpa.MbPA.load(tmp_path, *take(network), allow_other_weights=True)
        assert torch.equal(loaded.memory.entries().keys, model.memory.entries().keys)
    mbpa.MbPA.load(tmp_path, lambda inputs: inputs)  # a function has no weights
    mbpa.MbPA.load(tmp_path)  # keys come from elsewhere


def train(network: nn.Module, steps: int, make: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = make(network.parameters())
    network.train()
    for step in range(steps):
        inputs, labels = draw(16, seed=step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()


def make_watched() -> tuple[nn.Sequential, mbpa.MbPA]:
    network = make_network()
    model = mbpa.MbPA(
        *mbpa.split(network, at="4"), memory=mbpa.ExactMemory(99, D), predictor=mbpa.Adapted(k=5)
    )
    return network, model


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the embedding at every call."""
    monkeypatch.setattr(key_watch, "TIME_SHARE", float("inf"))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_on_after_the_last_write_is_told_once(optimizer: str) -> None:
    network, model = make_watched()
    inputs, labels = draw(40)
    model.write(inputs, labels)
    model(QUERIES)
    train(network, 30, OPTIMIZERS[optimizer])
    with pytest.warns(StaleKeysWarning, match=r"call model\.refresh"):
        model(QUERIES)
    model(QUERIES)  # warnings are errors
    model.explain(QUERIES)
    with pytest.warns(StaleKeysWarning, match=r"differ .* by up to \d+%"):
        assert model.check_keys(lambda ids: inputs[ids]) > 0.05
    model.refresh(lambda ids: inputs[ids])
    assert model.check_keys(lambda ids: inputs[ids]) < 1e-6
    model(QUERIES)
    train(network, 30, OPTIMIZERS[optimizer])
    with pytest.warns(StaleKeysWarning):
        model(QUERIES)


@pytest.mark.usefixtures("_impatient")
def test_learning_and_writing_by_turns_is_not_told() -> None:
    network, model = make_watched()
    for step in range(40):
        inputs, labels = draw(16, seed=step)
        keys = model.embed(inputs)
        train(network, 1, OPTIMIZERS["Adam"])
        model.write(keys=keys, values=labels)
        model(QUERIES)
    for _ in range(3):  # no writes for three times as long as usual
        train(network, 1, OPTIMIZERS["Adam"])
        model(QUERIES)


@pytest.mark.usefixtures("_impatient")
def test_what_does_not_move_the_embedding_is_not_told() -> None:
    network, model = make_watched()
    inputs, labels = draw(40)
    model.write(inputs, labels)
    network.requires_grad_(False)
    network[4].requires_grad_(True)
    with torch.no_grad():
        network[4].weight.add_(10)  # the head
    model(QUERIES)
    network.load_state_dict(copy.deepcopy(network.state_dict()))
    model(QUERIES)
    with torch.no_grad():
        network[0].weight.mul_(2)
    model.memory.replace_keys(model.memory.ids, model.embed(inputs))  # as refresh does
    model(QUERIES)
    with torch.no_grad():
        network[0].weight.mul_(2)
    model.memory.clear()
    model(QUERIES)
    model.memory.write(model.embed(inputs), labels)  # not by the model
    model(QUERIES)
    with torch.no_grad():
        network[0].weight.mul_(2)
    model(keys=torch.zeros(1, D))  # nothing was embedded
    model.warns_of_stale_keys = False
    model(QUERIES)


@pytest.mark.usefixtures("_impatient")
def test_a_copy_remembers_what_its_keys_were_computed_with() -> None:
    network, model = make_watched()
    model.write(*draw(40))
    train(network, 30, OPTIMIZERS["Adam"])
    for copier in ("deepcopy", "pickle"):
        with pytest.warns(StaleKeysWarning):
            COPIERS[copier](model)(QUERIES)


class Clock:
    """A clock that the test sets."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which the embedding is looked at."""
    clock = Clock()
    monkeypatch.setattr(key_watch, "time", clock)
    return clock


def make_watch(
    clock: Clock, weight: Tensor, memory: mbpa.Memory, durations_s: Iterable[float]
) -> key_watch.KeyWatch:
    """Return a watch over a weight, of which each look takes so long."""
    durations = iter(durations_s)

    def list_weights() -> list[Tensor]:
        clock.now_s += next(durations)
        return [weight]

    return key_watch.KeyWatch(list_weights, memory)


def test_looking_for_stale_keys_takes_a_hundredth_of_the_time(clock: Clock) -> None:
    looks = itertools.count()
    durations_s = (0.05 for _ in looks)
    watch = make_watch(clock, torch.randn(8, 8), mbpa.ExactMemory(99, D), durations_s)
    for _ in range(10_000):
        clock.now_s += 0.1
        assert not watch.finds_stale_keys()
        watch.note_write()
    assert 0.008 * clock.now_s < 0.05 * next(looks) < 0.011 * clock.now_s


def check_that_training_by_turns_is_not_told(
    clock: Clock, watch: key_watch.KeyWatch, weight: Tensor, memory: mbpa.Memory, steps: int
) -> None:
    """Learn and write by turns, a tenth of a second each, then learn without writing."""
    for _ in range(steps):
        clock.now_s += 0.1
        weight += 0.1 * torch.randn(8, 8)
        memory.write(torch.randn(1, D), [0])
        watch.note_write()
    clock.now_s += 10
    assert not watch.finds_stale_keys()
    weight *= 3
    clock.now_s += 10
    assert watch.finds_stale_keys()


@pytest.mark.parametrize("steps", [6, 12, 50, 90])
def test_a_training_that_wrote_is_not_told_though_looks_take_long(clock: Clock, steps: int) -> None:
    weight, memory = torch.randn(8, 8), mbpa.ExactMemory(99, D)
    watch = make_watch(clock, weight, memory, itertools.repeat(0.05))  # with pauses of 5 seconds
    check_that_training_by_turns_is_not_told(clock, watch, weight, memory, steps)


@pytest.mark.parametrize("slow_look", range(14))
def test_what_is_written_while_training_is_not_missed_after_a_slow_look(
    clock: Clock, slow_look: int
) -> None:
    weight, memory = torch.randn(8, 8), mbpa.ExactMemory(99, D)
    durations_s = itertools.chain([1e-4] * slow_look, [0.05], itertools.repeat(1e-4))
    watch = make_watch(clock, weight, memory, durations_s)
    for _ in range(key_watch.FIRST_WRITES):
        memory.write(torch.randn(1, D), [0])
        watch.note_write()
    check_that_training_by_turns_is_not_told(clock, watch, weight, memory, steps=20)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("width", [64, 100, 784])
def test_keys_are_found_stale_though_some_inputs_are_always_zero(width: int) -> None:
    embed, head = nn.Linear(width, 64), nn.Linear(64, 3)
    memory = mbpa.ExactMemory(9, 64)
    model = mbpa.MbPA(embed, head, memory=memory, predictor=mbpa.Adapted(k=2))
    inputs = torch.randn(4, width)
    inputs[:, :: width // 4] = 0  # such weights have no gradient
    model.write(inputs, [0, 1, 2, 0])
    with torch.no_grad():
        embed.weight += torch.randn_like(embed.weight) * (inputs[0] != 0)
    with pytest.warns(StaleKeysWarning):
        model(inputs)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("convert", [lambda m: m.to("cpu"), lambda m: m.double()])
def test_keys_are_found_stale_after_a_conversion(convert: Callable[[mbpa.MbPA], Any]) -> None:
    embed, head = nn.Linear(5, 4), nn.Linear(4, 3)
    model = mbpa.MbPA(embed, head, memory=mbpa.ExactMemory(9, 4), predictor=mbpa.Adapted(k=2))
    model.write(torch.randn(4, 5), [0, 1, 2, 0])
    convert(model)
    inputs = torch.randn(2, 5, dtype=embed.weight.dtype)
    model(inputs)  # a conversion alone is no reason; warnings are errors
    with torch.no_grad():
        embed.weight *= 3
    convert(model)
    with pytest.warns(StaleKeysWarning):
        model(inputs)


def test_a_network_that_contains_the_head_loads_with_the_saved_head(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs)

    whole = Whole()
    memory = mbpa.ExactMemory(5, 3)
    model = mbpa.MbPA(whole, whole.fc, memory=memory, predictor=mbpa.Adapted(k=2))
    inputs = torch.randn(4, 2)
    model.write(inputs, [0, 1, 0, 1])
    model.save(tmp_path)
    assert torch.equal(mbpa.MbPA.load(tmp_path, whole)(inputs), model(inputs))
    with torch.no_grad():
        whole.body.weight += 1
    with pytest.raises(ValueError, match="embed must have the weights"):
        mbpa.MbPA.load(tmp_path, whole)
