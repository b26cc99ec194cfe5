"""How a broken contract is told; no `assert`, so that the suites work under `python -O`."""

from __future__ import annotations


def require(holds: bool, part: str, expected: object, actual: object) -> None:
    if not holds:
        raise AssertionError(f"{part}: expected {_short(expected)}, got {_short(actual)}")


def same(part: str, expected: object, actual: object) -> None:
    require(expected == actual, part, expected, actual)


def _short(thing: object) -> str:
    text = str(thing)
    return text if len(text) <= 500 else f"{text[:500]} …"
