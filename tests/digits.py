"""Digits of MNIST as files, for the tests of pictures."""

from __future__ import annotations

import base64
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

import mbpa

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_digits(folder: Path, each: int, first: int = 0) -> dict[str, list[Path]]:
    """Write some images of each digit to a folder of its name; skip the test without MNIST."""
    from PIL import Image

    images, labels = _array("images", 16).reshape(-1, 28, 28), _array("labels", 8)
    files: dict[str, list[Path]] = {}
    for digit, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        files[name] = [folder / name / f"{number:03}.png" for number in range(each)]
        found = images[labels == digit][first : first + each]
        for path, pixels in zip(files[name], found, strict=True):
            Image.fromarray(pixels).save(path)
    return files


def in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _array(what: str, start: int) -> np.ndarray:
    root = Path(os.environ.get("MBPA_DATA") or Path(mbpa.__file__).parents[2] / "shared" / "data")
    path = root / "mnist" / f"t10k-{what}-idx{3 if what == 'images' else 1}-ubyte.gz"
    if not path.exists():
        pytest.skip("needs MNIST: python -m experiments data fetch mnist, or MBPA_DATA")
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=start)
