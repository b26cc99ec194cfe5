"""The image network and its training: names, arithmetic, augmentation, resuming, features."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mbpa.errors import MissingExtraError
from mbpa.experiments import pretraining
from mbpa.experiments.experiment import Context
from mbpa.experiments.pictures import Held, Share, moved, normalised
from mbpa.experiments.pretraining import Pretraining, features_of, initial_network, pretrained
from mbpa.experiments.resnet import ResNet
from mbpa.experiments.workspace import Workspace

TINY = Pretraining(width=4, epochs=4, batch=16, lr=0.05)


def context(folder: Path) -> Context:
    return Context(torch.device("cpu"), None, Workspace(folder), progress=False)


def pictures(count: int = 96, seed: int = 0) -> Held:
    """Two kinds: bright on the left, or bright above."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    images = torch.randint(0, 120, (count, 3, 16, 16), generator=draws, dtype=torch.uint8)
    images[labels == 0, :, :, :6] += 100
    images[labels == 1, :, :6] += 100
    return Held(images, labels)


# The network


@pytest.mark.parametrize(
    ("layers", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)]
)
def test_it_has_the_parameters_of_published_checkpoints(layers: int, parameters: int) -> None:
    with torch.device("meta"):
        network = ResNet(layers, 1000)
    assert sum(param.numel() for param in network.parameters()) == parameters
    names = network.state_dict()
    wide = 4 if layers == 50 else 1
    assert names["conv1.weight"].shape == (64, 3, 7, 7)
    assert names["layer2.0.downsample.0.weight"].shape == (128 * wide, 64 * wide, 1, 1)
    assert names["layer4.1.bn2.running_var"].shape == (512,)
    assert names["fc.weight"].shape == (1000, 512 * wide)
    assert "layer1.0.downsample.0.weight" in names or layers != 50


@pytest.mark.parametrize("layers", [18, 50])
def test_it_computes_what_another_implementation_does(layers: int) -> None:
    transformers = pytest.importorskip("transformers")
    wide = 4 if layers == 50 else 1
    config = transformers.ResNetConfig(
        layer_type="bottleneck" if layers == 50 else "basic",
        depths=[3, 4, 6, 3] if layers == 50 else [2, 2, 2, 2],
        hidden_sizes=[8 * wide, 16 * wide, 32 * wide, 64 * wide],
        embedding_size=8,
        num_labels=5,
    )
    torch.manual_seed(0)
    other = transformers.ResNetForImageClassification(config).eval()
    for module in other.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    network = ResNet(layers, 5, width=8).eval()
    network.load({renamed(name): tensor for name, tensor in other.state_dict().items()})
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(network(images), other(images).logits, atol=1e-4, rtol=1e-4)


def renamed(name: str) -> str:
    """From the other's names to the common ones."""
    parts = name.split(".")
    if parts[0] == "classifier":
        return f"fc.{parts[-1]}"
    kind = {"convolution": "conv", "normalization": "bn"}[parts[-2]]
    if "embedder" in parts:
        return f"{kind}1.{parts[-1]}"
    stage, place = int(parts[3]) + 1, parts[5]
    if "shortcut" in parts:
        return f"layer{stage}.{place}.downsample.{0 if kind == 'conv' else 1}.{parts[-1]}"
    return f"layer{stage}.{place}.{kind}{int(parts[7]) + 1}.{parts[-1]}"


def test_small_images_keep_their_size_at_first_and_checkpoints_of_other_classes_load() -> None:
    network = ResNet(18, 7, small=True, width=4)
    assert network.features(torch.randn(2, 3, 40, 40)).shape == (2, network.feature_size)
    seen: list[Tensor] = []
    network.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(torch.randn(2, 3, 40, 40))
    assert seen[0].shape == (2, 4, 40, 40)
    other = ResNet(18, 9, small=True, width=4)
    kept = other.fc.weight.clone()
    other.load(network.state_dict())
    assert torch.equal(other.conv1.weight, network.conv1.weight)
    assert torch.equal(other.fc.weight, kept)
    with pytest.raises(ValueError, match="layers must be one of"):
        ResNet(19, 7)


# The training


