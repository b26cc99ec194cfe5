"""What a journal of taught examples promises, wherever it stores them.

`journal.Journal` keeps them in files, for one process; `postgres_journal.PostgresJournal` in a
database, for any number of replicas.

Standard library only.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, SupportsIndex

from mbpa.serve.audit import AuditEntry
from mbpa.serve.journal_schema import Row

REMEMBERED_REQUESTS = 10_000
AUDITED_CHANGES = 100_000  # about 5 MB

_MAX_EXAMPLE_BYTES = 1 << 28  # SQLite's limit is 10⁹ per row


class InputError(ValueError):
    """The input is invalid; the message is meant for the caller. Other errors are ours."""


@dataclass(frozen=True)
class Example:
    """One taught example. ``key`` is an embedding: float32, little-endian."""

    id: int
    label: str
    text: str | None
    key: bytes | None
    image: bytes | None = None
    """File of the picture, if the example is a picture; then there is no text."""

    @property
    def item(self) -> str | bytes | None:
        """The text or the picture."""
        return self.text if self.image is None else self.image


@dataclass(frozen=True)
class ExampleFilter:
    """Which examples to list; by default all of them."""

    label: str | None = None
    since_ms: int | None = None
    """Earliest time of teaching, in milliseconds since 1970, UTC."""
    is_trained: bool | None = None
    """Whether the head was trained with the example."""


@dataclass(frozen=True)
class ListedExample:
    """An example with its origin, without key and picture."""

    id: int
    label: str
    text: str | None
    is_trained: bool
    """Whether the head was trained with it."""
    taught_ms: int | None
    """Time of teaching, in milliseconds since 1970, UTC; `None` for examples of journals before
    format 3, which did not record it."""
    by: str | None
    """Name of the token that it was taught with."""


@dataclass(frozen=True)
class JournalState:
    """Everything that a journal holds after one of its changes."""

    change: int
    """Number of the change."""
    last: int
    """Highest id ever assigned."""
    count: int
    """Number of examples."""
    parts: Iterator[Sequence[Example]]
    """The examples by rising id, a part at a time; pictures only if they have no key."""


class ExampleJournal(abc.ABC):
    """Taught examples, stored durably, and a record of what changed. Thread-safe."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Where the examples are stored, for messages; without passwords."""

    @property
    @abc.abstractmethod
    def read_only(self) -> str | None:
        """Reason why nothing can be written now, in one line; `None` if it can."""

    @abc.abstractmethod
    def require_owner(self) -> None:
        """Raise `JournalError` in a process forked from the one that opened the journal."""

    @abc.abstractmethod
    def learn(
        self,
        examples: Sequence[Row],
        request: str | None = None,
        *,
        restoring: bool = False,
        by: str | None = None,
    ) -> list[int]:
        """Write examples, all or none, and return their ids once they are durable.

        Args:
            examples: each with a text or picture, a key, or both.
            request: a name for this call. Repeating the name with the same examples returns the
                same ids and writes nothing, even if they were forgotten since. Only the newest
                `REMEMBERED_REQUESTS` names are remembered.
            restoring: list these examples in ``restored_ids`` from now on.
            by: name of the token, for the audit trail.

        Raises:
            ValueError: an example cannot be stored.
            InputError: ``request`` was used for other examples.
            JournalError: the call is not acknowledged. It has taken effect as a whole or not at
                all; repeating it with the same ``request`` makes sure that it has.
        """

    @abc.abstractmethod
    def find_repeated(self, examples: Sequence[Row], request: str) -> list[int] | None:
        """Return the ids of an earlier call with this name and these examples, or `None`.

        A text may be given without the key it was written with, because embedding it again might
        change the last bit.

        Raises:
            InputError: ``request`` was used for other examples.
            JournalError: as for `learn`; a call that may not be durable is not acknowledged here
                either.
        """

    @abc.abstractmethod
    def forget(
        self,
        ids: Sequence[SupportsIndex] = (),
        label: str | None = None,
        *,
        by: str | None = None,
    ) -> list[int]:
        """Remove the examples with these ids and all those of ``label``; return the ids that
        existed.

        Raises:
            JournalError: the call is not acknowledged. Either all of the examples are present or
                none.
        """

    @abc.abstractmethod
    def rename(
        self,
        label: str,
        new_label: str,
        *,
        last_trained: int | None = None,
        by: str | None = None,
    ) -> dict[int, int]:
        """Give all examples of a label another label, which may exist; return their new ids by id.

        Args:
            label: the present label.
            new_label: the label to give its examples.
            last_trained: given if `new_label` has a row of the head of its own, which was not
                trained with these examples: the highest id of those that the head was trained
                with. Examples up to it get new ids, and restored ones are no longer listed in
                ``restored_ids``, so that from now on all count as taught. Others keep their ids.
            by: name of the token, for the audit trail.

        Raises:
            JournalError: the call is not acknowledged. Either all of the examples have the new
                label or none.
        """

    @abc.abstractmethod
    def renames(self) -> list[AuditEntry]:
        """Return the entries of labels that were renamed or merged, oldest first."""

    @abc.abstractmethod
    def examples(
        self, after: int = 0, limit: int | None = None, *, with_pictures: bool = True
    ) -> Iterator[Example]:
        """Return the examples with ids above ``after``, by rising id, as of the time of the call.

        All rows are read at once, so that a slow consumer blocks nobody. ``limit`` bounds their
        number, and so the memory this takes. With ``with_pictures=False``, pictures are returned
        only for examples that have no key.
        """

    @abc.abstractmethod
    def example(self, id: int) -> Example | None:
        """Return the example with this id, or `None`."""

    @abc.abstractmethod
    def list_examples(
        self,
        wanted: ExampleFilter,
        *,
        limit: int,
        after: int | None = None,
        newest_first: bool = False,
        last_trained: int = 0,
    ) -> list[ListedExample]:
        """Return one page of the examples that the filter passes, by id.

        Args:
            wanted: the filter.
            limit: maximum number of examples.
            after: return those that follow the example with this id, which need not exist.
            newest_first: sort by falling ids.
            last_trained: highest id of the examples that the head was trained with. Restored ones
                count as trained, too.
        """

    @abc.abstractmethod
    def audit(self, *, limit: int, before: int | None = None) -> list[AuditEntry]:
        """Return entries of the audit trail, newest first.

        Args:
            limit: maximum number of entries.
            before: return those of changes with lower numbers than this.
        """

    @property
    @abc.abstractmethod
    def restored_ids(self) -> frozenset[int]:
        """Ids of the examples that were forgotten and then added back."""

    @property
    @abc.abstractmethod
    def change(self) -> int:
        """Number of committed writes. Read it before the contents that it should describe."""

    @abc.abstractmethod
    def load(self, *, size: int) -> contextlib.AbstractContextManager[JournalState]:
        """Return a context with everything that the journal holds after its last change.

        Args:
            size: maximum number of examples per part, and so a bound on the memory this takes.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the journal holds. A process that is killed instead loses nothing either."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_example(id: int, label: str, item: str | bytes | None, key: bytes | None) -> Example:
    """Build an example from its text or picture file."""
    if isinstance(item, bytes):
        return Example(id, label, None, key, item)
    return Example(id, label, item, key)


def validate_request(request: str | None) -> None:
    if request is None:
        return
    if type(request) is not str:
        raise ValueError(f"request must be a string, got {request!r}")
    try:
        request.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"request must be Unicode without surrogates: {error}") from error


def validate_row(label: str, item: str | bytes | None, key: bytes | None) -> None:
    kinds = {type(label): str, type(item): str | bytes | None, type(key): bytes | None}
    if wrong := [kind for kind, wanted in kinds.items() if not issubclass(kind, wanted)]:
        raise ValueError(f"an example must be a label, a text or file, and a key, got {wrong[0]}")
    if not label:
        raise ValueError("label must not be empty")
    if item is None and key is None:
        raise ValueError(f"an example of {label!r} must have a text or a key")
    if key is not None and (not key or len(key) % 4):
        raise ValueError(f"key must hold float32 numbers of 4 bytes, got {len(key)} bytes")
    try:
        content = item if isinstance(item, bytes) else (item or "").encode()
        size = len(label.encode()) + len(content) + len(key or b"")
    except UnicodeEncodeError as error:
        raise ValueError(f"label and text must be Unicode without surrogates: {error}") from error
    if size > _MAX_EXAMPLE_BYTES:
        raise ValueError(f"an example must have at most {_MAX_EXAMPLE_BYTES} bytes, got {size}")
