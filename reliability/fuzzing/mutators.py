"""Mutators that derive new inputs from known ones: bytes, JSON, CSV, PNG and safetensors.

A mutator takes a random source and an input, and returns another input; it may return the input
unchanged if it finds nothing to change. The result depends only on the input and the random source.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutator = Callable[[Random, bytes], bytes]

MAX_CASE_BYTES = 1 << 18
MAX_STACKED_MUTATIONS = 8
MAX_BLOCK_BYTES = 64
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
EDGE_BYTES = (0, 1, 9, 10, 13, 32, 34, 44, 92, 127, 128, 191, 192, 254, 255)
EDGE_INTEGERS = (
    *(0, 1, -1, 2, 3, 100, 101, 255, 256, 257, 65_536),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 10**30),
)
EDGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", " ", "\t", "a", "0", "\x00", "\x7f", "\x9f", "\ud800", "\udfff"),
    *("é", "\U0001f600", "\u202e", "\ufeff", "x" * 200, "x" * 201, "y" * 10_001),
    *([], {}, [None], [[]], {"": None}, {"__proto__": 1}),
    *(0.0, -0.0, 1.0, 0.5, 1e-320, 1e15, 1e16, 3.5e38, 1e308, -1e308, 2.5),
    *(float("nan"), float("inf"), float("-inf"), 10**400),
    *EDGE_INTEGERS,
)
JSON_TOKENS = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"0.1", b"[" * 600, b"[" * 100_000),
    *(b'{"a":' * 600, b'"\\ud800"', b'"\\u0000"', b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b","),
    *(b"{}", b"[]", b'""', b":", b'"', b"\\", b"9" * 4301, b"1" * 30, b"/**/", b"\r\n"),
)


# Bytes


def flip_bit(random: Random, data: bytes) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def change_byte(random: Random, data: bytes) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data))] = random.choice((*EDGE_BYTES, random.randrange(256)))
    return bytes(changed)


def change_word(random: Random, data: bytes) -> bytes:
    """Write an edge number of 2, 4 or 8 bytes, in either byte order."""
    size = random.choice((2, 4, 8))
    if len(data) < size:
        return data
    number = (random.choice(EDGE_INTEGERS) & ((1 << 8 * size) - 1)).to_bytes(
        size, random.choice(("little", "big"))
    )
    start = random.randrange(len(data) - size + 1)
    return data[:start] + number + data[start + size :]


def remove_block(random: Random, data: bytes) -> bytes:
    start, stop = draw_block(random, data)
    return data[:start] + data[stop:]


def duplicate_block(random: Random, data: bytes) -> bytes:
    """Repeat a block in place, mostly once but sometimes up to 256 times."""
    start, stop = draw_block(random, data)
    times = random.choice((1, 1, 1, 2, 8, 256))
    return data[:stop] + data[start:stop] * times + data[stop:]


def move_block(random: Random, data: bytes) -> bytes:
    start, stop = draw_block(random, data)
    rest = data[:start] + data[stop:]
    at = random.randrange(len(rest) + 1)
    return rest[:at] + data[start:stop] + rest[at:]


def insert_bytes(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.choice((1, 2, 4, 16))) + data[at:]


def truncate(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def change_digits(random: Random, data: bytes) -> bytes:
    """Replace a run of decimal digits by another number."""
    places = [place for place, byte in enumerate(data) if 48 <= byte < 58]
    if not places:
        return data
    start = stop = random.choice(places)
    while stop < len(data) and 48 <= data[stop] < 58:
        stop += 1
    return data[:start] + b"%d" % random.choice(EDGE_INTEGERS) + data[stop:]


BYTE_MUTATORS: tuple[Mutator, ...] = (
    *(flip_bit, change_byte, change_word, remove_block, duplicate_block, move_block),
    *(insert_bytes, truncate, change_digits),
)


def draw_block(random: Random, data: bytes) -> tuple[int, int]:
    """Return the start and end of a block, mostly a short one."""
    start = random.randrange(len(data) + 1)
    most = len(data) if random.random() < 0.1 else min(MAX_BLOCK_BYTES, len(data))
    return start, min(len(data), start + random.randrange(most + 1))


def make_token_mutator(tokens: Sequence[bytes]) -> Mutator:
    """Return a mutator that inserts one of `tokens`, or overwrites bytes with it."""

    def place_token(random: Random, data: bytes) -> bytes:
        token = random.choice(tokens)
        start = random.randrange(len(data) + 1)
        stop = start + (len(token) if random.random() < 0.5 else 0)
        return data[:start] + token + data[stop:]

    return place_token


def splice(random: Random, data: bytes, other: bytes) -> bytes:
    """Join the head of one input to the tail of another."""
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def mutate(
    random: Random,
    data: bytes,
    other: bytes,
    structured: Sequence[Mutator],
    tokens: Mutator,
    structured_share: float = 0.5,
) -> bytes:
    """Apply some mutations one after the other.

    Args:
        other: a second input to splice with.
        structured: mutators that know the format.
        tokens: mutator that inserts tokens of the format.
        structured_share: share of mutations made by `structured`.
    """
    for _ in range(random.choice((1, 1, 2, 3, MAX_STACKED_MUTATIONS))):
        if random.random() < structured_share:
            data = random.choice(structured)(random, data)
        elif (draw := random.random()) < 0.2:
            data = tokens(random, data)
        elif draw < 0.3:
            data = splice(random, data, other)
        else:
            data = random.choice(BYTE_MUTATORS)(random, data)
        data = data[:MAX_CASE_BYTES]
    return data


# JSON


def mutate_json(random: Random, data: bytes) -> bytes:
    """Change a value somewhere in a JSON document; return other inputs unchanged."""
    try:
        document = json.loads(data)
        changed = change_value(random, document)
        text = json.dumps(changed, ensure_ascii=random.random() < 0.7)
        return text.encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data


def change_value(random: Random, document: Any) -> Any:
    """Return a JSON value with one place in it changed."""
    holder = [document]
    places = list_places(holder)
    parent, key = random.choice(places)
    change = random.randrange(8)
    if change == 0 and len(places) > 1:  # copy a value from elsewhere
        other, name = random.choice(places)
        parent[key] = other[name]
    elif change == 1 and parent is not holder:
        del parent[key]
    elif change == 2:
        parent[key] = [parent[key]] * random.choice((1, 2, 17, 257))
    elif change == 3 and isinstance(parent, dict):  # misspell a name
        value = parent.pop(key)
        parent[mutate_text(random, key)] = value
    elif change == 4 and isinstance(parent[key], str):
        parent[key] = mutate_text(random, parent[key])
    elif change == 5 and isinstance(parent, list):
        parent[:] = parent * random.choice((2, 3, 9))
        del parent[300:]
    elif change == 6 and isinstance(parent[key], int | float):
        parent[key] = random.choice((*EDGE_INTEGERS, -parent[key], 0.5))
    else:
        parent[key] = random.choice(EDGE_VALUES)
    return holder[0] if holder else None


def list_places(holder: list[Any]) -> list[tuple[Any, Any]]:
    """Return every (container, key or index) below `holder`, its own item first."""
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [holder]
    while pending and len(places) < 2_000:
        container = pending.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], list | dict):
                pending.append(container[key])
    return places


def mutate_text(random: Random, text: str) -> str:
    """Change a string; a picture in base64 is mostly changed as a picture."""
    if len(text) > 32 and random.random() < 0.8:
        try:
            picture = base64.b64decode(text, validate=True)
            return base64.b64encode(mutate_png(random, picture)).decode()
        except (binascii.Error, ValueError):
            pass
    at = random.randrange(len(text) + 1)
    piece = random.choice([value for value in EDGE_VALUES if isinstance(value, str)])
    return text[:at] + piece + text[at + random.randrange(2) :]


def mutate_json_line(random: Random, data: bytes) -> bytes:
    """Change a value in one line of a JSON-lines file, or repeat or remove the line."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    change = random.random()
    if change < 0.1:
        lines.insert(at, lines[at])
    elif change < 0.2:
        del lines[at]
    else:
        lines[at] = mutate_json(random, lines[at])
    return b"\n".join(lines)


