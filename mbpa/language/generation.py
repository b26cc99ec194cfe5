"""Writing with a language model and its memory: transformers generates, we take notes.

Each step runs the model on one token per prompt, with a key-value cache, and adapts the output
layer to the neighbours of the new state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mbpa.language.adapted_model import share_with_adapted_outputs
from mbpa.language.tokens import Generation, Token, TokenReader
from mbpa.memory import validation

LEAST_TEMPERATURE = 1e-3  # below, the most probable token is taken

if TYPE_CHECKING:
    from mbpa.language.memory_lm import MemoryLM
    from mbpa.language.prediction import Prediction


def generate(
    lm: MemoryLM,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 50,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    seed: int | None = None,
    origins: int = 0,
    top: int = 0,
    on_token: Callable[[int, Token], bool | None] | None = None,
) -> list[Generation]:
    """Write on from each prompt.

    Args:
        lm: the model and its memory.
        prompts: texts, or token ids, from which to write on.
        max_new_tokens: the most tokens to write.
        temperature: 0 takes the most probable token. Otherwise tokens are drawn from probabilities
            to the power of 1 / temperature.
        top_p: draw from the most probable tokens whose probabilities sum to this.
        top_k: draw from this many most probable tokens; 0 means all.
        stop: texts before which to stop.
        seed: makes drawing repeatable.
        origins: similar places in the memory to return for each token.
        top: how many of the most probable tokens to return in place of each token.
        on_token: called with the index of the prompt and each new token; if it returns true, no
            further token is written for this prompt.
    """
    _check_settings(prompts, temperature, top_p, stop, seed)
    max_new_tokens = validation.count("max_new_tokens", max_new_tokens)
    top_k, top = (
        validation.count(name, given, least=0) for name, given in (("top_k", top_k), ("top", top))
    )
    ids = [_encode_prompt(lm, prompt) for prompt in prompts]
    longest = max(len(row) for row in ids)
    if not min(len(row) for row in ids):
        raise ValueError("prompt must have at least one token, got an empty one")
    if longest + max_new_tokens > lm.longest_text:
        raise ValueError(
            f"prompt and new tokens must together be at most {lm.longest_text} tokens, "
            f"got {longest} and {max_new_tokens}"
        )
    padded, mask = _pad_left(ids, lm.pad_token)
    writer = _Writer(lm, ids, stop, origins, top, on_token)
    predict = partial(lm.predict, want_weights=origins > 0)
    model = share_with_adapted_outputs(lm.model, lm.output_layer, predict, writer.watch)
    drawing: dict[str, Any] = {}
    if temperature >= LEAST_TEMPERATURE:
        drawing = {"temperature": float(temperature), "top_p": float(top_p), "top_k": top_k}
    device = lm.memory.device
    # Transformers fills in what a config leaves out from the model's own: penalties, beams.
    model.generation_config = config = _make_config(lm, max_new_tokens, drawing)
    with lm.hold(), torch.random.fork_rng(_list_devices(device), enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model.generate(
            padded.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            stopping_criteria=[writer],
        )
    return writer.finish()


class _Writer:
    """Takes notes on each token that transformers chooses, and says when to stop."""

    def __init__(
        self,
        lm: MemoryLM,
        prompts: Sequence[Sequence[int]],
        stop: Sequence[str],
        origins: int,
        top: int,
        on_token: Callable[[int, Token], bool | None] | None,
    ) -> None:
        self._lm, self._stop, self._on_token = lm, tuple(stop), on_token
        self._origins, self._top = origins, top
        self._written = [Generation(prompt=lm.tokenizer.decode(list(ids))) for ids in prompts]
        self._readers = [TokenReader(lm.tokenizer, ids) for ids in prompts]
        self._is_done = [False] * len(prompts)
        self._last: Prediction | None = None

    def watch(self, prediction: Prediction) -> None:
        self._last = prediction

    def __call__(
        self, input_ids: Int[Tensor, "B T"], scores: Any, **kwargs: Any
    ) -> Bool[Tensor, "B"]:
        assert self._last is not None
        # The output layer may have run on the whole prompt: the last rows are the newest.
        tokens, prediction = input_ids[:, -1].tolist(), self._last
        if len(prediction.adapted) != len(tokens):
            prediction = _take_last(prediction, len(tokens))
        described = self._lm.describe(prediction, tokens, self._origins, self._top)
        for index, token in enumerate(described):
            if not self._is_done[index]:
                self._take(index, token)
        return torch.tensor(self._is_done, device=input_ids.device)

    def _take(self, index: int, token: Token) -> None:
        written = self._written[index]
        if token.id in self._lm.end_tokens:
            written.finish_reason, self._is_done[index] = "stop", True
            return
        token = self._readers[index].name(token)
        written.tokens.append(token)
        written.text += token.text
        places = [at for text in self._stop if (at := written.text.find(text)) >= 0]
        if places:
            written.text = written.text[: min(places)]
            written.finish_reason, self._is_done[index] = "stop", True
        if self._on_token is not None and self._on_token(index, token):
            self._is_done[index] = True

    def finish(self) -> list[Generation]:
        """Return what was written, with the text of tokens that nothing completed."""
        for written, reader in zip(self._written, self._readers, strict=True):
            if written.tokens and written.finish_reason != "stop" and (left := reader.flush()):
                last = written.tokens[-1]
                written.tokens[-1] = replace(last, text=last.text + left)
                written.text += left
        return self._written


def _check_settings(
    prompts: Sequence[Any],
    temperature: float,
    top_p: float,
    stop: Sequence[str],
    seed: int | None,
) -> None:
    if not prompts:
        raise ValueError("there must be at least one prompt, got none")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number from 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop must be a list of texts that are not empty, got {stop!r}")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed}")


def _encode_prompt(lm: MemoryLM, prompt: str | Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, without the end that some tokenizers add to a text."""
    ids = lm.encode(prompt)
    if isinstance(prompt, str) and len(ids) > 1 and ids[-1] in lm.end_tokens:
        plain: list[int] = lm.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids[:-1] if not plain or plain[-1] != ids[-1] else ids
    return ids


def _make_config(lm: MemoryLM, max_new_tokens: int, drawing: dict[str, Any]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=bool(drawing),
        pad_token_id=lm.pad_token,
        eos_token_id=sorted(lm.end_tokens) or None,
        **drawing,
    )


def _pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Int[Tensor, "B T"], Tensor]:
    longest = max(map(len, rows))
    padded = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return padded, mask


def _take_last(prediction: Prediction, batch: int) -> Prediction:
    length = len(prediction.adapted) // batch
    rows = torch.arange(length - 1, length * batch, length, device=prediction.adapted.device)
    neighbors = prediction.neighbors
    return replace(
        prediction,
        alone=prediction.alone[rows],
        adapted=prediction.adapted[rows],
        neighbors=None if neighbors is None else neighbors.rows(rows),
        weights=None if prediction.weights is None else prediction.weights[rows],
    )


def _list_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
