"""A journal of taught examples that survives what happens to it: tables, and what is done to them.

A call is durable when it returns, and is there as a whole or not at all (`database`).

What is forgotten is overwritten in place. Deleting rows would not do, even with
``secure_delete``: when SQLite joins half-empty pages, copies of rows stay in the gaps. Here rows
never move; once much of the file is overwritten rows, the others are copied to a new table.

Standard library only, as `database` is: without ``mbpa`` itself, neither torch nor numpy is loaded.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mbpa.serve.database import Database, InUseError, JournalError, Schema

__all__ = ["Example", "InUseError", "InputError", "Journal", "JournalError", "Row"]

FORMAT = 1
REMEMBERED_REQUESTS = 10_000

_WASTE_BYTES = 1 << 20  # less than this of overwritten rows is not worth copying the others
_LARGEST_EXAMPLE = 1 << 28  # bytes; SQLite stops at 10⁹ a row
_EXAMPLES = """(
    id INTEGER PRIMARY KEY, live INTEGER NOT NULL CHECK (live IN (0, 1)),
    label BLOB NOT NULL, text BLOB, key BLOB
)"""
_SCHEMA = Schema(
    FORMAT,
    (
        f"CREATE TABLE examples {_EXAMPLES}",
        "CREATE TABLE requests (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,"
        " first INTEGER NOT NULL, count INTEGER NOT NULL)",
        "CREATE TABLE counters (change INTEGER NOT NULL, last INTEGER NOT NULL)",
        "INSERT INTO counters VALUES (0, 0)",
    ),
)
# Zeros of the same length leave the row its size, and so its place: SQLite writes over it.
_OVERWRITE = """
UPDATE examples SET live = 0, label = zeroblob(length(CAST(label AS BLOB))),
    text = zeroblob(length(CAST(text AS BLOB))), key = zeroblob(length(key))
