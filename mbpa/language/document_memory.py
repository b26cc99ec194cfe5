"""The documents that a language model has read: entries of the memory, and files of a run.

A document has one entry per token except its first; the key is the state of the model before the
token. If there is a directory, a document is on disk before it counts as read, and its file is
removed before it counts as forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mbpa.adaptation import Engine
from mbpa.errors import RunError
from mbpa.language.run_directory import RunDirectory, Source, digest_tokens, make_source
from mbpa.language.source_index import SourceIndex
from mbpa.language.trunk import Progress
from mbpa.memory import Memory

ROWS_PER_SUMMARY = 1024  # after so many rows a caller may end the reading
LOAD_ATTEMPTS = 10  # while another process replaces documents


@dataclass(frozen=True, eq=False)
class Reading:
    """A document on which the model has run, ready for the memory: `MemoryLM.store` takes it."""

    source: str
    """Name of the document."""
    tokens: Int[Tensor, "T"]
    keys: Float[Tensor, "N D"] | None
    """States before all tokens but the first; `None` if this very text was in the memory."""
    summaries: Int[Tensor, "N W"] | None


class DocumentMemory:
    """Documents in a memory and, once it is saved, in a directory. One thread may use it at a time.

    Args:
        memory: an empty memory.
        engine: engine of the adaptations, which keeps summaries of the entries.
        output_layer: the layer that is adapted.
        key_dtype: precision to which keys are rounded.
    """

    def __init__(
        self, memory: Memory, engine: Engine, output_layer: nn.Linear, key_dtype: torch.dtype
    ) -> None:
        self.memory = memory
        self._engine, self._output_layer, self._key_dtype = engine, output_layer, key_dtype
        self._sources = SourceIndex()
        self._directory: RunDirectory | None = None
        self._is_read_only = False

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def holds(self, name: str, tokens: Int[Tensor, "T"]) -> bool:
        """Return whether these very tokens were read under this name. Needs no lock."""
        known = self._sources.get(name)
        return known is not None and known.text_digest == digest_tokens(tokens)

    def require_room(self, tokens: Int[Tensor, "T"]) -> None:
        """Raise `ValueError` unless the memory has room for a document."""
        room = self.memory.capacity - len(self.memory)
        if len(tokens) - 1 > room:
            raise ValueError(
                f"text must have at most {room + 1} tokens, for which the memory has room, got "
                f"{len(tokens)}: forget a source, or load with a larger capacity"
            )

    def require_writable(self) -> None:
        """Raise `RunError` if documents can neither be added nor forgotten."""
        if self._is_read_only:
            raise RunError("the run was opened for reading only, or closed")

    def locate(self, entry: int) -> tuple[Source, int]:
        """Return the document of an entry of the memory, and the position of its token there."""
        return self._sources.locate(entry)

    # Changing

    def prepare(
        self,
        name: str,
        tokens: Int[Tensor, "T"],
        states: Float[Tensor, "T D"],
        progress: Progress | None,
    ) -> Reading:
        """Return a document as `add` takes it. Changes nothing, and needs no lock.

        Args:
            name: name of the document.
            tokens: its tokens.
            states: the state of the model after each of them.
            progress: called after each part; an exception that it raises ends the call.
        """
        keys = states[:-1].to(self._key_dtype)
        if not keys.isfinite().all():
            raise ValueError("the states of the model must be finite, got NaN or infinite ones")
        parts = []
        for rows in keys.split(ROWS_PER_SUMMARY):
            parts.append(self._engine.summarize(self._output_layer, self.memory, rows))
            if progress is not None:
                progress(len(tokens), len(tokens))
        known = [part for part in parts if part is not None]
        return Reading(name, tokens, keys, torch.cat(known) if known else None)

    def add(self, reading: Reading) -> Source:
        """Add a document in place of one with the same name; if that fails, nothing changes."""
        assert reading.keys is not None
        old = self._sources.get(reading.source)
        new = make_source(reading.source, reading.tokens, reading.keys.cpu(), reading.summaries)
        ids = self._write(new)
        try:
            if self._directory is not None:
                new = self._directory.add(new, replaces=-1 if old is None else old.number)
        except BaseException:
            self.memory.delete(ids)
            raise
        if old is not None:
            self._drop(old)
        self._sources.add(new, int(ids[0]))
        return new

    def get(self, name: str) -> Source:
        """Return a document without its keys; raise `ValueError` if there is none of this name."""
        return self._sources.require(name)

    def forget(self, name: str) -> None:
        """Remove a document; raise `ValueError` if there is none of this name."""
        known = self._sources.require(name)
        if self._directory is not None:
            self._directory.remove(known.number)
        self._drop(known)

    def _write(self, source: Source) -> Int[Tensor, "N"]:
        """Write the entries of a source into the memory and return their ids."""
        device = self.memory.device
        values = source.tokens[1:].to(device, torch.int32)
        ids = self.memory.write(source.keys.to(device, self.memory.dtype), values)
        if source.summaries is not None:
            try:
                rows = source.summaries.to(device)
                self._engine.keep_summaries(self._output_layer, self.memory, ids, rows)
            except BaseException:
                self.memory.delete(ids)
                raise
        return ids

    def _drop(self, source: Source) -> None:
        self.memory.delete(self._sources.list_ids(source.name))
        self._sources.remove(source.name)

    # The directory

    def save(self, directory: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        """Write all documents to a new directory, and later ones as they are read.

        Args:
            directory: where; it must not hold a run.
            settings: what the manifest of the run records.
        """
        if self._directory is not None:
            raise RunError(f"the run is kept in {self._directory.root} already")
        whole = (self._restore_keys(source) for source in self._sources)
        target, stored = RunDirectory.create(directory, settings, whole)
        for source in stored:
            self._sources.renumber(source.name, source.number)
        self._directory = target

    def _restore_keys(self, source: Source) -> Source:
        """Return a source with its keys, from the memory."""
        ids = self._sources.list_ids(source.name)
        keys = self.memory.get_keys(ids).to(self._key_dtype)
        summaries = self._engine.summarize(self._output_layer, self.memory, keys)
        return replace(source, keys=keys.cpu(), summaries=summaries)

    def load(self, run: RunDirectory, progress: Progress | None) -> None:
        """Load all documents of a run, and store later ones there if it is open for writing.

        Args:
            run: the run. If another process changes it meanwhile, it is read again.
            progress: called with the number of documents loaded so far, and of all.
        """
        for attempt in range(LOAD_ATTEMPTS):
            try:
                for done, source in enumerate(run.load(), 1):
                    self.require_room(source.tokens)
                    self._sources.add(source, int(self._write(source)[0]))
                    if progress is not None:
                        progress(done, len(run))
                break
            except FileNotFoundError:
                if attempt == LOAD_ATTEMPTS - 1:
                    raise
                self.memory.clear()
                self._sources = SourceIndex()
        self._is_read_only = not run.is_writable
        self._directory = run if run.is_writable else None

    def close(self) -> None:
        """Release the directory for other processes; documents can no longer be changed."""
        if self._directory is not None:
            self._directory.close()
            self._directory, self._is_read_only = None, True
