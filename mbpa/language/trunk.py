"""The part of a language model before its output layer: from texts to states."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mbpa.language.pretrained import check_causal, digest_model, load_pretrained, run_trunk
from mbpa.language.windows import group_windows, plan_windows

WINDOW, CONTEXT = 2048, 512
WINDOWS_PER_BATCH = {"cpu": 1, "cuda": 8}

Progress = Callable[[int, int], None]


class Trunk:
    """A causal language model and its tokenizer, which turn texts into states.

    Args:
        model: a model from transformers, or the name or folder of one; `None` for the default.
        tokenizer: its tokenizer, if `model` is not a name.
        window: the most tokens that the model sees at a time.
        context: by how many tokens windows overlap.
        device: device for a model that is given by name.
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str] | None,
        tokenizer: Any,
        *,
        window: int | None,
        context: int | None,
        device: str | torch.device | None,
    ) -> None:
        if isinstance(model, nn.Module) != (tokenizer is not None):
            raise ValueError("a model needs a tokenizer, the name of a model must come without one")
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.name: str | None = ""
        """Name or folder; `None` for the default model, "" if it was given as such."""
        if not isinstance(model, nn.Module):
            self.name = None if model is None else _make_absolute(os.fspath(model))
            self.model, self.tokenizer = load_pretrained(self.name, device=device)
        check_causal(self.model)
        self.output_layer: nn.Linear = self.model.get_output_embeddings()
        self.device: torch.device = self.output_layer.weight.device
        self.longest_text: int = _find_longest_text(self.model)
        self.window: int = min(window or WINDOW, self.longest_text)
        self.context: int = min(CONTEXT, self.window // 4) if context is None else context
        plan_windows(1, self.window, self.context)  # raises if they do not fit
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """A digest of the model's weights and its tokenizer."""
        if self._digest is None:
            self._digest = digest_model(self.model, self.tokenizer)
        return self._digest

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens with which the model ends a text."""
        config = getattr(self.model, "generation_config", None)
        ids = getattr(config, "eos_token_id", None)
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    @property
    def pad_token(self) -> int:
        """A token that fills up short prompts; any will do, since it is masked."""
        known: int | None = self.tokenizer.pad_token_id
        return known if known is not None else min(self.end_tokens, default=0)

    def tokenize(self, text: str | Sequence[int] | Int[Tensor, "T"]) -> Int[Tensor, "T"]:
        """Return the token ids of a text; ids are checked and returned."""
        if isinstance(text, str):
            if not is_valid_text(text):
                raise ValueError("text must be valid Unicode, got lone surrogates")
            text = self.tokenizer(text, truncation=False, verbose=False)["input_ids"]
        tokens = torch.as_tensor(text) if len(text) else torch.empty(0, dtype=torch.int64)
        if tokens.ndim != 1 or tokens.is_floating_point():
            raise ValueError(f"token ids must be whole numbers in a row, got {tokens.shape}")
        size = self.output_layer.out_features
        wrong = tokens[(tokens < 0) | (tokens >= size)]
        if len(wrong):
            raise ValueError(f"token ids must be from 0 to {size - 1}, got {int(wrong[0])}")
        return tokens.to("cpu", torch.int32)

    def embed(
        self, tokens: Int[Tensor, "T"], progress: Progress | None = None
    ) -> Float[Tensor, "T D"]:
        """Return the state of the model after each token.

        Args:
            tokens: the text.
            progress: called with the number of tokens read so far, and of all tokens.
        """
        windows = plan_windows(len(tokens), self.window, self.context)
        size = WINDOWS_PER_BATCH["cuda" if self.device.type == "cuda" else "cpu"]
        parts, done = [], 0
        for batch in group_windows(windows, size):
            ids = torch.stack([tokens[each.start : each.stop] for each in batch])
            ids = ids.to(self.device, torch.int64)
            states, _ = run_trunk(self.model, ids, use_cache=False)
            parts += [
                row[each.first - each.start :] for row, each in zip(states, batch, strict=True)
            ]
            done += sum(each.stop - each.first for each in batch)
            if progress is not None:
                progress(done, len(tokens))
        return torch.cat(parts)


def _make_absolute(name: str) -> str:
    """Return a folder such that it is found from any working directory, and a name as it is."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def _find_longest_text(model: Any) -> int:
    config = model.config
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if isinstance(longest := getattr(config, name, None), int) and longest > 0:
            return longest
    return WINDOW


def is_valid_text(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
