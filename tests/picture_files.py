"""Files of pictures, good and bad ones."""

from __future__ import annotations

import io
import struct
import zlib


def file_of(picture, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + check


def png(size: tuple[int, int], bits: int, colours: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG file of these rows, with these chunks before them."""
    header = struct.pack(">IIBBBBB", *size, bits, colours, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(rows)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def png_of(width: int, height: int) -> bytes:
    """The beginning of a file that says to be so large."""
    return png((width, height), 8, 2, b"\0" * 100_000)