def test_each_image_is_a_crop_of_its_mirrored_surroundings() -> None:
    images = torch.randint(0, 256, (40, 3, 9, 11), dtype=torch.uint8)
    found = moved(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(found, moved(images, 2, torch.Generator().manual_seed(0)))
    for rank in range(4):
        share = Share(rank, 4)
        mine = moved(share.part(images), 2, torch.Generator().manual_seed(0), share)
        assert torch.equal(mine, found[10 * rank : 10 * rank + 10])
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    moves = set()
    for image, around in zip(found, padded, strict=True):
        candidates = {
            (y, x, mirrored): around[:, y : y + 9, x : x + 11].flip(2)
            if mirrored
            else around[:, y : y + 9, x : x + 11]
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
        }
        matches = [move for move, wanted in candidates.items() if torch.equal(image, wanted)]
        assert len(matches) == 1
        moves.add(matches[0])
    assert len(moves) > 20
    assert {mirrored for *_, mirrored in moves} == {False, True}


def test_it_learns_and_its_features_are_what_the_last_layer_sees(tmp_path: Path) -> None:
    train, test = pictures(), pictures(seed=1)
    settings = replace(TINY, epochs=8, padding=1)
    network = pretrained(settings, train, 2, 3, context(tmp_path / "work"), "split")
    logits = network(normalised(test.images))
    assert (logits.argmax(1) == test.labels).float().mean() > 0.9
    assert not network.training
    told: list[int] = []
    found = features_of(network, test, most=7, tick=told.append)
    assert sum(told) == len(test.labels)
    assert torch.allclose(network.fc(found), logits, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_learns_on_a_gpu_in_half_precision_and_goes_on(tmp_path: Path) -> None:
    device = torch.device("cuda")
    train, test = (
        Held(p.images.to(device), p.labels.to(device)) for p in (pictures(), pictures(seed=1))
    )
    settings = replace(TINY, epochs=8, padding=1)
    place = replace(context(tmp_path / "work"), device=device)
    for _ in range(2):  # the second finds what the first has kept
        network = pretrained(settings, train, 2, 3, place, "split")
        found = features_of(network, test)
        assert (found.dtype, found.device.type) == (torch.float32, "cuda")
        assert (network.fc(found).argmax(1) == test.labels).float().mean() > 0.9


def test_training_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(TINY, epochs=13)
    whole = pretrained(settings, pictures(), 2, 3, context(tmp_path / "whole"), "split")
    epochs: list[int] = []
    real = pretraining._epoch

    def watched(*arguments: object) -> None:
        if arguments[-1] == 11 and 11 not in epochs:
            epochs.append(11)
            raise KeyboardInterrupt
        epochs.append(int(str(arguments[-1])))
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "_epoch", watched)
    with pytest.raises(KeyboardInterrupt):
        pretrained(settings, pictures(), 2, 3, context(tmp_path / "cut"), "split")
    resumed = pretrained(settings, pictures(), 2, 3, context(tmp_path / "cut"), "split")
    assert epochs == [*range(11), 11, 10, 11, 12]
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# On several devices


def trained_by_two(
    settings: Pretraining, pictures: Held, seed: int
) -> Iterator[tuple[ResNet, torch.optim.Optimizer]]:
    """The slow way, epoch by epoch: two halves of every batch, and the mean gradient."""
    network = initial_network(settings, 2, pictures.size, seed)
    optimizer = torch.optim.SGD(
        network.parameters(), momentum=0.9, weight_decay=settings.weight_decay, nesterov=True
    )
    for epoch in range(settings.epochs):
        draws = torch.Generator().manual_seed(seed * 100_003 + epoch)
        batches = torch.randperm(len(pictures.labels), generator=draws).split(settings.batch)
        for place, rows in enumerate(batches):
            images = normalised(moved(pictures.images[rows], settings.padding, draws))
            labels, half = pictures.labels[rows], settings.batch // 2
            other = copy.deepcopy(network)  # its statistics are lost
            for each, part in ((other, slice(half, None)), (network, slice(half))):
                each.train().zero_grad()
                smooth = settings.label_smoothing
                functional.cross_entropy(
                    each(images[part]), labels[part], label_smoothing=smooth
                ).backward()
            for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
                mine.grad = (mine.grad + theirs.grad) / 2
            share = pretraining._share(epoch + place / len(batches), settings.epochs)
            optimizer.param_groups[0]["lr"] = settings.lr * share
            optimizer.step()
        yield network, optimizer


@pytest.mark.slow
def test_several_processes_go_on_and_average_their_gradients(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    settings, work = replace(TINY, devices=2), context(tmp_path)
    for epoch, (wanted, optimizer) in enumerate(trained_by_two(settings, pictures(48), 3)):
        state = {"network": wanted.state_dict(), "optimizer": optimizer.state_dict()}
        if epoch == 1:
            work.workspace.save("split", {"epochs": epoch + 1, **state})
            before = copy.deepcopy(state["network"])
    found = pretrained(settings, pictures(48), 2, 3, work, "split").state_dict()
    for name, tensor in state["network"].items():
        change, error = ((tensor - other[name]).float().norm() for other in (before, found))
        assert error < 0.01 * change, name
    assert Workspace(tmp_path).load("split")["epochs"] == settings.epochs


def test_one_device_needs_no_fabric_and_several_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    pretrained(replace(TINY, epochs=1), pictures(16), 2, 3, context(tmp_path / "one"), "split")
    with pytest.raises(MissingExtraError, match=r"Fabric is not installed.*mbpa\[experiments\]"):
        pretrained(replace(TINY, devices=2), pictures(), 2, 3, context(tmp_path / "two"), "split")


def test_halves_of_a_batch_have_its_gradient_on_average() -> None:
    """With statistics that do not depend on the batch: those that are shared are only gradients."""
    network = initial_network(TINY, 2, 16, 0).eval()
    some = pictures(16)
    gradients = []
    for share in (Share(), Share(0, 2), Share(1, 2)):
        network.zero_grad()
        logits = network(normalised(share.part(some.images)))
        functional.cross_entropy(logits, share.part(some.labels)).backward()
        gradients.append([param.grad.clone() for param in network.parameters()])
    for whole, first, second in zip(*gradients, strict=True):
        assert torch.allclose(whole, (first + second) / 2, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 20}, "layers must be one of"),
        ({"devices": 0}, "devices must be at least 1"),
        ({"devices": 3}, "batch must be a multiple of devices, got 16 and 3"),
        ({"smallest_crop": 0.0}, "smallest_crop must be above 0 and at most 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


# Pictures


def test_classes_are_chosen_and_numbered_by_their_place() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 2, 2)
    chosen = Held(images, torch.tensor([4, 0, 2, 4, 1])).of_classes(torch.tensor([4, 1]))
    assert chosen.labels.tolist() == [0, 0, 1]
    assert chosen.images[:, 0, 0, 0].tolist() == [0, 3, 4]
