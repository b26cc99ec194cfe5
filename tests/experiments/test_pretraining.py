"""The image network and its training: names, arithmetic, augmentation, resuming, features."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from experiments import pretraining
from experiments.experiment import Context
from experiments.picture_sets import (
    Held,
    Share,
    crop,
    normalise,
    paste_patches,
    recolour,
    shift,
)
from experiments.pretraining import Pretraining, features_of, make_resnet, pretrain
from experiments.resnet import ResNet
from experiments.workspace import Workspace
from mbpa.errors import MissingExtraError

PLAIN: dict[str, Any] = {"smallest_crop": 1.0, "colour": 0.0, "cutmix": 0.0, "weight_decay": 5e-4}
TINY = Pretraining(width=4, epochs=4, batch=16, lr=0.05, **PLAIN)
FIVE_EPOCHS = replace(TINY, epochs=5)


def context(folder: Path) -> Context:
    return Context(torch.device("cpu"), None, Workspace(folder), progress=False)


def pictures(count: int = 96, seed: int = 0) -> Held:
    """Return pictures of two classes: bright on the left, or bright at the top."""
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
    """Translate the other implementation's parameter names."""
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
    found = shift(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(found, shift(images, 2, torch.Generator().manual_seed(0)))
    for rank in range(4):
        share = Share(rank, 4)
        mine = shift(share.part(images), 2, torch.Generator().manual_seed(0), share)
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


def test_a_crop_is_a_part_of_its_picture_enlarged() -> None:
    """In pictures whose brightness is a ramp, the pixels of a crop show where it was taken."""
    across, along = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    picture = torch.stack((10 * along, 10 * across, torch.full((20, 20), 7.0))).byte()
    images = picture.expand(400, 3, 20, 20)
    found = crop(images, 0.25, 20, torch.Generator().manual_seed(0))
    inner = slice(2, 18)  # the outermost pixels are those of the edge
    wide, high = (found[:, place].float() for place in (0, 1))
    steps_right = (wide[:, 10, inner].diff(dim=1).mean(1) / 10).unsqueeze(1)
    steps_down = (high[:, inner, 10].diff(dim=1).mean(1) / 10).unsqueeze(1)
    shares = (steps_right * steps_down).abs()
    assert (found[:, 2] == 7).all()
    assert 0.2 < shares.min() < 0.3
    assert 0.95 < shares.max() < 1.05
    shapes = (steps_right / steps_down).abs()
    assert shapes.min() > 0.72
    assert shapes.max() < 1.4
    assert 0.4 < (steps_right < 0).float().mean() < 0.6
    assert (steps_down > 0).all()
    whole = crop(images[:8], 1 - 1e-6, 20, torch.Generator().manual_seed(0)).float()
    error = torch.minimum(
        *((whole - other).abs().amax((1, 2, 3)) for other in (images[:8], images[:8].flip(3)))
    )
    assert error.max() < 35  # of the shape, up to 4:3, as much as fits


def test_a_crop_may_be_seen_in_fewer_pixels() -> None:
    images = torch.randint(0, 256, (5, 3, 6, 6), dtype=torch.uint8)
    images = images.repeat_interleave(4, 2).repeat_interleave(4, 3)  # squares of four pixels
    large, small = (crop(images, 0.5, s, torch.Generator().manual_seed(2)) for s in (24, 8))
    assert small.shape == (5, 3, 8, 8)
    seen_larger = functional.interpolate(small.float(), size=24, mode="nearest")
    assert (seen_larger - large.float()).abs().median() < 5


def test_colours_change_picture_by_picture() -> None:
    inputs = torch.randn(6, 3, 5, 4)
    found = recolour(inputs, 0.3, torch.Generator().manual_seed(1))
    drawn = 0.3 * (2 * torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) - 1)
    for image, result, (contrast, light, colour) in zip(inputs, found, drawn.tolist(), strict=True):
        changed = image * (1 + contrast) + light
        grey = changed.mean(0)
        wanted = torch.stack([grey + (channel - grey) * (1 + colour) for channel in changed])
        assert torch.allclose(result, wanted, atol=1e-6)
    assert torch.allclose(recolour(inputs, 0.0, torch.Generator()), inputs, atol=1e-6)


