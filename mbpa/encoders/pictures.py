"""Files of pictures: read within limits, and converted to the small form in which they are stored.

A picture is stored, shown and embedded in the form that `standardize` returns, so embedding it
again gives the same key. Needs the extra `images`.
"""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from mbpa.errors import MissingExtraError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # few: each decoder is exposed to strangers
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # of files in these formats
MAX_PIXELS = 32_000_000  # of a picture received in a request
MAX_RECEIVED_SIDE_PIXELS = 65_535  # the limit of JPEG; longer strips take seconds to shrink
MAX_STORED_SIDE_PIXELS = 512  # width and height of a stored picture
MAX_LOSSLESS_PIXELS = 128 * 128  # larger pictures are stored as JPEG
_EXPECTED_FORM = "a picture must have the form that mbpa.encoders.pictures.standardize returns"
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


def standardize(data: bytes, *, max_pixels: int = MAX_PIXELS) -> bytes:
    """Return a picture in the form in which it is stored.

    It is upright, grey or RGB, on white where it was transparent, without metadata, and at most
    `MAX_STORED_SIDE_PIXELS` wide and high. Small pictures are PNG files, others JPEG.

    Args:
        data: a file in one of `FORMATS`; of an animation, the first frame is used.
        max_pixels: maximum number of pixels.

    Raises:
        PictureError: the file is not a picture, or has too many pixels. The number of pixels is
            checked before any is decoded.
    """
    module = import_pillow()
    try:
        with module.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > max_pixels:
                raise _describe_too_large(max_pixels)
            if max(opened.size) > MAX_RECEIVED_SIDE_PIXELS:
                raise PictureError(
                    f"a picture must have at most {MAX_RECEIVED_SIDE_PIXELS:,} pixels per side"
                )
            return encode_file(_shrink(opened, MAX_STORED_SIDE_PIXELS))
    except PictureError:
        raise
    except (module.DecompressionBombError, module.DecompressionBombWarning) as error:
        raise _describe_too_large(max_pixels) from error
    except module.UnidentifiedImageError as error:
        known = ", ".join(FORMATS[:-1])
        raise PictureError(f"a picture must be a {known} or {FORMATS[-1]} file") from error
    except Exception as error:  # damaged files raise almost anything in Pillow
        why = " ".join(str(error).split())[:100]
        raise PictureError(f"a picture cannot be read: {why or type(error).__name__}") from error


def require_standard_form(picture: bytes) -> None:
    """Raise `PictureError` unless a file has the form that `standardize` returns.

    The file must consist of the same parts as one that `standardize` writes. Its compressed data
    must contain all pixels, and at most 8 bytes may follow them. The compression itself is not
    compared, since it depends on the version of Pillow.
    """
    module = import_pillow()
    try:
        with module.open(io.BytesIO(picture), formats=("PNG", "JPEG")) as opened:
            format, mode, size = opened.format, opened.mode, opened.size
    except Exception as error:  # damaged files raise almost anything in Pillow
        raise PictureError(f"{_EXPECTED_FORM}, got no readable PNG or JPEG file") from error
    shown = f"{size[0]} × {size[1]} pixels"
    if max(size) > MAX_STORED_SIDE_PIXELS:
        raise PictureError(f"{_EXPECTED_FORM}, got one of {shown}")
    if mode not in ("L", "RGB"):
        raise PictureError(
            f"{_EXPECTED_FORM}, grey or RGB with 8 bits per channel, got mode {mode!r}"
        )
    blank = encode_file(module.new(mode, size))
    if get_media_type(blank) != get_media_type(picture):
        raise PictureError(f"{_EXPECTED_FORM}, got a {format} file of {shown}")
    if format == "PNG":
        _require_plain_png(picture, blank, row_bytes=size[0] * len(mode) + 1, rows=size[1])
    else:
        _require_plain_jpeg(picture, blank)


def count_pixels(data: bytes) -> int:
    """Return the number of pixels according to the file's header; 0 if it cannot be read."""
    try:
        with import_pillow().open(io.BytesIO(data), formats=FORMATS) as opened:
            return int(opened.width * opened.height)
    except Exception:  # `standardize` reports what is wrong
        return 0


