"""Reports of broken contracts, without `assert`, so that the suites work under `python -O`."""

from __future__ import annotations

MAX_CHARACTERS = 500


def require(holds: bool, part: str, expected: object, actual: object) -> None:
    if not holds:
        raise AssertionError(f"{part}: expected {_shorten(expected)}, got {_shorten(actual)}")


def require_same(part: str, expected: object, actual: object) -> None:
    if expected == actual:
        return
    is_long = len(str(expected)) > MAX_CHARACTERS
    if is_long and isinstance(expected, list) and isinstance(actual, list):
        pairs = enumerate(zip(expected, actual, strict=False))
        index = next((i for i, (one, other) in pairs if one != other), None)
        if index is not None:
            require_same(f"{part}, at index {index}", expected[index], actual[index])
    require(False, part, expected, actual)


def _shorten(thing: object) -> str:
    text = str(thing)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"