@pytest.mark.parametrize(("alter", "how"), [(crop, (0.4, 8)), (recolour, (0.4,))])
def test_what_is_drawn_does_not_depend_on_how_many_share_it(alter: Any, how: Any) -> None:
    inputs = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    pictures = inputs if alter is crop else inputs.float()
    whole = alter(pictures, *how, torch.Generator().manual_seed(0))
    parts = [
        alter(share.part(pictures), *how, torch.Generator().manual_seed(0), share)
        for share in (Share(rank, 3) for rank in range(3))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_a_patch_comes_from_the_picture_before_and_counts_as_much_as_it_covers() -> None:
    draws, shares = torch.Generator().manual_seed(0), []
    for _ in range(200):
        inputs = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 16, 12)
        found, own = paste_patches(inputs, draws)
        mine = found == inputs
        assert ((found == inputs.roll(1, 0)) | mine).all()
        assert own == pytest.approx(float(mine[0, 0].float().mean()))
        foreign = (~mine[0, 0]).nonzero()
        if len(foreign):
            (top, left), (bottom, right) = foreign.amin(0).tolist(), foreign.amax(0).tolist()
            assert len(foreign) == (bottom - top + 1) * (right - left + 1)  # a rectangle
        shares.append(own)
    assert min(shares) < 0.35  # the rectangle ends where the picture does
    assert max(shares) > 0.9


@pytest.mark.heavy
def test_it_learns_from_altered_pictures(tmp_path: Path) -> None:
    settings = Pretraining(width=4, epochs=12, batch=16, lr=0.05, smallest_crop=0.6)
    network = pretrain(settings, pictures(), 2, 3, context(tmp_path), "split")
    test = pictures(seed=1)
    assert (network(normalise(test.images)).argmax(1) == test.labels).float().mean() > 0.9


