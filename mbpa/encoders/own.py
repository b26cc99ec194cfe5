"""Encoders of your own: any network that turns texts or pictures into keys.

`import_encoder` loads one by the name of a function in a module of yours. `wrap_encoder` checks it
and gives it the interface of an `Encoder`.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders.base import Encoder
from mbpa.encoders.pictures import encode_file, import_pillow, read_rgb

ITEMS_PER_BATCH = 32
MAX_RELATIVE_ERROR = 0.02  # between keys of the same item; rounding in bfloat16 stays below it
SKETCH_NUMBERS = 16  # per probe
PROBE_TEXTS = (
    "hello",
    "Where is my order no. 48213? It was due last Tuesday, and nobody answers the phone!",
    "the quick brown fox jumps over the lazy dog",
    "¿Dónde está mi pedido? 请问我的订单在哪里",
)
PROBE_SIDE_PIXELS = 64

OwnEncoder = Encoder[Any] | Callable[[list[Any]], Float[Tensor, "B D"]]
"""An `Encoder`; or a function, or a module of torch, that takes a list of texts or of pictures and
returns one key per item. It gets pictures as RGB images of Pillow."""


def is_own_encoder(name: str) -> bool:
    """Return whether the name of an encoder has the form MODULE:FUNCTION."""
    return (
        re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", name) is not None and not Path(name).exists()
    )


def import_encoder(name: str) -> OwnEncoder:
    """Import a module, call one of its functions without arguments, and return the result.

    Modules are found in the working directory first, as `python -m` finds them.

    Args:
        name: MODULE:FUNCTION. The function returns an encoder.

    Raises:
        ValueError: there is no such module or function, it fails, or it returns something else.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # anything may go wrong in the user's module
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(f"{module_name} {_describe_failure(error)}") from error
        raise ValueError(
            f"the encoder must be MODULE:FUNCTION, got {name!r}: there is no module {missing!r}, "
            f"neither in {os.getcwd()} nor installed"
        ) from error
    try:
        make: Any = operator.attrgetter(function_name)(module)
    except AttributeError as error:
        raise ValueError(
            f"the encoder must be MODULE:FUNCTION, got {name!r}: {module_name} has no "
            f"{function_name!r}"
        ) from error
    if not callable(make):
        raise ValueError(f"{name} must be a function, got {type(make).__name__}")
    try:
        made = make()
    except Exception as error:
        raise ValueError(
            f"{name}() {_describe_failure(error)}; it is called without arguments and must return "
            "an encoder"
        ) from error
    _require_encoder(made, f"{name}() must return")
    return made if isinstance(made, Encoder) else _Imported(name, made)


@dataclass(frozen=True)
class _Imported:
    """A function that encodes, and the name by which it was imported."""

    name: str
    function: Callable[[list[Any]], Float[Tensor, "B D"]]

    def __call__(self, items: list[Any]) -> Float[Tensor, "B D"]:
        return self.function(items)


def wrap_encoder(
    source: OwnEncoder,
    *,
    takes: Literal["texts", "images"] | None = None,
    normalizes: bool,
    name: str | None = None,
) -> Encoder[Any]:
    """Return an `Encoder` as it is, and turn a function into one.

    Args:
        source: the user's encoder. A function is called with a few texts or pictures at once.
        takes: kind of items. By default that of the `Encoder`, and texts for a function.
        normalizes: scale the keys of a function to norm 1. `mbpa teach` needs such keys; a head
            that was trained elsewhere needs them as they are.
        name: name of a function; by default its own, or that by which it was imported.

    Raises:
        ValueError: the source is not an encoder, takes other items, fails, or returns something
            other than one key per item that does not depend on the other items.
    """
    _require_encoder(source, "encoder must be")
    if isinstance(source, Encoder):
        if takes not in (None, source.takes):
            raise ValueError(f"the encoder {source.name} takes {source.takes}, not {takes}")
        return source
    if isinstance(source, _Imported):
        name, source = source.name, source.function
    elif name is None:
        kind = source if hasattr(source, "__qualname__") else type(source)
        name = f"{kind.__module__}:{kind.__qualname__}"
    return FunctionEncoder(source, name=name, takes=takes or "texts", normalizes=normalizes)