# CSV


def mutate_csv(random: Random, data: bytes) -> bytes:
    """Change rows, fields, quotes, delimiters or the encoding of a spreadsheet."""
    change = random.randrange(7)
    delimiter = random.choice((b",", b";", b"\t"))
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    fields = lines[at].split(delimiter)
    place = random.randrange(len(fields))
    if change == 0:
        lines.insert(at, lines[at])
    elif change == 1:
        fields.insert(place, fields[place])
    elif change == 2:
        del fields[place]
    elif change == 3:
        fields[place] = b'"' + fields[place].replace(b'"', b'""') + b'"'
    elif change == 4:
        fields[place] = b'"' + fields[place] + b"\n" + fields[place] + b'"'
    elif change == 5:
        return data.replace(delimiter, random.choice((b",", b";", b"\t", b"|")))
    else:
        text = data.decode("utf-8", "replace")
        return text.encode(random.choice(("utf-16", "utf-8-sig", "utf-16-le", "cp1252")), "replace")
    if change:
        lines[at] = delimiter.join(fields)
    return b"\n".join(lines)


# PNG


def mutate_png(random: Random, data: bytes) -> bytes:
    """Change the chunks of a PNG file and correct the checksums; mutate other inputs as bytes."""
    if not data.startswith(PNG_SIGNATURE):
        return random.choice(BYTE_MUTATORS)(random, data) if data else data
    chunks = split_chunks(data)
    if not chunks:
        return data
    at = random.randrange(len(chunks))
    kind, content = chunks[at]
    change = random.randrange(7)
    if change == 0:
        del chunks[at]
    elif change == 1:
        chunks.insert(at, chunks[random.randrange(len(chunks))])
    elif change == 2:
        other = random.randrange(len(chunks))
        chunks[at], chunks[other] = chunks[other], chunks[at]
    elif change == 3 and kind == b"IDAT":
        try:
            pixels = zlib.decompress(content)
            content = zlib.compress(random.choice(BYTE_MUTATORS)(random, pixels))
        except zlib.error:
            pass
        chunks[at] = kind, content
    elif change == 4 and kind == b"IHDR" and len(content) == 13:
        fields = list(struct.unpack(">IIBBBBB", content))
        field = random.randrange(7)
        top = (1 << 32 if field < 2 else 1 << 8) - 1
        small = (0, 1, 2, 3, 4, 6, 8, 16, 5000, 6000, 8000, 2**31 - 1, 2**31, top)
        fields[field] = min(random.choice(small), top)
        chunks[at] = kind, struct.pack(">IIBBBBB", *fields)
    elif change == 5:
        kinds = (b"tRNS", b"PLTE", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"acTL", b"fdAT")
        chunks.insert(at, (random.choice(kinds), random.randbytes(random.choice((0, 1, 6, 40)))))
    else:
        chunks[at] = kind, random.choice(BYTE_MUTATORS)(random, content)
    return join_chunks(chunks)


