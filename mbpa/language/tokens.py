"""What the memory did to each token of a text, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a part of a character decodes to
MAX_PENDING = 8  # tokens that may be needed for one character
CHARACTER_TOKENS = 4  # of one byte each, in the longest character
CONTEXT_TOKENS = 8  # before a token, which may decide whether a space comes before its text


@dataclass(frozen=True)
class Origin:
    """A place in a document that the model has read, similar to the place of a token."""

    source: str
    """Name of the document."""
    position: int
    """Index of the token in the document that followed this place."""
    token: int
    """The token that followed."""
    weight: float
    """Weight of this place among the neighbours, which sum to 1."""
    distance: float
    """Euclidean distance between the states of the model here and there."""
    before: str
    """Text before the token."""
    text: str
    """Text of the token; none if it holds part of a character that a later token completes."""
    after: str
    """Text after the token."""


@dataclass(frozen=True)
class Alternative:
    """A token that could stand in place of another."""

    id: int
    """Number of the token in the vocabulary."""
    text: str
    """The text that it would add; if that is part of a character, its name in the vocabulary."""
    log_prob: float
    """Natural logarithm of its probability, with the memory."""
    is_part: bool = False
    """Whether it is part of a character."""


@dataclass(frozen=True)
class Token:
    """A token with its log-probability, with and without the memory."""

    id: int
    """Number of the token in the vocabulary."""
    text: str
    """The text that it adds."""
    log_prob: float
    """Natural logarithm of its probability, with the memory."""
    log_prob_alone: float
    """Log-probability according to the model without the memory."""
    origins: tuple[Origin, ...] = ()
    """Similar places in the memory: those followed by this token first, then by weight."""
    top: tuple[Alternative, ...] = ()
    """The most probable tokens here, the most probable first."""

    @property
    def moved(self) -> float:
        """How many nats the memory added to the log-probability."""
        return self.log_prob - self.log_prob_alone


@dataclass(frozen=True)
class Score:
    """The tokens of a text after the first, each predicted from the text before it."""

    tokens: tuple[Token, ...]
    """The tokens, without the first."""
    bytes: int = 0
    """Length of the text of these tokens in UTF-8."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability, with the memory."""
        return _perplexity([token.log_prob for token in self.tokens])

    @property
    def perplexity_alone(self) -> float:
        """The same without the memory."""
        return _perplexity([token.log_prob_alone for token in self.tokens])

    @property
    def bits_per_byte(self) -> float:
        """Bits needed to encode a byte of the text, with the memory."""
        return self._count_bits([token.log_prob for token in self.tokens])

    @property
    def bits_per_byte_alone(self) -> float:
        """The same without the memory."""
        return self._count_bits([token.log_prob_alone for token in self.tokens])

    def _count_bits(self, log_probs: Sequence[float]) -> float:
        return -math.fsum(log_probs) / math.log(2) / self.bytes if self.bytes else math.nan


@dataclass
class Generation:
    """A text that the model has written."""

    prompt: str
    """The text that was given."""
    tokens: list[Token] = field(default_factory=list)
    """The tokens that were written."""
    finish_reason: str = "length"
    """"stop" if the model ended the text or a stop string was found, "length" otherwise."""
    text: str = ""
    """The text after the prompt, up to a stop string."""


def _perplexity(log_probs: Sequence[float]) -> float:
    return math.exp(-math.fsum(log_probs) / len(log_probs)) if log_probs else math.nan


def quote(
    tokenizer: Any, tokens: Int[Tensor, "T"], at: int, before: int, after: int
) -> tuple[str, str, str]:
    """Return the text before a token, of the token, and after it, which join to the original.

    A token may hold only part of a character. Its text then comes with the token that completes it.

    Args:
        tokenizer: of the tokens.
        tokens: the whole text.
        at: index of the token.
        before: number of tokens before it, or a few more, so as not to begin within a character.
        after: number of tokens after it, likewise.
    """

    def decode(start: int, stop: int) -> str:
        ids = tokens[max(0, start) : stop].tolist()
        text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    ends = [
        (at - before - more, at + 1 + after + further)
        for more in range(CHARACTER_TOKENS)
        for further in range(CHARACTER_TOKENS)
    ]
    passages = ((start, decode(start, stop)) for start, stop in ends)
    whole = (found for found in passages if REPLACEMENT not in (found[1][0:1], found[1][-1:]))
    start, passage = next(whole, (ends[0][0], decode(*ends[0])))

    def count_characters(stop: int) -> int:
        for last in range(stop, stop - CHARACTER_TOKENS, -1):
            if passage.startswith(text := decode(start, last)):
                return len(text)
        return len(decode(start, stop).rstrip(REPLACEMENT))

    first, second = count_characters(at), count_characters(at + 1)
    return passage[:first], passage[first:second], passage[second:]


class TokenReader:
    """Turns tokens into text one by one; the pieces join to the text of all tokens.

    A token may hold only part of a character. Its text then comes with the token that completes it.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._pending = 0  # tokens whose text has not been returned
        self._text = self._decode(self._ids).rstrip(REPLACEMENT)
        self._cut()

    def read(self, token: int) -> str:
        """Return the text that this token adds."""
        self._ids.append(token)
        self._pending += 1
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and self._pending < MAX_PENDING:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Return what is left: the text of tokens that nothing completed."""
        return self._show(self._decode(self._ids)) if self._pending else ""

    def _show(self, text: str) -> str:
        piece, self._pending, self._text = text[len(self._text) :], 0, text
        self._cut()
        return piece

    def _cut(self) -> None:
        """Forget early tokens, unless what comes after would decode to something else."""
        for kept in (CONTEXT_TOKENS, 4 * CONTEXT_TOKENS):
            tail = self._ids[-kept:]
            text = self._decode(tail)
            if self._text.endswith(text) and not text.startswith(REPLACEMENT):
                self._ids, self._text = tail, text
                return

    def name(self, token: Token) -> Token:
        """Return a token with the text that it adds, and likewise what could stand in its place."""
        top = tuple(self._name_alternative(each) for each in token.top)
        return replace(token, text=self.read(token.id), top=top)

    def _name_alternative(self, alternative: Alternative) -> Alternative:
        text = self._decode([*self._ids, alternative.id])[len(self._text) :]
        if text and REPLACEMENT not in text:
            return replace(alternative, text=text)
        name = str(self._tokenizer.convert_ids_to_tokens(alternative.id))
        return replace(alternative, text=name, is_part=True)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text
