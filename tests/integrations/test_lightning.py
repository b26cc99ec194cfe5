"""The callback of Lightning, with the Trainers of both packages."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mbpa
from mbpa.integrations.lightning import MemoryCallback, unpack_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),  # in Lightning, of torch
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
]
INPUTS = torch.randn(22, 8, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :4].argmax(1)
BATCHES = DataLoader(TensorDataset(INPUTS, LABELS), 4)  # the last has 2


def make_module(package: str = "lightning") -> Any:
    """Return a LightningModule of this package, which keeps a copy of itself before each update."""
    base = importlib.import_module(package).LightningModule

    class Classifier(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)
            )
            self.before: list[nn.Module] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.before.append(copy.deepcopy(self.net).eval())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, labels = unpack_batch(batch)
            inputs = inputs["x"] if isinstance(inputs, dict) else inputs
            return nn.functional.cross_entropy(self.net(inputs), labels)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            accuracy = (self.net(batch[0]).argmax(-1) == batch[1]).float().mean()
            self.log("val_accuracy", accuracy, batch_size=len(batch[1]))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    return Classifier()


def make_callback(module: Any, capacity: int = 100, **settings: Any) -> MemoryCallback:
    embed, head = mbpa.split(module.net, at="4")
    memory = mbpa.ExactMemory(capacity, key_dim=16)
    model = mbpa.MbPA(embed, head, memory=memory, predictor=mbpa.Adapted(k=5))
    return MemoryCallback(model, **settings)


def make_trainer(folder: Path, callback: Any, package: str = "lightning", **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    rest = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False}
    arguments = {**quiet, **rest, "default_root_dir": folder, "callbacks": [callback], **settings}
    return importlib.import_module(package).Trainer(**arguments)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_training_embeds_then_updates_then_writes(
    tmp_path: Path, package: str, accumulated: int
) -> None:
    module = make_module(package)
    callback = make_callback(module, capacity=30)  # less than two epochs of 22
    settings = {"accumulate_grad_batches": accumulated, "val_check_interval": 3}
    make_trainer(tmp_path, callback, package, **settings).fit(module, BATCHES, BATCHES)

    before, batches, keys, labels = module.before, list(BATCHES), [], []
    assert len(before) == 12
    for number, network in enumerate(before):
        inputs, theirs = batches[number % 6]
        keys.append(network[:4](inputs).detach())
        labels.append(theirs)
    entries = callback.model.memory.entries()
    assert entries.ids.tolist() == list(range(14, 44))
    torch.testing.assert_close(entries.keys, torch.cat(keys)[14:])
    assert torch.equal(entries.values, torch.cat(labels)[14:])


def test_examples_are_written_only_after_their_update(tmp_path: Path) -> None:
    written = []

    class Spy(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            written.append(len(callback.model.memory))

    module = make_module()
    callback = make_callback(module)
    settings = {"accumulate_grad_batches": 4, "max_epochs": 1, "callbacks": [callback, Spy()]}
    make_trainer(tmp_path, callback, **settings).fit(module, BATCHES)
    assert written == [0, 0, 0, 16, 16, 22]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_resumed_training_ends_with_the_same_memory(tmp_path: Path, package: str) -> None:
    module = make_module(package)
    whole = make_callback(module, capacity=30)
    trainer = make_trainer(tmp_path, whole, package)
    trainer.fit(module, BATCHES)

    module = make_module(package)
    first = make_callback(module, capacity=30)
    trainer = make_trainer(tmp_path, first, package, max_epochs=1)
    trainer.fit(module, BATCHES)
    trainer.save_checkpoint(tmp_path / "first.ckpt")

    module = make_module(package)
    second = make_callback(module, capacity=30)
    trainer = make_trainer(tmp_path, second, package)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for a, b in zip(first.model.memory.entries(), second.model.memory.entries(), strict=True):
        assert torch.equal(a, b)
    second.model.memory.clear()
    trainer.fit(module, BATCHES, ckpt_path=tmp_path / "first.ckpt")
    assert len(second.model.memory) == 30
    one, two = whole.model.memory.entries(), second.model.memory.entries()
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.values, two.values)
    assert torch.equal(one.keys[:8], two.keys[:8])  # of the first epoch, from the checkpoint

    module = make_module(package)
    tested = make_callback(module, capacity=30)
    trainer = make_trainer(tmp_path, tested, package)
    trainer.test(module, BATCHES, ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert len(tested.model.memory) == 22


def test_a_checkpoint_of_another_form_is_refused() -> None:
    state = make_callback(make_module()).state_dict()
    with pytest.raises(ValueError, match="capacity must be 100, as in the stored memory, got 50"):
        make_callback(make_module(), capacity=50).load_state_dict(state)


def test_evaluation_logs_the_accuracy_with_the_memory(tmp_path: Path) -> None:
    module = make_module()
    callback = make_callback(module)
    trainer = make_trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(module, BATCHES, BATCHES)
    with torch.no_grad():
        wanted = (callback.predict((INPUTS, None)).argmax(-1) == LABELS).float().mean()
    (logged,) = trainer.test(module, BATCHES, verbose=False)
    assert logged["test_memory_accuracy"] == pytest.approx(wanted.item())
    assert trainer.validate(module, BATCHES, verbose=False)[0]["val_memory_accuracy"] == (
        pytest.approx(wanted.item())
    )
    callback.metric = None
    (logged,) = trainer.test(module, BATCHES, verbose=False)
    assert set(logged) == {"val_accuracy"}


def test_batches_may_be_mappings_and_labels_may_be_ignored(tmp_path: Path) -> None:
    module = make_module()
    callback = make_callback(module, unpack=lambda batch: ((batch["x"],), batch["labels"]))
    labels = torch.where(torch.arange(22) % 2 == 0, LABELS, -100)
    rows = [{"x": x, "labels": y, "extra": "text"} for x, y in zip(INPUTS, labels, strict=True)]
    make_trainer(tmp_path, callback, max_epochs=1).fit(module, DataLoader(rows, 4))
    assert torch.equal(callback.model.memory.entries().values, LABELS[::2])


def test_mixed_precision_keeps_keys_in_the_precision_of_the_network(tmp_path: Path) -> None:
    module = make_module()
    callback = make_callback(module)
    trainer = make_trainer(tmp_path, callback, max_epochs=1, precision="bf16-mixed")
    trainer.fit(module, BATCHES)
    first = module.before[0][:4](INPUTS[:4]).detach()
    torch.testing.assert_close(callback.model.memory.entries().keys[:4], first)


def test_what_would_fill_the_memory_wrongly_is_refused(tmp_path: Path) -> None:
    module = make_module()
    callback = make_callback(module)
    trainer = make_trainer(tmp_path, callback, devices=2)
    with pytest.raises(ValueError, match="one process on one device, got world_size=2"):
        callback.setup(trainer, module, "fit")
    with pytest.raises(ValueError, match="must be a layer of the Classifier that is trained"):
        make_trainer(tmp_path, callback).fit(make_module(), BATCHES)
    with pytest.raises(ValueError, match=r"a pair of inputs and labels.*got list: pass unpack="):
        unpack_batch([INPUTS, LABELS, LABELS])
    assert len(callback.model.memory) == 0
