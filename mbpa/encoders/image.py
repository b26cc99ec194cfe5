"""Image encoders: pictures are read within limits, stored as small files and turned into keys.

A picture is stored, shown and embedded in the form that `kept` returns, so that embedding it again
gives the same key. Needs the extra `images`, and for models of Hugging Face the extra `text`.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders.base import Encoder, fingerprint_of, installed_transformers, local_model, no_bars
from mbpa.errors import MissingExtraError

if TYPE_CHECKING:
    from PIL import Image

DEFAULT = "edges"
"""Name of the default encoder, which needs no weights. It is good for digits, signs and icons, but
only a baseline for photographs."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # few: each decoder is exposed to strangers
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # of files in these formats
MOST_PIXELS = 32_000_000  # of a picture received in a request
MOST_SIDE = 65_535  # pixels; a JPEG has no more, and longer strips take seconds to shrink
SIDE = 512  # maximum width and height of a stored picture, in pixels
LOSSLESS = 128 * 128  # pixels up to which pictures are stored without loss
SLIMMEST = 4  # largest ratio of the sides of a model's input
BATCH = 32
_AS_KEPT = "a picture must be as mbpa.encoders.image.kept gives it"
_PNG_HEADER_BYTES = 33  # the signature and IHDR
_PNG_LAST_FILTER = 4  # a row begins with the number of its filter
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_JPEG_FILLERS = b"\x55" * 16, b"\xaa" * 16  # these differ in every bit
_JPEG_APP0, _JPEG_SCAN = 0xE0, 0xDA  # markers of segments
_JPEG_NOTES = {*range(0xE0, 0xF0), 0xFE}  # markers of application segments and comments
_KEY_FACTORS = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}
"""Factors that scale a PNG file's transparent colour to 8 bits, as Pillow scales its pixels."""


class PictureError(ValueError):
    """The data is not a readable picture; the message is meant for the person who sent it."""


class ImageEncoder(Encoder[bytes]):
    """An encoder of picture files, as returned by `kept`; to write your own, define `__call__`."""

    takes = "images"


def encoder(name: str = DEFAULT, *, device: str | torch.device = "cpu") -> ImageEncoder:
    """Return the encoder of this name.

    Args:
        name: "edges", a directory with a vision model in Hugging Face's format, or the name of such
            a model in Hugging Face's cache.
        device: device on which a model runs; "edges" always uses the CPU.

    Raises:
        MissingExtraError: Pillow is not installed, or transformers for a model.
        ValueError: there is no such encoder on this machine, or it does not take pictures.
    """
    _pillow()
    if name == DEFAULT:
        return Edges()
    try:
        directory = local_model(name)
    except ValueError as error:
        raise ValueError(f"the encoder must be {DEFAULT!r}, {error}") from error
    return _Vision(name, directory, torch.device(device))


# Files


def kept(data: bytes, *, most_pixels: int = MOST_PIXELS) -> bytes:
    """Return a picture in the form in which it is stored.

    It is upright, grey or RGB, on white where it was transparent, at most `SIDE` pixels wide and
    high, and without metadata. Small pictures are PNG files, others JPEG.

    Args:
        data: a file in one of `FORMATS`; of an animation, the first frame is used.
        most_pixels: maximum number of pixels.

    Raises:
        PictureError: the file is not a picture, or has too many pixels. The number of pixels is
            checked before any is decoded.
    """
    module = _pillow()
    try:
        with module.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > most_pixels:
                raise _too_large(most_pixels)
            if max(opened.size) > MOST_SIDE:
                raise PictureError(f"a picture must have at most {MOST_SIDE:,} pixels a side")
            return _file(_shrunk(opened, SIDE))
    except PictureError:
        raise
    except (module.DecompressionBombError, module.DecompressionBombWarning) as error:
        raise _too_large(most_pixels) from error
    except module.UnidentifiedImageError as error:
        known = ", ".join(FORMATS[:-1])
        raise PictureError(f"a picture must be a {known} or {FORMATS[-1]} file") from error
    except Exception as error:  # damaged files raise almost anything in Pillow
        why = " ".join(str(error).split())[:100]
        raise PictureError(f"a picture cannot be read: {why or type(error).__name__}") from error


