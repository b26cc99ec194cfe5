"""A language model with a memory, together with its queues.

One thread uses the memory: it writes, scores, stores and forgets, one after the other. Storing and
forgetting take milliseconds and go first. Another thread runs the model on documents to be learnt,
so that answers continue meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge

from mbpa.language import Generation, MemoryLM, Score, SourceInfo, Token
from mbpa.language.document_memory import Reading
from mbpa.language.pretrained import DEFAULT_MODEL
from mbpa.serve.middleware import HttpMetrics
from mbpa.serve.model_thread import Job, ModelThread
from mbpa.serve.settings import LanguageSettings

ResultT = TypeVar("ResultT")
TOKENS_PER_BATCH, ROWS_PER_BATCH = 16_384, 16  # of prompts that are continued together
SMALLEST_TEMPERATURE = 1e-3  # below, drawing is the same as taking the most probable token


class StorageError(Exception):
    """A document could not be stored or removed on disk; the memory is as before."""


class UnknownSourceError(Exception):
    """There is no document of this name in the memory."""


@dataclass(frozen=True)
class WritingTask:
    """Prompts to continue, one per choice, and how."""

    prompts: Sequence[list[int]]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int | None
    origins: int = 0
    top: int = 0
    scores_prompts: bool = False
    """Also score the prompts, for an answer that repeats them."""


@dataclass(frozen=True)
class Written:
    """What was written for each prompt."""

    generations: list[Generation]
    prompts: list[list[Token]]
    """Tokens of the prompts, if they were scored; the first has NaN for a log-probability."""


class LanguageMetrics(HttpMetrics):
    """The metrics of a language run."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.written = Counter("mbpa_tokens_written", "Tokens written", registry=registry)
        self.read = Counter("mbpa_tokens_read", "Tokens of documents learnt", registry=registry)
        self.entries = Gauge("mbpa_entries", "Tokens in the memory", registry=registry)
        self.sources = Gauge("mbpa_sources", "Documents in the memory", registry=registry)
        self.waiting = Gauge("mbpa_waiting", "Requests waiting for the model", registry=registry)
        self.waiting_documents = Gauge(
            "mbpa_waiting_documents", "Documents waiting to be learnt", registry=registry
        )
        self.read_only = Gauge(
            "mbpa_read_only",
            "1 if the last document could not be stored, else 0",
            registry=registry,
        )


