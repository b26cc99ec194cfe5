"""Reports of broken contracts, without `assert`, so that the suites work under `python -O`."""

from __future__ import annotations

LONGEST = 500


def require(holds: bool, part: str, expected: object, actual: object) -> None:
    if not holds:
        raise AssertionError(f"{part}: expected {_short(expected)}, got {_short(actual)}")


def same(part: str, expected: object, actual: object) -> None:
    if expected == actual:
        return
    is_long = len(str(expected)) > LONGEST
    if is_long and isinstance(expected, list) and isinstance(actual, list):
        pairs = enumerate(zip(expected, actual, strict=False))
        index = next((i for i, (one, other) in pairs if one != other), None)
        if index is not None:
            same(f"{part}, at index {index}", expected[index], actual[index])
    require(False, part, expected, actual)


def _short(thing: object) -> str:
    text = str(thing)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