def make_thumbnail(picture: bytes, side: int = 96) -> bytes:
    """Return a smaller version of a standardized file, at most `side` pixels wide and high."""
    with import_pillow().open(io.BytesIO(picture), formats=FORMATS) as opened:
        return picture if max(opened.size) <= side else encode_file(_shrink(opened, side))


def get_media_type(picture: bytes) -> str:
    """Return the media type of a standardized file."""
    return "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg"


def _shrink(opened: Image.Image, side: int) -> Image.Image:
    module = import_pillow()
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
    module, levels = import_pillow(), np.asarray(opened)
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


def encode_file(picture: Image.Image) -> bytes:
    """Return a picture as a file without metadata."""
    clean = import_pillow().frombytes(picture.mode, picture.size, picture.tobytes())
    file = io.BytesIO()
    if clean.width * clean.height <= MAX_LOSSLESS_PIXELS:
        clean.save(file, "PNG", compress_level=9)
    else:
        clean.save(file, "JPEG", quality=90)
    return file.getvalue()


def _require_plain_png(picture: bytes, blank: bytes, row_bytes: int, rows: int) -> None:
    """Raise unless the file is just the header of a blank picture, the pixels, and the end."""
    if not picture.startswith(blank[:_PNG_HEADER_BYTES]):
        raise PictureError(f"{_EXPECTED_FORM}, got a PNG file of another kind")
    at, compressed = _PNG_HEADER_BYTES, b""
    while picture[at + 4 : at + 8] == b"IDAT":
        stop = at + 8 + int.from_bytes(picture[at : at + 4])
        if picture[stop : stop + 4] != zlib.crc32(picture[at + 4 : stop]).to_bytes(4):
            raise _describe_damage()
        compressed += picture[at + 8 : stop]
        at = stop + 4
    if picture[at:] != _PNG_END:
        raise _describe_extra_data() if _PNG_END in picture else _describe_damage()
    unpacking = zlib.decompressobj()
    try:
        pixels = unpacking.decompress(compressed, row_bytes * rows + 1)
    except zlib.error as error:
        raise _describe_damage() from error
    is_whole = unpacking.eof and len(pixels) == row_bytes * rows
    if not is_whole or max(pixels[::row_bytes]) > _PNG_LAST_FILTER:
        raise _describe_damage()
    if unpacking.unused_data:
        raise _describe_extra_data()


def _require_plain_jpeg(picture: bytes, blank: bytes) -> None:
    """Raise unless the file is just the segments of a blank picture, the pixels, and the end."""
    (segments, start), (expected, _) = _read_segments(picture), _read_segments(blank)
    if segments != expected:
        extra = {marker for marker, *_ in set(segments) - set(expected)}
        if extra & _JPEG_NOTES:
            raise _describe_extra_data()
        raise PictureError(f"{_EXPECTED_FORM}, got a JPEG file of another kind")
    stop = len(picture) - len(_JPEG_END)
    if not picture.endswith(_JPEG_END):
        raise _describe_extra_data() if _JPEG_END in picture[start:] else _describe_damage()
    data = picture[start:stop]
    if data.count(b"\xff") != data.count(b"\xff\0"):  # a marker among the pixels
        raise _describe_extra_data()
    # The decoder reads about 8 bytes ahead, so the filler must be at least that long to matter.
    first, second = (_decode_jpeg(picture[:stop] + each) for each in _JPEG_FILLERS)
    if first is None or first != second:  # it needed more data than there is
        raise _describe_damage()
    if _decode_jpeg(picture[: stop - 1]) is not None:  # it needed less data
        raise _describe_extra_data()


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
        with import_pillow().open(_UnfinishedFile(jpeg), formats=("JPEG",)) as opened:
            pixels: bytes = opened.tobytes()
    except Exception:  # damaged files raise almost anything in Pillow
        return None
    return pixels


def _describe_damage() -> PictureError:
    return PictureError(f"{_EXPECTED_FORM}, got a file that is damaged or incomplete")


def _describe_extra_data() -> PictureError:
    return PictureError(f"{_EXPECTED_FORM}, got one with metadata or other data beside the pixels")


def _describe_too_large(most: int) -> PictureError:
    return PictureError(f"a picture must have at most {most:,} pixels")


def import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", extra="images") from error
    return Image


def read_rgb(picture: bytes) -> Image.Image:
    with import_pillow().open(io.BytesIO(picture), formats=FORMATS) as opened:
        found: Image.Image = opened.convert("RGB")
    return found