class LanguageService:
    """A language model with a memory, together with its queues and metrics.

    Args:
        lm: the model; while the service runs, nobody else may change its memory.
        settings: limits.
    """

    def __init__(self, lm: MemoryLM, settings: LanguageSettings) -> None:
        self.lm, self.settings = lm, settings
        self.name = _name_model(lm)
        self.fingerprint = f"mbpa-{lm.digest[:12]}"
        self.write_error: str | None = None
        """Why the last document could not be stored or removed; `None` if it could."""
        self._model = ModelThread(settings.waiting_requests, "mbpa-model")
        self._reader = ModelThread(settings.waiting_documents, "mbpa-reader")
        longest_token = max(map(len, lm.tokenizer.get_vocab()), default=1)
        self.max_prompt_characters = lm.longest_text * longest_token
        # Kept here, since the model's lock is held while it writes.
        self.sources: list[SourceInfo] = []
        self.entries = 0
        self.metrics = LanguageMetrics()
        self.metrics.entries.set_function(lambda: self.entries)
        self.metrics.sources.set_function(lambda: len(self.sources))
        self.metrics.waiting.set_function(lambda: self._model.waiting)
        self.metrics.waiting_documents.set_function(lambda: self._reader.waiting)
        self.metrics.read_only.set_function(lambda: self.write_error is not None)
        self._note_sources()

    def start(self) -> None:
        """Start the threads; call this from the event loop that will make the requests."""
        self._model.start()
        self._reader.start()

    async def stop(self) -> None:
        """End what is running, then the threads."""
        await self._reader.stop()
        await self._model.stop()

    def end_all(self) -> None:
        """End all work that has begun or waits; those who await it get `Ended`. From any thread."""
        self._reader.end_all()
        self._model.end_all()

    async def encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        """Return the token ids of texts; the options are the tokenizer's."""

        def encode() -> list[list[int]]:
            if not options:
                return [self.lm.encode(text) for text in texts]
            found = self.lm.tokenizer(list(texts), truncation=False, verbose=False, **options)
            ids: list[list[int]] = found["input_ids"]
            return ids

        return await asyncio.to_thread(encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self.lm.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def write(
        self, task: WritingTask, on_token: Callable[[int, Token], None] | None = None
    ) -> Job[Written]:
        """Begin to write on from prompts.

        Args:
            task: the prompts, and how to continue.
            on_token: called in the event loop with the index of the prompt and each new token.

        Raises:
            Overloaded: too many requests are waiting.
        """
        loop = asyncio.get_running_loop()

        def send(index: int, token: Token) -> None:
            if on_token is not None:
                loop.call_soon_threadsafe(on_token, index, token)

        return self._model.submit(lambda job: self._write(task, job, send))

    def end(self, job: Job[Any]) -> None:
        """End a job of which nobody wants the result."""
        self._model.end(job)

    async def finish(self, job: Job[ResultT]) -> ResultT:
        """Await a job, and end it if the caller is cancelled."""
        try:
            return await job.answered
        finally:
            self.end(job)

    async def score(self, ids: list[int], origins: int) -> Score:
        """Score a text, with similar places for each token."""
        job = self._model.submit(
            lambda job: self.lm.explain(ids, origins=origins, progress=lambda *_: job.check())
        )
        return await self.finish(job)

    async def learn(self, text: str, source: str) -> SourceInfo:
        """Read a document; on return it is on disk, and all later answers use it.

        Raises:
            ValueError: the text is too short, or the memory has no room for it.
            StorageError: it could not be stored.
        """
        reading = self._reader.submit(
            lambda job: self.lm.prepare(text, source=source, progress=lambda *_: job.check())
        )
        try:
            prepared = await reading.answered
        finally:
            self._reader.end(reading)
        stored = self._model.submit(lambda job: self._store(prepared), is_urgent=True)
        return await self.finish(stored)

    async def forget(self, source: str) -> None:
        """Forget a document, in the memory and on disk.

        Raises:
            UnknownSourceError: there is none of this name.
            StorageError: it could not be removed.
        """
        await self.finish(self._model.submit(lambda job: self._forget(source), is_urgent=True))

    # In the thread of the model

    def _write(
        self, task: WritingTask, job: Job[Any], send: Callable[[int, Token], None]
    ) -> Written:
        prompts: list[list[Token]] = []
        if task.scores_prompts:
            prompts = [self._score_prompt(ids, task, job) for ids in task.prompts]
        written: list[Generation] = []
        seed = secrets.randbits(62) if task.seed is None else task.seed
        for group in _group_prompts(task) if task.max_new_tokens else []:
            first = len(written)

            def take(index: int, token: Token, first: int = first) -> bool:
                send(first + index, token)
                return job.is_ended

            temperature = task.temperature if task.top_p else 0.0
            written += self.lm.generate(
                group,
                max_new_tokens=task.max_new_tokens,
                temperature=temperature if temperature >= SMALLEST_TEMPERATURE else 0.0,
                top_p=task.top_p or 1.0,
                stop=task.stop,
                seed=_wrap_seed(seed + first),
                origins=task.origins,
                top=task.top,
                on_token=take,
            )
            self.metrics.written.inc(sum(len(each.tokens) for each in written[first:]))
            job.check()
        written = written or [Generation(prompt="") for _ in task.prompts]
        return Written(written, prompts)

    def _score_prompt(self, ids: list[int], task: WritingTask, job: Job[Any]) -> list[Token]:
        first = Token(ids[0], self.decode(ids[:1]), math.nan, math.nan)
        if len(ids) < 2:
            return [first]
        scored = self.lm.explain(
            ids, origins=task.origins, top=task.top, progress=lambda *_: job.check()
        )
        return [first, *scored.tokens]

    def _store(self, reading: Reading) -> SourceInfo:
        try:
            info = self.lm.store(reading)
        except OSError as error:
            raise self._note_write_error(error, "stored") from error
        self.write_error = None
        self.metrics.read.inc(info.tokens)
        self._note_sources()
        return info

    def _forget(self, source: str) -> None:
        if all(known.name != source for known in self.sources):
            raise UnknownSourceError(f"there is no document {source!r}")
        try:
            self.lm.forget(source)
        except OSError as error:
            raise self._note_write_error(error, "removed") from error
        self.write_error = None
        self._note_sources()

    def _note_write_error(self, error: OSError, what: str) -> StorageError:
        self.write_error = f"the document could not be {what}: {error.strerror or error}"
        return StorageError(self.write_error)

    def _note_sources(self) -> None:
        self.sources, self.entries = self.lm.sources(), len(self.lm)


def _group_prompts(task: WritingTask) -> Iterator[list[list[int]]]:
    """Yield prompts to be continued together, in order: as many as memory allows."""
    group: list[list[int]] = []
    for prompt in task.prompts:
        longest = max(map(len, [*group, prompt])) + task.max_new_tokens
        is_large = (len(group) + 1) * longest > TOKENS_PER_BATCH
        if group and (is_large or len(group) == ROWS_PER_BATCH):
            yield group
            group = []
        group.append(prompt)
    yield group


def _wrap_seed(seed: int) -> int:
    return seed % 2**63


def _name_model(lm: MemoryLM) -> str:
    """Return the name by which clients ask for the model."""
    if lm.name is None:
        return DEFAULT_MODEL
    if not lm.name:
        return type(lm.model).__name__
    return Path(lm.name).resolve().name if Path(lm.name).is_dir() else lm.name