class FunctionEncoder(Encoder[Any]):
    """An encoder made of a function, or of a module of torch.

    Its fingerprint is computed from the keys of four fixed items. It matches that of any network
    with nearly the same keys, so that a run can move to a device that rounds differently. Four
    items do not tell all networks apart, so keys are not cached.

    Args:
        function: takes a list of texts, or of RGB images of Pillow, and returns their keys.
        name: name in messages and in `run.json`.
        takes: kind of items.
        normalizes: scale keys to norm 1.
    """

    can_be_cached = False

    def __init__(
        self,
        function: Callable[[list[Any]], Float[Tensor, "B D"]],
        *,
        name: str,
        takes: Literal["texts", "images"],
        normalizes: bool,
    ) -> None:
        self.name, self.takes = name, takes
        self._function, self._normalizes = function, normalizes
        self._lock = threading.Lock()  # a tokenizer must not be used by two threads at once
        probes = list(PROBE_TEXTS) if takes == "texts" else _draw_pictures()
        try:
            outputs = [self._run(each) for each in (probes, *([probe] for probe in probes))]
        except Exception as error:  # anything may go wrong in the user's function
            what = f"{name} {_describe_failure(error)}, given {len(probes)} {takes}"
            raise ValueError(what) from error
        together = self._check(outputs[0], len(probes))
        alone = torch.cat([self._check(each, 1) for each in outputs[1:]])
        self.key_dim = together.shape[1]
        if _measure_error(together.numpy(), alone.numpy()) > MAX_RELATIVE_ERROR:
            raise ValueError(
                f"the key of an item must not depend on the other items, but those of {name} do: "
                "put the network in eval mode and mask the padding"
            )
        self._sketch = _sketch_keys(together.numpy())

    @property
    def fingerprint(self) -> str:
        return self._sketch.astype("<f4").tobytes().hex()

    def matches(self, fingerprint: str) -> bool:
        try:
            saved = np.frombuffer(bytes.fromhex(fingerprint), "<f4").reshape(self._sketch.shape)
        except ValueError:
            return False
        return _measure_error(saved, self._sketch) <= MAX_RELATIVE_ERROR

    def __call__(self, items: Sequence[Any], /) -> Float[Tensor, "B D"]:
        parts = [
            items[start : start + ITEMS_PER_BATCH]
            for start in range(0, len(items), ITEMS_PER_BATCH)
        ]
        keys = [self._check(self._run(part), len(part)) for part in parts]
        return torch.cat(keys) if keys else torch.empty(0, self.key_dim)

    def _run(self, items: Sequence[Any]) -> Any:
        given = list(items) if self.takes == "texts" else [read_rgb(item) for item in items]
        with self._lock, torch.no_grad():
            return self._function(given)

    def _check(self, found: Any, count: int) -> Float[Tensor, "B D"]:
        """Return the keys that the user's function has returned for this many items."""
        if not isinstance(found, Tensor) or not found.is_floating_point():
            got = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{self.name} must return a tensor of floating dtype, got {got}")
        if found.ndim != 2 or len(found) != count or not found.shape[1]:
            raise ValueError(
                f"{self.name} must return one key per item, shape ({count}, D), "
                f"got {tuple(found.shape)}"
            )
        keys = found.detach().float().cpu()
        norms = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
        if not norms.isfinite().all() or not norms.all():
            raise ValueError(f"the keys of {self.name} must be finite and not zero")
        return torch.nn.functional.normalize(keys, dim=1) if self._normalizes else keys


def _require_encoder(found: object, what: str) -> None:
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"{what} an Encoder, or a function from texts or pictures to keys, got "
            f"{found.__name__ if isinstance(found, type) else type(found).__name__}"
        )


def _describe_failure(error: Exception) -> str:
    """Return what went wrong in the user's code, and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename and each.line]
    own = [each for each in own if not each.filename.startswith(str(Path(__file__).parent))]
    own = [each for each in own if "importlib" not in each.filename]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())}{where}"


def _draw_pictures() -> list[bytes]:
    """Return four pictures: flat grey, a gradient, a disc, and noise."""
    side = PROBE_SIDE_PIXELS
    rows, columns = np.mgrid[:side, :side] / side
    disc = ((rows - 0.5) ** 2 + (columns - 0.5) ** 2 < 0.1).astype(float)
    noise = np.random.RandomState(0).rand(side, side, 3)
    flat = np.full((side, side), 0.5)
    planes = [(flat,) * 3, (rows, columns, 1 - rows), (disc, 1 - disc, flat)]
    drawn = [*(np.stack(each, axis=2) for each in planes), noise]
    pictures = [(255 * each).astype(np.uint8) for each in drawn]
    return [encode_file(import_pillow().fromarray(each)) for each in pictures]


def _sketch_keys(keys: Float[np.ndarray, "P D"]) -> Float[np.ndarray, "P S"]:
    """Project keys to a few numbers each, which are as far apart as the keys, on average."""
    signs = np.random.RandomState(0).choice([-1.0, 1.0], (keys.shape[1], SKETCH_NUMBERS))
    projected: np.ndarray = keys @ signs / np.sqrt(SKETCH_NUMBERS)
    return projected


def _measure_error(ours: Float[np.ndarray, "P D"], others: Float[np.ndarray, "P D"]) -> float:
    """Return the largest distance between two keys of an item, relative to the larger norm."""
    norms = np.maximum(np.linalg.norm(ours, axis=1), np.linalg.norm(others, axis=1))
    return float((np.linalg.norm(ours - others, axis=1) / np.maximum(norms, 1e-30)).max())
