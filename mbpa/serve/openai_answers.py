"""Answers in the form of OpenAI's protocol, whole or in pieces."""

from __future__ import annotations

import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mbpa.language import Generation, Token

SMALLEST_LOG_PROB = -9999.0  # JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass
class Piece:
    """A part of the text of one choice, with its tokens."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    offset: int = 0
    """Characters of the choice before it."""


class TextPieces:
    """Cuts the text of one choice into pieces that can be sent.

    Text that may be the start of a stop string is held back.

    Args:
        stop: the stop strings.
        offset: characters that were sent before the text.
    """

    def __init__(self, stop: Sequence[str], offset: int = 0) -> None:
        self._stop, self._offset = stop, offset
        self._text, self._sent = "", 0
        self._waiting: list[tuple[int, Token]] = []

    def add(self, token: Token) -> Piece:
        """Return what can be sent now that a token was written."""
        self._waiting.append((len(self._text), token))
        self._text += token.text
        places = [at for stop in self._stop if (at := self._text.find(stop, self._sent)) >= 0]
        return self._take(min(places) if places else len(self._text) - self._count_held())

    def finish(self, written: Generation) -> Piece:
        """Return the rest of what was written, whose text ends before a stop string."""
        end = len(written.text)
        if end < len(self._text):
            return self._take(end)
        if end > len(self._text):  # it ends in a character that no token completed
            self._text = written.text
            self._waiting[-1] = self._waiting[-1][0], written.tokens[-1]
        rest = self._take(end)
        rest.tokens += [token for _, token in self._waiting]  # which add no text
        return rest

    def _count_held(self) -> int:
        """Return how many of the last characters may be the start of a stop string."""
        for length in range(max(map(len, self._stop), default=1) - 1, 0, -1):
            tail = self._text[-length:]
            if len(tail) == length and any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _take(self, end: int) -> Piece:
        piece = Piece(self._text[self._sent : end], offset=self._offset + self._sent)
        while self._waiting and self._waiting[0][0] < end:
            piece.tokens.append(self._waiting.pop(0)[1])
        self._sent = max(self._sent, end)
        return piece


def cut_at_stop(written: Generation, stop: Sequence[str], offset: int = 0) -> Piece:
    """Return the text of a choice and its tokens up to a stop string."""
    pieces = TextPieces(stop, offset)
    parts = [*(pieces.add(token) for token in written.tokens), pieces.finish(written)]
    tokens = [token for part in parts for token in part.tokens]
    return Piece(written.text, tokens, offset)


class Answer(ABC):
    """The answer to one request.

    Args:
        model: name of the model.
        fingerprint: what the answer depends on besides the request.
        top: return log-probabilities, and those of so many of the most probable tokens; `None`:
            return none.
        describes_memory: return what the memory did to each token.
    """

    prefix: str

    def __init__(
        self, model: str, fingerprint: str, top: int | None, describes_memory: bool
    ) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.top, self._describes_memory = top, describes_memory

    def make_whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> bytes:
        """Return a whole answer."""
        whole = {**self._head, "object": self._name_object(False), "choices": choices}
        return json.dumps({**whole, "usage": usage}, allow_nan=False).encode()

    def make_event(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None, wants_usage: bool
    ) -> bytes:
        """Return one event of a stream."""
        chunk: dict[str, Any] = {
            **self._head,
            "object": self._name_object(True),
            "choices": choices,
        }
        if wants_usage:
            chunk["usage"] = usage
        return make_event(chunk)

    def make_choice(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        return self._add_details(self._wrap_text(piece.text), index, piece, finish_reason)

    def make_delta(self, index: int, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        """Return a part of a choice, for a stream."""
        return self._add_details(self._wrap_part(piece.text), index, piece, finish_reason)

    def start_stream(self, count: int) -> list[dict[str, Any]]:
        """Return what comes first in a stream of `count` choices."""
        return []

    def _add_details(
        self, wrapped: dict[str, Any], index: int, piece: Piece, finish_reason: str | None
    ) -> dict[str, Any]:
        shows_tokens = self.top is not None and (piece.tokens or finish_reason is None)
        choice = {
            "index": index,
            **wrapped,
            "logprobs": self._list_log_probs(piece) if shows_tokens else None,
            "finish_reason": finish_reason,
        }
        if self._describes_memory:
            tokens = [describe_token(token) for token in piece.tokens if _is_scored(token)]
            choice["mbpa"] = {"tokens": tokens}
        return choice

    @abstractmethod
    def _name_object(self, is_chunk: bool) -> str: ...

    @abstractmethod
    def _wrap_text(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _wrap_part(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _list_log_probs(self, piece: Piece) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    prefix = "cmpl"

    def _name_object(self, is_chunk: bool) -> str:
        return "text_completion"

    def _wrap_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _wrap_part = _wrap_text

    def _list_log_probs(self, piece: Piece) -> dict[str, Any]:
        offsets, at = [], piece.offset
        for token in piece.tokens:
            offsets.append(at)
            at += len(token.text)
        return {
            "tokens": [token.text for token in piece.tokens],
            "token_logprobs": [
                _limit(token.log_prob) if _is_scored(token) else None for token in piece.tokens
            ],
            "top_logprobs": [self._list_top(token) for token in piece.tokens] if self.top else None,
            "text_offset": offsets,
        }

    def _list_top(self, token: Token) -> dict[str, float] | None:
        if not _is_scored(token):
            return None
        found: dict[str, float] = {}
        for each in token.top:
            text = token.text if each.id == token.id else each.text
            found.setdefault(text, _limit(each.log_prob))
        found.setdefault(token.text, _limit(token.log_prob))
        return found


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    prefix = "chatcmpl"

    def start_stream(self, count: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(count)
        ]

    def _name_object(self, is_chunk: bool) -> str:
        return "chat.completion.chunk" if is_chunk else "chat.completion"

    def _wrap_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _wrap_part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _list_log_probs(self, piece: Piece) -> dict[str, Any]:
        content = [
            {
                **_describe_for_chat(token.text, token.log_prob),
                "top_logprobs": [
                    _describe_for_chat(token.text, each.log_prob)
                    if each.id == token.id
                    else _describe_for_chat(each.text, each.log_prob, each.is_part)
                    for each in token.top
                ],
            }
            for token in piece.tokens
        ]
        return {"content": content, "refusal": None}


def make_event(content: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"


def count_usage(prompts: Sequence[Sequence[int]], written: Sequence[Generation]) -> dict[str, int]:
    """Return the counts of tokens in each different prompt and in all that was written."""
    read, wrote = sum(map(len, prompts)), sum(len(each.tokens) for each in written)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def describe_token(token: Token) -> dict[str, Any]:
    """Return what the memory did to a token."""
    after, before = _limit(token.log_prob), _limit(token.log_prob_alone)
    return {
        "id": token.id,
        "text": token.text,
        "log_prob": after,
        "log_prob_alone": before,
        "moved": after - before,
        "origins": [asdict(origin) for origin in token.origins],
    }


def _describe_for_chat(text: str, log_prob: float, is_part: bool = False) -> dict[str, Any]:
    content = None if is_part else list(text.encode())
    return {"token": text, "logprob": _limit(log_prob), "bytes": content}


def _is_scored(token: Token) -> bool:
    """Return whether something came before the token, from which it could be predicted."""
    return not math.isnan(token.log_prob)


def _limit(log_prob: float) -> float:
    return max(log_prob, SMALLEST_LOG_PROB) if log_prob == log_prob else SMALLEST_LOG_PROB