def split_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return (kind, content) of each chunk of a PNG file."""
    chunks, at = [], len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return chunks


def join_chunks(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    parts = [PNG_SIGNATURE]
    for kind, content in chunks:
        checksum = zlib.crc32(kind + content)
        parts += [struct.pack(">I", len(content)), kind, content, struct.pack(">I", checksum)]
    return b"".join(parts)


# Several parts in one input


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """Join parts, each preceded by its length in 4 bytes."""
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def unpack_parts(data: bytes) -> list[bytes]:
    """Split what `pack_parts` joined; the last part may be cut short."""
    parts, at = [], 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


def mutate_safetensors(random: Random, data: bytes) -> bytes:
    """Change the JSON header of a safetensors file; its length mostly stays correct."""
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(random, data[8 : 8 + size])
    length = len(header) if random.random() < 0.9 else random.choice(EDGE_INTEGERS) & (2**64 - 1)
    return length.to_bytes(8, "little") + header + data[8 + size :]


def make_part_mutator(mutators: Sequence[Sequence[Mutator]]) -> Mutator:
    """Return a mutator of packed parts that keeps their lengths correct.

    Args:
        mutators: for each part, the mutators that know its format; byte mutators are used, too.
    """

    def mutate_part(random: Random, data: bytes) -> bytes:
        parts = unpack_parts(data)
        if not parts:
            return data
        at = random.randrange(len(parts))
        known = mutators[min(at, len(mutators) - 1)]
        chosen = known if known and random.random() < 0.7 else BYTE_MUTATORS
        parts[at] = random.choice(chosen)(random, parts[at])
        return pack_parts(parts)

    return mutate_part


def mutate_body(random: Random, data: bytes) -> bytes:
    """Change the JSON body of a request; keep everything up to the first empty line."""
    head, line, body = data.partition(b"\n\n")
    return head + line + mutate_json(random, body)


def mutate_head(random: Random, data: bytes) -> bytes:
    """Change the part of a request before the first empty line."""
    head, line, body = data.partition(b"\n\n")
    return random.choice(BYTE_MUTATORS)(random, head) + line + body