def test_crops_are_smaller_in_the_first_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Pretraining(width=4, epochs=5, batch=96, early=0.6, crop_side=0.75)
    seen: list[tuple[int, int]] = []
    real = ResNet.features

    def watched(network: ResNet, images: Tensor) -> Tensor:
        seen.append((images.shape[2], images.shape[3]))
        return real(network, images)

    monkeypatch.setattr(ResNet, "features", watched)
    pretrain(settings, pictures(), 2, 3, context(tmp_path), "split")
    assert seen == [(9, 9)] * 3 + [(12, 12)] * 2  # 4/7 and 3/4 of 16 pixels
    for wrong in ({"early": 1.5}, {"early_crop_side": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            replace(settings, **wrong)


def test_pictures_are_enlarged_once_and_only_if_they_are_smaller() -> None:
    some = pictures(6)
    larger = some.enlarge(24)
    assert (larger.size, larger.images.dtype) == (24, torch.uint8)
    assert torch.equal(larger.labels, some.labels)
    around = (
        functional.avg_pool2d(larger.images.float(), 3),
        functional.avg_pool2d(some.images.float(), 2),
    )
    assert (around[0] - around[1]).abs().mean() < 5
    assert some.enlarge(16) is some
    assert some.enlarge(0) is some


@pytest.mark.heavy
def test_it_learns_and_its_features_are_what_the_last_layer_sees(tmp_path: Path) -> None:
    train, test = pictures(), pictures(seed=1)
    settings = replace(TINY, epochs=8, padding=1)
    network = pretrain(settings, train, 2, 3, context(tmp_path / "work"), "split")
    logits = network(normalise(test.images))
    assert (logits.argmax(1) == test.labels).float().mean() > 0.9
    assert not network.training
    told: list[int] = []
    found = features_of(network, test, most=7, tick=told.append)
    assert sum(told) == len(test.labels)
    assert torch.allclose(network.fc(found), logits, atol=1e-5)
    both = features_of(network, test, mirrored=True)
    other = features_of(network, replace(test, images=test.images.flip(3)))
    assert torch.allclose(both, (found + other) / 2, atol=1e-5)
    assert not torch.allclose(both, found, atol=1e-3)
    shrunk = features_of(network, test, shrunk=0.75)
    small = functional.interpolate(normalise(test.images), (12, 12), mode="bilinear")
    assert torch.allclose(shrunk, (found + network.features(small)) / 2, atol=1e-5)
    assert not torch.allclose(shrunk, found, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_learns_on_a_gpu_in_half_precision_and_goes_on(tmp_path: Path) -> None:
    device = torch.device("cuda")
    train, test = (
        Held(p.images.to(device), p.labels.to(device)) for p in (pictures(), pictures(seed=1))
    )
    moved = replace(TINY, epochs=8, padding=1)
    altered = Pretraining(width=4, epochs=12, batch=16, lr=0.05, smallest_crop=0.6)  # two sizes
    place = replace(context(tmp_path / "work"), device=device)
    for name, settings in (("moved", moved), ("altered", altered), ("moved", moved)):
        network = pretrain(settings, train, 2, 3, place, name)  # at last, what was kept
        found = features_of(network, test)
        assert (found.dtype, found.device.type) == (torch.float32, "cuda")
        assert (network.fc(found).argmax(1) == test.labels).float().mean() > 0.9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ResNet:
    """A network trained without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    return pretrain(FIVE_EPOCHS, pictures(48), 2, 3, context(folder), "split")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("seconds", "expected"), [(-1.0, [0, 1, 2, 3, 3, 4]), (1e9, [0, 1, 2, 3, 0, 1, 2, 3, 4])]
)
def test_training_resumes_where_it_was_last_saved(
    seconds: float,
    expected: list[int],
    whole: ResNet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs: list[int] = []
    real = pretraining._epoch

    def watched(*arguments: object) -> None:
        if arguments[-1] == 3 and 3 not in epochs:
            epochs.append(3)
            raise KeyboardInterrupt
        epochs.append(int(str(arguments[-1])))
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "_epoch", watched)
    with pytest.raises(KeyboardInterrupt):
        pretrain(FIVE_EPOCHS, pictures(48), 2, 3, context(tmp_path / "cut"), "split", seconds)
    resumed = pretrain(FIVE_EPOCHS, pictures(48), 2, 3, context(tmp_path / "cut"), "split", seconds)
    assert epochs == expected
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# On several devices


def trained_by_two(
    settings: Pretraining, pictures: Held, seed: int
) -> Iterator[tuple[ResNet, torch.optim.Optimizer]]:
    """Train with the mean gradient of the two halves of every batch, epoch by epoch."""
    network = make_resnet(settings, 2, pictures.size, seed)
    optimizer = torch.optim.SGD(
        network.parameters(), momentum=0.9, weight_decay=settings.weight_decay, nesterov=True
    )
    for epoch in range(settings.epochs):
        draws = torch.Generator().manual_seed(seed * 100_003 + epoch)
        batches = torch.randperm(len(pictures.labels), generator=draws).split(settings.batch)
        for place, rows in enumerate(batches):
            images = normalise(shift(pictures.images[rows], settings.padding, draws))
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
            share = pretraining._rate_share(epoch + place / len(batches), settings.epochs)
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
    found = pretrain(settings, pictures(48), 2, 3, work, "split").state_dict()
    for name, tensor in state["network"].items():
        change, error = ((tensor - other[name]).float().norm() for other in (before, found))
        assert error < 0.01 * change, name
    assert Workspace(tmp_path).load("split")["epochs"] == settings.epochs


def test_one_device_needs_no_fabric_and_several_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    pretrain(replace(TINY, epochs=1), pictures(16), 2, 3, context(tmp_path / "one"), "split")
    with pytest.raises(MissingExtraError, match=r"Fabric is not installed.*mbpa\[experiments\]"):
        pretrain(replace(TINY, devices=2), pictures(), 2, 3, context(tmp_path / "two"), "split")


def test_halves_of_a_batch_have_its_gradient_on_average() -> None:
    """With statistics that do not depend on the batch: those that are shared are only gradients."""
    network = make_resnet(TINY, 2, 16, 0).eval()
    some = pictures(16)
    gradients = []
    for share in (Share(), Share(0, 2), Share(1, 2)):
        network.zero_grad()
        logits = network(normalise(share.part(some.images)))
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
