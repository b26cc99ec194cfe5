"""Damage as caused by disks and memory: bits, bytes, sectors, and files that end too early."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

SECTOR_BYTES = 512
PAGE_BYTES = 4096
EVERY_LENGTH_BYTES = 1 << 17  # files up to this size are cut at every length
RANDOM_LENGTHS = 1_000  # additional random lengths for larger files
MAX_DRAWS = 100  # attempts until a mutation changes something: zeroing zeros does not

Damage = Callable[[Random, bytearray], None]


def flip_bits(random: Random, data: bytearray) -> None:
    """Flip one to three bits anywhere."""
    for _ in range(random.randint(1, 3)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def change_byte(random: Random, data: bytearray) -> None:
    """Replace one byte by another value."""
    data[random.randrange(len(data))] ^= random.randrange(1, 256)


def zero_sector(random: Random, data: bytearray) -> None:
    """Overwrite one sector with zeros."""
    start, stop = draw_sector(random, data)
    data[start:stop] = bytes(stop - start)


def swap_sectors(random: Random, data: bytearray) -> None:
    """Exchange two sectors; if the last one is shorter, only as many bytes as it has."""
    first, second = draw_sector(random, data), draw_sector(random, data)
    size = min(first[1] - first[0], second[1] - second[0])
    kept = data[first[0] : first[0] + size]
    data[first[0] : first[0] + size] = data[second[0] : second[0] + size]
    data[second[0] : second[0] + size] = kept


def duplicate_sector(random: Random, data: bytearray) -> None:
    """Write a copy of one sector over another, as a misdirected write does."""
    source, target = draw_sector(random, data), draw_sector(random, data)
    size = min(source[1] - source[0], target[1] - target[0])
    data[target[0] : target[0] + size] = data[source[0] : source[0] + size]


KINDS: dict[str, Damage] = {
    "bits": flip_bits,
    "byte": change_byte,
    "zeroed sector": zero_sector,
    "swapped sectors": swap_sectors,
    "duplicated sector": duplicate_sector,
}


def draw_sector(random: Random, data: bytearray) -> tuple[int, int]:
    """Return the start and end of a sector; of half the file if it has fewer than two sectors."""
    size = min(SECTOR_BYTES, max(1, len(data) // 2))
    start = random.randrange(-(-len(data) // size)) * size
    return start, min(start + size, len(data))


def mutate_file(random: Random, data: bytes, kind: str) -> bytes:
    """Return the content after one mutation of this kind.

    It differs from the original unless none of `MAX_DRAWS` mutations changed anything.
    """
    for _ in range(MAX_DRAWS):
        changed = bytearray(data)
        KINDS[kind](random, changed)
        if changed != data:
            return bytes(changed)
    return data


def list_truncations(
    size: int,
    random: Random,
    *,
    every_length_bytes: int = EVERY_LENGTH_BYTES,
    random_lengths: int = RANDOM_LENGTHS,
) -> list[int]:
    """Return the lengths that a file of `size` bytes is cut to, in rising order.

    Files of up to `every_length_bytes` are cut at every length. Larger files are cut at every
    multiple of `SECTOR_BYTES` (and so at every page), one byte before and after it, and at
    `random_lengths` random places.
    """
    if size <= every_length_bytes:
        return list(range(size))
    edges = {edge + off for edge in range(0, size + 1, SECTOR_BYTES) for off in (-1, 0, 1)}
    edges |= {random.randrange(size) for _ in range(random_lengths)}
    return sorted(length for length in edges if 0 <= length < size)
