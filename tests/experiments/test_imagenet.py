"""A folder of ImageNet: streaming it, and the whole experiment on a small one."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments import cli, data
from experiments.data import pictures as reading
from experiments.errors import ExperimentError
from experiments.experiment import Context
from experiments.images import task as task_module
from experiments.images.config import ImagesConfig
from experiments.images.presets import PRESETS
from experiments.images.task import make_image_task
from experiments.picture_sets import Held, Share, Streamed
from experiments.pretraining import Pretraining, features_of, make_resnet
from experiments.workspace import Workspace

Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
WNIDS = ("n01", "n02", "n03", "n04")
COLOURS = {"n01": (220, 40, 40), "n02": (40, 220, 40), "n03": (40, 40, 220), "n04": (210, 210, 40)}
TRAIN, VAL = 12, 4
SMALL = {
    "dataset": "imagenet",
    "size": "16",
    "classes": "4",
    "held-out": "3",
    "scored": "16",
    "batch": "4",
    "points": "0.5 1.0",
    "pretraining.epochs": "2",
    "pretraining.batch": "6",
    "rehearsed": "2",
}
CONFIG = replace(
    PRESETS["smoke"],
    dataset="imagenet",
    size=16,
    classes=4,
    held_out=3,
    rehearsed=2,
    batch=4,
    pretraining=Pretraining(width=4, epochs=1, batch=6),
)


def picture(wnid: str, number: int) -> bytes:
    """Return a noisy picture in its class's colour and of any size; a few are grey, CMYK or PNG."""
    draws = np.random.default_rng(number)
    height, width = draws.integers(20, 90, 2)
    noise = draws.integers(-30, 31, (height, width, 3))
    found = Image.fromarray(np.clip(np.array(COLOURS[wnid]) + noise, 0, 255).astype(np.uint8))
    mode = {1: "L", 2: "CMYK", 3: "P"}.get(number, "RGB")
    buffer = io.BytesIO()
    found.convert(mode).save(buffer, "PNG" if mode == "P" else "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory with a small ImageNet and one file that is no picture."""
    for part, count in (("train", TRAIN), ("val", VAL)):
        for wnid in WNIDS:
            place = tmp_path / "data" / "imagenet" / part / wnid
            place.mkdir(parents=True)
            for number in range(count):
                name = f"{wnid}_{number}.JPEG"
                place.joinpath(name).write_bytes(picture(wnid, number + 100 * (part == "val")))
    (tmp_path / "data/imagenet/train/n01/Thumbs.db").write_bytes(b"no picture")
    return tmp_path / "data"


def context(folder: Path) -> Context:
    beside = folder.parent
    work = Workspace(beside / "work")
    return Context(torch.device("cpu"), folder, work, progress=False, cache=beside / "cache")


# Reading


def slowly(path: str, size: int, box: tuple[float, ...]) -> np.ndarray:
    with Image.open(path) as opened:
        found = opened.convert("RGB")
    return np.asarray(found.resize((size, size), Image.Resampling.BILINEAR, box=box))


def test_pictures_arrive_in_order_as_if_read_one_by_one(folder: Path) -> None:
    files = data.imagenet(folder).train
    crops = torch.rand(len(files.paths), 4)
    batches = torch.randperm(len(files.paths)).split(7)
    before = torch.get_rng_state()
    cropped = list(files.stream(((rows, crops[rows]) for rows in batches), 48, 2))
    whole = list(files.stream(((rows, None) for rows in batches), 48, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for rows, some, middles in zip(batches, cropped, whole, strict=True):
        for row, image, middle in zip(rows.tolist(), some, middles, strict=True):
            path = files.paths[row]
            with Image.open(path) as opened:
                width, height = opened.size
            box = reading.random_box(width, height, *crops[row].tolist())
            assert np.array_equal(image, slowly(path, 48, box))
            assert np.array_equal(middle, slowly(path, 48, reading.middle_box(width, height)))


def test_a_large_picture_is_decoded_at_a_part_of_its_size(tmp_path: Path) -> None:
    x, y = np.meshgrid(np.linspace(0, 6, 800), np.linspace(0, 4, 600))
    waves = 128 + 100 * np.stack([np.sin(x), np.cos(y), np.sin(x + y)], 2)
    path = tmp_path / "large.JPEG"
    Image.fromarray(waves.astype(np.uint8)).save(path, quality=95)
    files = data.ImageFiles((str(path),), torch.zeros(1, dtype=torch.int64))
    (image,) = files.stream([(torch.tensor([0]), None)], 32)
    wanted = slowly(str(path), 32, reading.middle_box(800, 600)).astype(float)
    assert 0 < np.abs(image[0].numpy() - wanted).max() < 6


def test_streamed_pictures_have_the_features_of_held_ones(folder: Path) -> None:
    files = data.imagenet(folder).test
    squares = []
    for path in files.paths:
        with Image.open(path) as opened:
            squares.append(slowly(path, 48, reading.middle_box(*opened.size)))
    held = Held(torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2), files.labels)
    streamed = Streamed(files, files.labels, 48)
    network = make_resnet(Pretraining(width=4), 2, 48, 0).eval()
    wanted = features_of(network, held, most=5)
    assert torch.equal(features_of(network, streamed, most=5), wanted)
    new_numbers = streamed.of_classes(torch.tensor([3, 1]))
    assert new_numbers.labels.tolist() == [1] * VAL + [0] * VAL
    some = torch.cat([torch.arange(VAL, 2 * VAL), torch.arange(3 * VAL, 4 * VAL)])
    assert torch.allclose(features_of(network, new_numbers), wanted[some], atol=1e-6)


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_crop_lies_within_the_picture_and_has_its_share(
    width: int, height: int, share: float, shape: float, x: float, y: float
) -> None:
    left, top, right, bottom = reading.random_box(width, height, share, shape, x, y)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    across, down = right - left, bottom - top
    if across < 0.999 * width and down < 0.999 * height:
        assert across * down == pytest.approx(share * width * height, rel=1e-6)
        assert across / down >= 0.75 * (1 - 1e-6)
        assert across / down <= 4 / 3 * (1 + 1e-6)
    else:
        assert across * down <= share * width * height * (1 + 1e-6)


def test_shares_of_streamed_batches_are_parts_of_what_one_process_sees(folder: Path) -> None:
    files = data.imagenet(folder).train
    some = Streamed(files, files.labels, 16)
    order = torch.randperm(len(files.labels))[:40]
    shares = (Share(), Share(0, 2), Share(1, 2))
    whole, first, second = (
        list(
            some.augment(
                order,
                10,
                torch.Generator().manual_seed(4),
                padding=0,
                smallest_crop=0.3,
                size=12,
                share=share,
            )
        )
        for share in shares
    )
    plain = torch.cat(list(some.in_order(5)))
    assert len(whole) == 4
    for rows, (images, labels), *halves in zip(order.split(10), whole, first, second, strict=True):
        assert torch.equal(labels, files.labels[rows])
        assert images.shape == (10, 3, 12, 12)
        assert torch.equal(torch.cat([half for half, _ in halves]), images)
        assert torch.equal(torch.cat([known for _, known in halves]), labels)
        # A picture has its class's colour whatever is cut out of it.
        assert (images.float().mean((2, 3)) - plain[rows].float().mean((2, 3))).abs().max() < 40


def test_half_of_the_streamed_pictures_are_mirrored(tmp_path: Path) -> None:
    path = tmp_path / "ramp.png"
    ramp = np.broadcast_to(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], (64, 64, 3))
    Image.fromarray(np.ascontiguousarray(ramp)).save(path)
    files = data.ImageFiles((str(path),) * 60, torch.zeros(60, dtype=torch.int64))
    some = Streamed(files, files.labels, 8)
    draws = torch.Generator().manual_seed(0)
    ((images, _),) = some.augment(torch.arange(60), 60, draws, padding=0, smallest_crop=0.5, size=8)
    rises = images[:, 0, 0, -1] > images[:, 0, 0, 0]
    assert 15 < rises.sum() < 45
    assert torch.equal(images[:, :, 0], images[:, :, 5])


def test_every_picture_that_cannot_be_read_is_named(folder: Path) -> None:
    train = folder / "imagenet" / "train"
    whole = (train / "n02/n02_5.JPEG").read_bytes()
    (train / "n02/n02_5.JPEG").write_bytes(whole[: len(whole) // 2])
    (train / "n03/n03_0.JPEG").write_bytes(b"a page that says 404")
    files, told = data.imagenet(folder).train, []
    with pytest.raises(data.DamagedDataError) as caught:
        files.verify(told.append)
    first, second = str(caught.value).split("; ")
    assert re.search(r"n02_5\.JPEG is damaged: .*truncated", first)
    assert second.endswith("n03_0.JPEG is damaged: it is not a picture")
    assert sum(told) == 48
    with pytest.raises(data.DamagedDataError, match=r"n03_0\.JPEG is damaged"):
        list(files.stream([(torch.arange(24, 30), None)], 8))


# The experiment


def asked(folder: Path, **changes: str) -> list[str]:
    words = ["run", "incremental-images", "--preset", "smoke", "--no-progress"]
    words += ["--device", "cpu", "--data-dir", str(folder), "--out", str(folder.parent / "out")]
    for name, value in (SMALL | changes).items():
        words += [f"--{name}", *value.split()]
    return words


@pytest.mark.heavy
def test_the_whole_experiment_runs_on_a_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(asked(folder)) == 0, capsys.readouterr().err
    (path,) = (folder.parent / "out" / "incremental-images").glob("*-seed1.json")
    result = json.loads(path.read_text())
    assert result["config"]["dataset"] == "imagenet"
    assert "--dataset imagenet" in result["command"]
    found = {
        (r["method"], r["subset"], r["epochs"]): r["value"]
        for r in result["metrics"]
        if r["name"] == "top1"
    }
    for method in ("parametric", "memory only", "mixture", "MbPA (RMSprop)", "MbPA (gradient)"):
        for subset in ("novel", "pre-trained", "all"):
            assert {0.5, 1.0} <= {e for m, s, e in found if (m, s) == (method, subset)}
    assert (
        found["memory only", "all", 1.0] >= 50
    )  # four colours: even an untrained network sees them


def test_pictures_that_cannot_be_read_are_refused_before_the_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "imagenet/val/n04/n04_1.JPEG").write_bytes(b"a page that says 404")
    assert cli.main(asked(folder)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch(r"experiments: .*n04_1\.JPEG is damaged: it is not a picture", line)
    assert not list((folder.parent / "out").rglob("manifest.json"))


@pytest.mark.heavy
def test_a_task_has_the_folders_classes_and_its_pictures_are_checked_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_image_task(CONFIG, context(folder), 1)
    assert task.old == 2
    assert sorted(task.classes.tolist()) == [0, 1, 2, 3]
    assert task.train_labels.bincount().tolist() == [TRAIN - 2] * 2 + [TRAIN] * 2
    assert len(task.validation_labels) == 0
    assert task.test_labels.tolist() == [
        task.classes.tolist().index(number) for number in range(4) for _ in range(VAL)
    ]
    monkeypatch.setattr(data.ImageFiles, "verify", None)
    again = make_image_task(replace(CONFIG, lr=0.5), context(folder), 1)
    assert torch.equal(again.train, task.train)
    other = make_image_task(CONFIG, context(folder), 2)
    assert other.train.shape == task.train.shape


def test_a_folder_is_known_by_its_files_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    here, there = data.imagenet(folder), data.imagenet(tmp_path / "elsewhere")
    assert here.digest() == there.digest()
    (tmp_path / "elsewhere/imagenet/val/n01/n01_0.JPEG").rename(
        tmp_path / "elsewhere/imagenet/val/n02/n01_0.JPEG"
    )
    assert data.imagenet(tmp_path / "elsewhere").digest() != here.digest()


def test_features_are_known_by_all_they_depend_on(folder: Path) -> None:
    def mark(config: ImagesConfig) -> str:
        return task_module._fingerprint(config, context(folder), 1)

    scored = replace(CONFIG, part="validation")
    marks = {mark(CONFIG), mark(replace(CONFIG, size=24)), mark(scored)}
    marks.add(mark(replace(scored, held_out=2)))
    for change in ({"smallest_crop": 0.5}, {"devices": 2}):
        marks.add(mark(replace(CONFIG, pretraining=replace(CONFIG.pretraining, **change))))
    assert len(marks) == 6
    assert mark(replace(CONFIG, lr=0.5, held_out=2)) in marks
    (folder / "imagenet/train/n01/n01_0.JPEG").unlink()
    assert mark(CONFIG) not in marks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": 5}, "classes must be between 2 and 4, the number of folders"),
        (
            {"part": "validation", "held_out": 12, "rehearsed": 0},
            "held_out must be below 12, the training images",
        ),
        ({"rehearsed": 12}, "held_out must be below 12, .* and rehearsed 12"),
        (
            {"pretraining": Pretraining(batch=25)},
            r"pretraining\.batch must be at most 20, .* got 25",
        ),
    ],
)
def test_settings_that_the_folder_is_too_small_for_are_refused(
    folder: Path, change: dict, message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        make_image_task(replace(CONFIG, **change), context(folder), 1)


def test_large_pictures_have_the_first_layer_of_published_networks() -> None:
    settings = Pretraining(width=4)
    assert make_resnet(settings, 2, 224, 0).conv1.kernel_size == (7, 7)
    assert make_resnet(settings, 2, 64, 0).conv1.kernel_size == (3, 3)


def test_the_commands_of_the_run_sheet_are_understood() -> None:
    text = (ROOT / "docs" / "imagenet.md").read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\$ python -m experiments (run .*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        parsed = cli.parse(shlex.split(command, comments=True))
        assert isinstance(parsed, cli.Run)
        assert parsed.settings.dataset == "imagenet"
        assert parsed.settings.pretraining.batch % parsed.settings.pretraining.devices == 0