def require_kept(picture: bytes) -> None:
    """Raise `PictureError` unless a file has the form that `kept` returns.

    The file must consist of the same parts as one that `kept` writes, its compressed data must
    contain all pixels, and at most 8 bytes may follow them. The compression itself is not compared,
    since it depends on the version of Pillow.
    """
    module = _pillow()
    try:
        with module.open(io.BytesIO(picture), formats=("PNG", "JPEG")) as opened:
            format, mode, size = opened.format, opened.mode, opened.size
    except Exception as error:  # damaged files raise almost anything in Pillow
        raise PictureError(f"{_AS_KEPT}, got no PNG or JPEG file that can be read") from error
    shown = f"{size[0]} × {size[1]} pixels"
    if max(size) > SIDE:
        raise PictureError(f"{_AS_KEPT}, got one of {shown}")
    if mode not in ("L", "RGB"):
        raise PictureError(f"{_AS_KEPT}, grey or RGB with 8 bits a channel, got mode {mode!r}")
    blank = _file(module.new(mode, size))
    if media_type(blank) != media_type(picture):
        raise PictureError(f"{_AS_KEPT}, got a {format} file of {shown}")
    if format == "PNG":
        _require_plain_png(picture, blank, row_bytes=size[0] * len(mode) + 1, rows=size[1])
    else:
        _require_plain_jpeg(picture, blank)


def pixels_of(data: bytes) -> int:
    """Return the number of pixels according to the file's header; 0 if it cannot be read."""
    try:
        with _pillow().open(io.BytesIO(data), formats=FORMATS) as opened:
            return int(opened.width * opened.height)
    except Exception:  # `kept` reports what is wrong
        return 0


def thumbnail(picture: bytes, side: int = 96) -> bytes:
    """Return a smaller version of a file from `kept`, at most `side` pixels wide and high."""
    with _pillow().open(io.BytesIO(picture), formats=FORMATS) as opened:
        return picture if max(opened.size) <= side else _file(_shrunk(opened, side))


def media_type(picture: bytes) -> str:
    """Return the media type of a file from `kept`."""
    return "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg"