WHERE id = ?
"""
_SIZE = """
length(CAST(label AS BLOB)) + ifnull(length(CAST(text AS BLOB)), 0) + ifnull(length(key), 0) + 12
"""  # 12: what SQLite adds to a short row
_SELECT = "SELECT id, label, text, key FROM examples WHERE live AND"
_SELECT_WITHOUT_PICTURES = """
SELECT id, label, CASE WHEN key IS NULL OR typeof(text) <> 'blob' THEN text END, key
FROM examples WHERE live AND
"""  # what is of type blob in the column of texts is the file of a picture
_COPY_TO_NEW_TABLE = (
    f"CREATE TABLE kept {_EXAMPLES}",
    "INSERT INTO kept SELECT * FROM examples WHERE live ORDER BY id",
    "DROP TABLE examples",
    "ALTER TABLE kept RENAME TO examples",
)


class InputError(ValueError):
    """What was asked for cannot be; the message is for whoever asked. Other errors are ours."""


Row = tuple[str, str | bytes | None, bytes | None]
"""An example to be written: its label; its text, or the file of its picture; its key."""


@dataclass(frozen=True)
class Example:
    """One taught example. ``key`` is an embedding: float32, little-endian."""

    id: int
    label: str
    text: str | None
    key: bytes | None
    image: bytes | None = None
    """The file of its picture, if that is what it is of; then there is no text."""

    @property
    def said(self) -> str | bytes | None:
        """The text or the picture."""
        return self.text if self.image is None else self.image


class Journal:
    """Taught examples on disk, for one process and any number of its threads.

    Args:
        path: the database, created when missing; ``-wal`` and ``.lock`` stand beside it.

    Raises:
        JournalError: it is not a journal, of a later format, damaged, in use by another process,
            or cannot be read or created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._access = threading.Lock()
        self._labels: Counter[str] = Counter()
        self._restored: frozenset[int] = frozenset()
        self._change = self._waste = 0  # committed writes; bytes of overwritten rows
        self._database = Database(path, _SCHEMA)
        try:
            self._count()
        except BaseException:
            self._database.close()
            raise

    @property
    def read_only(self) -> str | None:
        """None, or a line on why nothing is written: it opened for reading only, or a write failed.

        Every later write raises at once; reads go on.
        """
        return self._database.read_only

    def refuse(self, reason: str) -> None:
        """Write nothing more, for this reason, until it is opened again."""
        with self._access:
            self._database.read_only = self._database.read_only or f"{self.path}: {reason}"

    def learn(
        self,
        examples: Sequence[Row],
        request: str | None = None,
        *,
        restoring: bool = False,
    ) -> list[int]:
        """Write examples, all or none, and return their ids once durable.

        Args:
            examples: each with a text or picture, a key, or both.
            request: names the call. Given again with the same examples it returns the same ids
                and writes nothing, even if they were forgotten since; the newest
                ``REMEMBERED_REQUESTS`` names are remembered.
            restoring: they are among ``restored`` from now on.

        Raises:
            ValueError: an example cannot be stored.
            InputError: ``request`` has named other examples.
            JournalError: not acknowledged; after a restart the call is there as a whole or not at
                all, and the same call with the same ``request`` settles it.
        """
        for example in examples:
            _validate(*example)
        with self._access, self._database.writing():
            known = self._remembered(examples, request)
            if known is not None or not examples:
                return known or []
            with self._database.transaction():
                ids = self._insert(examples, request)
                if restoring:
                    self._mark(ids)
            self._restored = self._restored.union(ids if restoring else ())
            self._labels = self._labels + Counter(label for label, _, _ in examples)
            self._change += 1
            self._database.shorten_log()
        return ids

    def repeated(self, examples: Sequence[Row], request: str) -> list[int] | None:
        """The ids of an earlier call with this name and these examples; None if there was none.

        A text may come without the key it was written with: embedded again it might differ in
        the last bit.

        Raises:
            InputError: ``request`` has named other examples.
            JournalError: as `learn`; what may not be durable is not acknowledged here either.
        """
        with self._access, self._database.writing():
            return self._remembered(examples, request)

    def forget(self, ids: Sequence[int] = (), label: str | None = None) -> list[int]:
        """Remove the examples with these ids and all those of ``label``; returns which were there.

        On return no file of the journal has their bytes. Blocks that the file system or the disk
        has given up, and copies made by others, are out of reach.

        Raises:
            JournalError: not acknowledged; after a restart all of them are there, or none.
        """
        with self._access, self._database.writing():
            found = self._found(ids, label)
            if not found:
                return []
            with self._database.transaction():
                for id in found:
                    self._database.rows(_OVERWRITE, id)
                for id in self._restored.intersection(found):
                    self._database.rows("DELETE FROM restored WHERE id = ?", id)
                self._database.rows("UPDATE counters SET change = change + 1")
            self._restored = self._restored.difference(found)
            self._labels = self._labels - Counter(label for label, _ in found.values())
            self._change += 1
            self._waste += sum(size for _, size in found.values())
            self._remove_waste()
            self._database.empty_log()
        return sorted(found)

    def examples(
        self, after: int = 0, limit: int | None = None, *, with_pictures: bool = True
    ) -> Iterator[Example]:
        """Examples with ids above ``after``, by rising id, as they are at the moment of the call.

        They are read at once, so that a slow consumer keeps nobody waiting; ``limit`` bounds
        their number, and with it the memory this takes. Without pictures, only those examples have
        theirs that have no key.
        """
        select = _SELECT if with_pictures else _SELECT_WITHOUT_PICTURES
        with self._access, self._database.reading():
            rows = self._database.rows(
                f"{select} id > ? ORDER BY id LIMIT ?", after, -1 if limit is None else limit
            )
        return (_example(*row) for row in rows)

    def example(self, id: int) -> Example | None:
        """The example with this id, if it is there."""
        if not 0 < id < 2**63:
            return None
        with self._access, self._database.reading():
            rows = self._database.rows(f"{_SELECT} id = ?", id)
        return _example(*rows[0]) if rows else None

    @property
    def restored(self) -> frozenset[int]:
        """Ids of the examples that were there before, were forgotten, and were brought back."""
        return self._restored

    def labels(self) -> dict[str, int]:
        """How many examples each label has, by name."""
        return dict(sorted(self._labels.items()))

    def __len__(self) -> int:
        return self._labels.total()

    @property
    def change(self) -> int:
        """Raised by one with every committed write. Read it before what it is to describe."""
        return self._change

    def close(self) -> None:
        """Let go of the files; a journal whose process is killed instead loses nothing either."""
        with self._access:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _count(self) -> None:
        rows = self._database.rows
        with self._database.reading():
            live = rows("SELECT label, count(*) FROM examples WHERE live GROUP BY label")
            self._labels = Counter(dict(live))
            ((self._change,),) = rows("SELECT change FROM counters")
            size = f"SELECT ifnull(sum({_SIZE}), 0) FROM examples WHERE NOT live"
            ((self._waste,),) = rows(size)
            ((has_marks,),) = rows("SELECT count(*) FROM sqlite_master WHERE name = 'restored'")
            marks = rows("SELECT id FROM restored") if has_marks else []
            self._restored = frozenset(id for (id,) in marks)

    def _insert(self, examples: Sequence[Row], request: str | None) -> list[int]:
        rows = self._database.rows
        ((last,),) = rows("SELECT last FROM counters")
        ids = list(range(last + 1, last + 1 + len(examples)))
        for id, example in zip(ids, examples, strict=True):
            rows("INSERT INTO examples VALUES (?, 1, ?, ?, ?)", id, *example)
        rows("UPDATE counters SET change = change + 1, last = ?", ids[-1])
        if request is not None:
            add = "INSERT INTO requests (name, first, count) VALUES (?, ?, ?)"
            rows(add, request, ids[0], len(ids))
            remove = "DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?"
            rows(remove, REMEMBERED_REQUESTS)
        return ids

    def _mark(self, ids: Sequence[int]) -> None:
        """In a table of their own, which most journals never need."""
        self._database.rows("CREATE TABLE IF NOT EXISTS restored (id INTEGER PRIMARY KEY)")
        for id in ids:
            self._database.rows("INSERT INTO restored VALUES (?)", id)

    def _remembered(self, examples: Sequence[Row], request: str | None) -> list[int] | None:
        """The ids of an earlier call with this name; what was not forgotten of it must agree."""
        call = self._database.rows("SELECT first, count FROM requests WHERE name = ?", request)
        if not call:
            return None
        first, count = call[0]
        rows = self._database.rows(f"{_SELECT} id >= ? AND id < ?", first, first + count)
        kept = {id: (label, text, key) for id, label, text, key in rows}
        if count != len(examples) or not all(
            _is_same(example, kept.get(id, example)) for id, example in enumerate(examples, first)
        ):
            raise InputError(f"request {request!r} has named other examples: give it another name")
        return list(range(first, first + count))

    def _found(self, ids: Sequence[int], label: str | None) -> dict[int, tuple[str, int]]:
        """Label and size of the rows asked for that are there."""
        select = f"SELECT id, label, {_SIZE} FROM examples WHERE live AND"
        rows = [] if label is None else self._database.rows(f"{select} label = ?", label)
        for id in ids:
            if 0 < id < 2**63:
                rows += self._database.rows(f"{select} id = ?", id)
        return {id: (name, size) for id, name, size in rows}

    def _remove_waste(self) -> None:
        if self._waste > max(_WASTE_BYTES, self._database.size() // 3):
            with self._database.transaction():
                for statement in _COPY_TO_NEW_TABLE:
                    self._database.rows(statement)
            self._database.give_back_free_pages()
            self._waste = 0


def _example(id: int, label: str, said: str | bytes | None, key: bytes | None) -> Example:
    """Texts and files share a column: what is text for SQLite is one."""
    if isinstance(said, bytes):
        return Example(id, label, None, key, said)
    return Example(id, label, said, key)


def _is_same(given: Row, kept: Row) -> bool:
    has_no_key_yet = given[1] is not None and given[2] is None
    return tuple(given[:2]) == kept[:2] and (has_no_key_yet or given[2] == kept[2])


def _validate(label: str, said: str | bytes | None, key: bytes | None) -> None:
    if not label:
        raise ValueError("label must not be empty")
    if said is None and key is None:
        raise ValueError(f"an example of {label!r} must have a text or a key")
    if key is not None and (not key or len(key) % 4):
        raise ValueError(f"key must hold float32 numbers of 4 bytes, got {len(key)} bytes")
    try:
        told = said if isinstance(said, bytes) else (said or "").encode()
        size = len(label.encode()) + len(told) + len(key or b"")
    except UnicodeEncodeError as error:
        raise ValueError(f"label and text must be Unicode without surrogates: {error}") from error
    if size > _LARGEST_EXAMPLE:
        raise ValueError(f"an example must have at most {_LARGEST_EXAMPLE} bytes, got {size}")