def _shrunk(opened: Image.Image, side: int) -> Image.Image:
    module = _pillow()
    from PIL import ImageOps

    if opened.mode.startswith("I"):
        opened = _reduce_to_8_bits(opened)
    _scale_transparent_colour(opened)
    if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
        opened = opened.convert("RGBA")
    elif opened.mode not in ("L", "RGB"):
        opened = opened.convert("L" if opened.mode == "1" else "RGB")
    width, height = (max(1, length // (3 * side)) for length in opened.size)
    if opened.mode == "RGBA" and (width, height) != (1, 1):
        beside = opened.info
        opened = opened.reduce((width, height))  # `thumbnail` needs other modes
        opened.info.update(beside)
    opened.thumbnail((side, side), module.Resampling.LANCZOS, reducing_gap=3.0)
    opened = ImageOps.exif_transpose(opened)
    if opened.mode == "RGBA":
        ground = module.new("RGBA", opened.size, "white")
        opened = module.alpha_composite(ground, opened).convert("RGB")
    return opened


def _reduce_to_8_bits(opened: Image.Image) -> Image.Image:
    """Convert a 16-bit grey picture to 8 bits; Pillow would clip levels above 255 instead."""
    module, levels = _pillow(), np.asarray(opened)
    reduced: Image.Image = module.fromarray((levels // 257).clip(0, 255).astype(np.uint8))
    beside = dict(opened.info)  # includes the orientation
    transparent = beside.pop("transparency", None)
    if transparent is not None:
        reduced.putalpha(module.fromarray((levels != transparent).astype(np.uint8) * 255))
    reduced.info.update(beside)
    return reduced


def _scale_transparent_colour(opened: Image.Image) -> None:
    """Scale the transparent colour to 8 bits; Pillow scales the pixels but not this colour."""
    tile = getattr(opened, "tile", None)  # only pictures read from a file have one
    arguments = tile[0][3] if tile else None
    factor = _KEY_FACTORS.get(arguments) if isinstance(arguments, str) else None
    colour = opened.info.get("transparency")
    if factor is None or colour is None:
        return
    if isinstance(colour, tuple):
        opened.info["transparency"] = tuple(int(level * factor) for level in colour)
    else:
        opened.info["transparency"] = int(colour * factor)


def _file(picture: Image.Image) -> bytes:
    """Return a picture as a file without metadata."""
    clean = _pillow().frombytes(picture.mode, picture.size, picture.tobytes())
    file = io.BytesIO()
    if clean.width * clean.height <= LOSSLESS:
        clean.save(file, "PNG", compress_level=9)
    else:
        clean.save(file, "JPEG", quality=90)
    return file.getvalue()


def _require_plain_png(picture: bytes, blank: bytes, row_bytes: int, rows: int) -> None:
    """Raise unless the file is just the header of a blank picture, the pixels, and the end."""
    if not picture.startswith(blank[:_PNG_HEADER_BYTES]):
        raise PictureError(f"{_AS_KEPT}, got a PNG file of another kind")
    at, compressed = _PNG_HEADER_BYTES, b""
    while picture[at + 4 : at + 8] == b"IDAT":
        stop = at + 8 + int.from_bytes(picture[at : at + 4])
        if picture[stop : stop + 4] != zlib.crc32(picture[at + 4 : stop]).to_bytes(4):
            raise _damaged()
        compressed += picture[at + 8 : stop]
        at = stop + 4
    if picture[at:] != _PNG_END:
        raise _something_beside() if _PNG_END in picture else _damaged()
    unpacking = zlib.decompressobj()
    try:
        pixels = unpacking.decompress(compressed, row_bytes * rows + 1)
    except zlib.error as error:
        raise _damaged() from error
    is_whole = unpacking.eof and len(pixels) == row_bytes * rows
    if not is_whole or max(pixels[::row_bytes]) > _PNG_LAST_FILTER:
        raise _damaged()
    if unpacking.unused_data:
        raise _something_beside()


def _require_plain_jpeg(picture: bytes, blank: bytes) -> None:
    """Raise unless the file is just the segments of a blank picture, the pixels, and the end."""
    (segments, start), (expected, _) = _read_segments(picture), _read_segments(blank)
    if segments != expected:
        extra = {marker for marker, *_ in set(segments) - set(expected)}
        if extra & _JPEG_NOTES:
            raise _something_beside()
        raise PictureError(f"{_AS_KEPT}, got a JPEG file of another kind")
    stop = len(picture) - len(_JPEG_END)
    if not picture.endswith(_JPEG_END):
        raise _something_beside() if _JPEG_END in picture[start:] else _damaged()
    data = picture[start:stop]
    if data.count(b"\xff") != data.count(b"\xff\0"):  # a marker among the pixels
        raise _something_beside()
    # The decoder reads about 8 bytes ahead, so the filler must be at least that long to matter.
    first, second = (_decode_jpeg(picture[:stop] + each) for each in _JPEG_FILLERS)
    if first is None or first != second:  # it needed more data than there is
        raise _damaged()
    if _decode_jpeg(picture[: stop - 1]) is not None:  # it needed less data
        raise _something_beside()


def _read_segments(jpeg: bytes) -> tuple[list[tuple[int, int, bytes]], int]:
    """Return the segments before the pixels, and where the pixels start.

    A segment is a marker, a length and the content. The content is included only for the segment
    that describes the file; of tables and the frame only the form is compared.
    """
    at, marker, segments = len(_JPEG_START), 0, []
    while marker != _JPEG_SCAN and at + 4 <= len(jpeg):
        marker, length = jpeg[at + 1], int.from_bytes(jpeg[at + 2 : at + 4])
        content = jpeg[at + 4 : at + 2 + length] if marker == _JPEG_APP0 else b""
        segments.append((marker, length, content))
        at += 2 + length
    return segments, at


class _UnfinishedFile(io.BytesIO):
    """A file that raises at its end, so that Pillow cannot make up missing data."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if not data:
            raise EOFError("there is no more")
        return data


def _decode_jpeg(jpeg: bytes) -> bytes | None:
    """Return the pixels of a JPEG file without its end marker; `None` if some are missing."""
    try:
        with _pillow().open(_UnfinishedFile(jpeg), formats=("JPEG",)) as opened:
            pixels: bytes = opened.tobytes()
    except Exception:  # damaged files raise almost anything in Pillow
        return None
    return pixels


def _damaged() -> PictureError:
    return PictureError(f"{_AS_KEPT}, got a file that is damaged or not all there")


def _something_beside() -> PictureError:
    return PictureError(f"{_AS_KEPT}, got one with what a camera or program wrote beside it")


def _too_large(most: int) -> PictureError:
    return PictureError(f"a picture must have at most {most:,} pixels")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", extra="images") from error
    return Image


def _rgb(picture: bytes) -> Image.Image:
    with _pillow().open(io.BytesIO(picture), formats=FORMATS) as opened:
        found: Image.Image = opened.convert("RGB")
    return found


def _widened(picture: Image.Image) -> Image.Image:
    """Pad a picture with white so that its sides have a ratio of at most `SLIMMEST`.

    Models scale the shorter side to a fixed size, which would turn a strip one pixel wide into a
    hundred megabytes.
    """
    least = -(-max(picture.size) // SLIMMEST)
    if min(picture.size) >= least:
        return picture
    width, height = (max(side, least) for side in picture.size)
    ground = _pillow().new("RGB", (width, height), "white")
    ground.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
    widened: Image.Image = ground
    return widened


# Encoders


class Edges(ImageEncoder):
    """Amounts of edges by direction and place, and coarse colours.

    Histograms of oriented gradients (Dalal and Triggs 2005) of the picture resized to a square. The
    places overlap, so that strokes may move a little, and overall brightness does not matter. The
    last number is constant, so that the key of a blank picture has a direction, too.
    """

    name = DEFAULT
    side, places, directions = 32, 8, 8
    key_dim = places**2 * (directions + 2) + 1
    blank = 0.01

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the version of this encoder."""
        return hashlib.sha256(b"edges 1").hexdigest()

    def __call__(self, pictures: Sequence[bytes], /) -> Float[Tensor, "B D"]:
        keys = torch.empty(len(pictures), self.key_dim)
        for key, picture in zip(keys, pictures, strict=True):
            light, *colours = _rgb(picture).convert("YCbCr").split()
            parts = [self._edges(light), *map(self._colour, colours), np.array([self.blank])]
            key.copy_(torch.from_numpy(np.concatenate(parts)))
        return torch.nn.functional.normalize(keys, dim=1)

    def _edges(self, light: Image.Image) -> Float[np.ndarray, "E"]:
        down, right = np.gradient(np.asarray(light.resize((self.side, self.side)), float) / 255)
        turn = np.arctan2(down, right) / (2 * np.pi) * self.directions
        lower = np.floor(turn)
        row, column = np.indices(turn.shape)
        found = np.zeros((self.directions, self.side, self.side))
        for direction, share in ((lower, 1 + lower - turn), (lower + 1, turn - lower)):
            which = direction.astype(int) % self.directions
            found[which, row, column] += share * np.hypot(down, right)
        # A place extends to the middle of the next one, with linearly decreasing weight.
        middles = (np.arange(self.places) + 0.5) * self.side / self.places - 0.5
        away = np.abs(np.arange(self.side) - middles[:, None]) * self.places / self.side
        near = np.maximum(0, 1 - away)
        sums = np.einsum("dij,pi,qj->dpq", found, near, near).flatten()
        edges: np.ndarray = np.sqrt(sums / (1 + sums.sum()))
        return edges

    def _colour(self, band: Image.Image) -> Float[np.ndarray, "C"]:
        small = np.asarray(band.resize((self.places, self.places)), float)
        return (small.flatten() - 128) / 255


# Errors that loading and trying a model may raise: files are missing or damaged, dependencies are
# not installed, or the model is for something else.
_UNUSABLE = (
    *(OSError, ValueError, KeyError, TypeError),
    *(ImportError, AttributeError, RuntimeError),
)


class _Vision(ImageEncoder):
    """A vision model in a directory.

    The key is its class token if it has one, else the mean over positions. For a model of pictures
    and texts, it is the embedding that the model compares with texts.
    """

    def __init__(self, name: str, directory: Path, device: torch.device) -> None:
        transformers = installed_transformers()
        self.name, self._directory, self._device = name, directory, device
        # Always use the processor that needs no torchvision: the other gives slightly other pixels.
        is_new = int(transformers.__version__.partition(".")[0]) >= 5
        plain: dict[str, Any] = {"backend": "pil"} if is_new else {"use_fast": False}
        try:
            self._prepare = transformers.AutoImageProcessor.from_pretrained(
                directory, local_files_only=True, **plain
            )
            with no_bars(transformers):
                model = transformers.AutoModel.from_pretrained(
                    directory, local_files_only=True, dtype=torch.float32
                )
            self._model = model.to(device).eval().requires_grad_(False)
            self._has_class_token = any(
                part.endswith("cls_token") for part, _ in model.named_parameters()
            )
            # Try two shapes at once, since not every processor brings them to one size.
            shapes = [_file(_pillow().new("RGB", size)) for size in ((32, 32), (48, 32))]
            self.key_dim = self._keys(shapes).shape[1]
        except _UNUSABLE as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{name} is no model of pictures that can be used: {why}") from error

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model's files."""
        return fingerprint_of(self._directory, version=2)

    def __call__(self, pictures: Sequence[bytes], /) -> Float[Tensor, "B D"]:
        keys = [
            self._keys(pictures[start : start + BATCH]) for start in range(0, len(pictures), BATCH)
        ]
        return torch.cat(keys) if keys else torch.empty(0, self.key_dim, device=self._device)

    def _keys(self, pictures: Sequence[bytes]) -> Float[Tensor, "B D"]:
        given = self._prepare(
            [_widened(_rgb(picture)) for picture in pictures],
            return_tensors="pt",
            input_data_format="channels_last",  # else it is guessed, wrongly for three rows
        )
        inputs = given["pixel_values"].to(self._device)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            if hasattr(self._model, "get_image_features"):
                found = self._model.get_image_features(pixel_values=inputs)
                found = getattr(found, "pooler_output", found)
            else:
                found = self._pooled(self._model(pixel_values=inputs).last_hidden_state)
            return torch.nn.functional.normalize(found.float(), dim=1)

    def _pooled(self, states: Float[Tensor, "B *places"]) -> Float[Tensor, "B D"]:
        if states.ndim == 4:  # channels, height, width
            return states.mean((2, 3))
        return states[:, 0] if self._has_class_token else states.mean(1)
