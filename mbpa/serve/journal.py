"""A crash-safe journal of taught examples.

A call is durable when it returns, and takes effect as a whole or not at all (`database`).

Forgotten examples are overwritten in place. Deleting rows is not enough, even with
``secure_delete``: when SQLite joins half-empty pages, copies of rows stay in the gaps. Here rows
never move. Once overwritten rows take up much of the file, the others are copied to a new table.

Opening verifies every row (`journal_schema`).

Standard library only, like `database`: without ``mbpa`` itself, neither torch nor numpy is loaded.
"""

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from mbpa.serve import journal_schema
from mbpa.serve.audit import Action, AuditEntry
from mbpa.serve.database import BACKUP_SUFFIX, Database
from mbpa.serve.example_journal import (
    AUDITED_CHANGES,
    REMEMBERED_REQUESTS,
    Example,
    ExampleFilter,
    ExampleJournal,
    InputError,
    JournalState,
    ListedExample,
    make_example,
    validate_request,
    validate_row,
)
from mbpa.serve.journal_errors import DamagedError, InUseError, JournalError
from mbpa.serve.journal_schema import OVERWRITE, SCHEMA, SIZE, Row, Totals

__all__ = [
    "BACKUP_SUFFIX",
    "DamagedError",
    "Example",
    "ExampleFilter",
    "InUseError",
    "InputError",
    "Journal",
    "JournalError",
    "ListedExample",
    "Row",
]

WASTE_BYTES = 1 << 20

_SELECT = "SELECT id, label, text, key FROM examples WHERE live AND"
_SELECT_WITHOUT_PICTURES = """
SELECT id, label, CASE WHEN key IS NULL OR typeof(text) <> 'blob' THEN text END, key
FROM examples WHERE live AND
"""  # a value of type blob in the text column is the file of a picture


class Journal(ExampleJournal):
    """Taught examples on disk, for one process and any number of its threads.

    Opening verifies every row. A process that is forked while a journal is open cannot use it.

    Args:
        path: the database; files with the suffixes ``-wal`` and ``.lock`` lie beside it.
        create: create the journal if it is missing.
        writable: if false, open the journal for reading only and change nothing.
        remembered_requests: number of names of calls that are remembered.
        waste_bytes: overwritten rows of more than this many bytes are removed if they also take up
            a third of the file; `WASTE_BYTES` by default.
        audited_changes: number of changes that the audit trail holds at least. The entry of a
            lesson is kept as long as one of its examples is.
        clock: returns the seconds since 1970, UTC.

    Raises:
        JournalError: the journal has a later format, or cannot be read or created.
        InUseError: another process has it open.
        DamagedError: it is damaged, incomplete, or not a journal.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool = True,
        writable: bool = True,
        remembered_requests: int = REMEMBERED_REQUESTS,
        waste_bytes: int | None = None,
        audited_changes: int = AUDITED_CHANGES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(path, SCHEMA, create=create, writable=writable)
        try:
            with self._database.reading() as database:
                found = journal_schema.verify(database)
        except BaseException:
            self._database.close()
            raise
        self.path = self._database.path
        self._totals, self._labels = found.totals, found.labels
        self._restored, self._waste = found.restored_ids, found.waste
        self._remembered_requests = remembered_requests
        self._waste_bytes = WASTE_BYTES if waste_bytes is None else waste_bytes
        self._lessons, self._clock = found.lessons, clock
        self._audited_changes = audited_changes
        self._entries = found.totals.entries  # not counting those that had to be kept

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def read_only(self) -> str | None:
        """Reason why the journal is read-only, in one line; `None` if it can be written.

        It was opened for reading only, or a write failed. Every later write raises at once; reads
        still work.
        """
        return self._database.read_only

    def refuse(self, reason: str) -> None:
        """Refuse further writes, for this reason, until the journal is opened again."""
        with self._database.reading() as database:
            database.read_only = database.read_only or f"{self.path}: {reason}"

    def require_owner(self) -> None:
        self._database.require_owner()

    def learn(
        self,
        examples: Sequence[Row],
        request: str | None = None,
        *,
        restoring: bool = False,
        by: str | None = None,
    ) -> list[int]:
        for example in examples:
            validate_row(*example)
        validate_request(request)
        with self._database.writing() as database:
            known = self._find_request(examples, request)
            if known is not None or not examples:
                return known or []
            with database.transaction():
                ids, totals = self._insert(examples, restoring)
                if request is not None:
                    totals = self._remember(request, ids[0], examples, totals)
                action: Action = "restore" if restoring else "learn"
                entry, totals = self._audit(action, ids[0], len(ids), by, totals)
                totals.write(database)
            self._totals = totals
            self._add_lesson(entry)
            self._restored = self._restored.union(ids if restoring else ())
            self._labels = self._labels + Counter(label for label, _, _ in examples)
            database.acknowledge(totals.change)
            database.shorten_log()
        return ids

    def find_repeated(self, examples: Sequence[Row], request: str) -> list[int] | None:
        validate_request(request)
        with self._database.writing():
            return self._find_request(examples, request)

    def forget(
        self,
        ids: Sequence[SupportsIndex] = (),
        label: str | None = None,
        *,
        by: str | None = None,
    ) -> list[int]:
        """Remove examples, as the base class says.

        On return no file of the journal contains their bytes. Blocks that the file system or the
        disk has freed, and copies made by others, are out of reach.
        """
        numbers = [operator.index(id) for id in ids]  # SQLite would not find numpy integers
        with self._database.writing() as database:
            found = self._find_rows(numbers, label)
            if not found:
                database.empty_log()  # an interrupted call may have overwritten them before
                return []
            totals = replace(self._totals, change=self._totals.change + 1)
            with database.transaction():
                for id in found:
                    database.rows(OVERWRITE, id)
                totals = totals.count_examples(-1, [each.checksum for each in found.values()])
                entry, totals = self._audit("forget", min(found), len(found), by, totals)
                totals.write(database)
            self._totals = totals
            self._add_lesson(entry)
            self._restored = self._restored.difference(found)
            self._labels = self._labels - Counter(each.label for each in found.values())
            self._waste += sum(each.size for each in found.values())
            self._remove_waste()
            database.empty_log()
            database.acknowledge(totals.change)
        return sorted(found)

    def rename(
        self,
        label: str,
        new_label: str,
        *,
        last_trained: int | None = None,
        by: str | None = None,
    ) -> dict[int, int]:
        """Rename a label, as the base class says.

        This copies the whole journal, so it takes about as long as reading and writing the file.
        """
        validate_row(new_label, "", None)
        with self._database.writing() as database:
            found = self._find_rows((), label)
            if not found or label == new_label:
                return {}
            moved = [id for id in sorted(found) if id <= (last_trained or 0)]
            last = self._totals.last
            ids = {id: id for id in found} | {id: last + 1 + i for i, id in enumerate(moved)}
            is_merge = last_trained is not None
            totals = replace(self._totals, change=self._totals.change + 1, last=last + len(moved))
            with database.transaction():
                checksums = journal_schema.copy_renamed_rows(
                    database, ids, new_label, clears_restored=is_merge
                )
                totals = totals.count_examples(-1, [each.checksum for each in found.values()])
                totals = totals.count_examples(1, checksums)
                action: Action = "merge" if is_merge else "rename"
                first, names = min(ids.values()), (label, new_label)
                entry, totals = self._audit(action, first, len(ids), by, totals, names)
                totals.write(database)
            self._totals = totals
            self._add_lesson(entry)
            if is_merge:
                self._restored = self._restored.difference(found)
            moved_labels = Counter({new_label: len(found)})
            self._labels = self._labels - Counter({label: len(found)}) + moved_labels
            database.give_back_free_pages()
            self._waste = 0
            database.empty_log()
            database.acknowledge(totals.change)
        return ids

    def copy_to(self, place: Path) -> None:
        """Write a copy of the journal, as of this moment, to a new file; writes wait meanwhile.

        Raises:
            JournalError: the journal cannot be read, or the copy not written.
        """
        with self._database.reading() as database:
            try:
                database.copy_to(place)
            except OSError as error:
                raise JournalError(f"{place} cannot be written: {error.strerror}") from error

    def renames(self) -> list[AuditEntry]:
        with self._database.reading() as database:
            return journal_schema.read_renames(database)

    def examples(
        self, after: int = 0, limit: int | None = None, *, with_pictures: bool = True
    ) -> Iterator[Example]:
        select = _SELECT if with_pictures else _SELECT_WITHOUT_PICTURES
        with self._database.reading() as database:
            rows = database.rows(
                f"{select} id > ? ORDER BY id LIMIT ?", after, -1 if limit is None else limit
            )
        return (make_example(*row) for row in rows)

    def requests(self) -> list[tuple[int, str, int, int, bytes | None, bytes | None]]:
        """Return the remembered requests: number, name, first id, count, digests."""
        select = "SELECT number, name, first, count, content, keys FROM requests ORDER BY number"
        with self._database.reading() as database:
            return database.rows(select)

    @contextmanager
    def load(self, *, size: int) -> Iterator[JournalState]:
        """Load the journal; writes meanwhile would be seen in part, so the caller prevents them."""
        yield JournalState(self.change, self.last, len(self), self._read_parts(size))

    def _read_parts(self, size: int) -> Iterator[Sequence[Example]]:
        last = 0
        while part := list(self.examples(last, size, with_pictures=False)):
            yield part
            last = part[-1].id

    def example(self, id: int) -> Example | None:
        if not 0 < id < 2**63:
            return None
        with self._database.reading() as database:
            rows = database.rows(f"{_SELECT} id = ?", id)
        return make_example(*rows[0]) if rows else None

    def list_examples(
        self,
        wanted: ExampleFilter,
        *,
        limit: int,
        after: int | None = None,
        newest_first: bool = False,
        last_trained: int = 0,
    ) -> list[ListedExample]:
        lowest, highest = 0, 2**63 - 1
        if after is not None:
            lowest, highest = (0, after) if newest_first else (after, highest)
        if wanted.since_ms is not None:
            first = self._lessons.find_first_since(wanted.since_ms)
            if first is None:
                return []
            lowest = max(lowest, first - 1)
        select = """
        SELECT id, label, CASE typeof(text) WHEN 'text' THEN text END, id <= ? OR restored
        FROM examples WHERE live AND id > ? AND id < ?
        """
        arguments: list[int | str] = [last_trained, lowest, highest]
        if wanted.label is not None:
            select, arguments = f"{select} AND label = ?", [*arguments, wanted.label]
        if wanted.is_trained is not None:
            select = f"{select} AND (id <= ? OR restored) = ?"
            arguments += [last_trained, int(wanted.is_trained)]
        order = "DESC" if newest_first else "ASC"
        found: list[ListedExample] = []
        with (
            self._database.reading() as database,
            closing(database.stream(f"{select} ORDER BY id {order}", *arguments)) as rows,
        ):
            for id, label, text, is_trained in rows:
                taught_ms, by = self._lessons.find(id) or (None, None)
                if wanted.since_ms is not None and (taught_ms or 0) < wanted.since_ms:
                    continue
                found.append(ListedExample(id, label, text, bool(is_trained), taught_ms, by))
                if len(found) == limit:
                    break
        return found

    def audit(self, *, limit: int, before: int | None = None) -> list[AuditEntry]:
        with self._database.reading() as database:
            first = self._totals.change + 1 if before is None else before
            return journal_schema.read_entries(database, first, limit)

    @property
    def restored_ids(self) -> frozenset[int]:
        return self._restored

    def labels(self) -> dict[str, int]:
        """Return the number of examples per label, sorted by label."""
        return dict(sorted(self._labels.items()))

    def __len__(self) -> int:
        return self._labels.total()

    @property
    def change(self) -> int:
        return self._totals.change

    @property
    def last(self) -> int:
        """Highest id ever assigned."""
        return self._totals.last

    def close(self) -> None:
        self._database.close()

    def _insert(self, examples: Sequence[Row], restoring: bool) -> tuple[list[int], Totals]:
        first = self._totals.last + 1
        ids = list(range(first, first + len(examples)))
        checksums = [
            journal_schema.insert_example(self._database, id, restoring, example)
            for id, example in zip(ids, examples, strict=True)
        ]
        totals = replace(self._totals, change=self._totals.change + 1, last=ids[-1])
        return ids, totals.count_examples(1, checksums)

    def _audit(
        self,
        action: Action,
        first: int,
        count: int,
        by: str | None,
        totals: Totals,
        names: tuple[str | None, str | None] = (None, None),
    ) -> tuple[AuditEntry, Totals]:
        """Write an entry of the audit trail, and from time to time delete old ones."""
        now_ms = int(self._clock() * 1000)
        entry = AuditEntry(totals.change, now_ms, by, action, first, count, *names)
        totals = totals.count_entries(1, [journal_schema.insert_entry(self._database, entry)])
        if self._is_audit_long():
            gone = journal_schema.delete_entries(self._database, self._audited_changes)
            totals = totals.count_entries(-1, gone)
        return entry, totals

    def _add_lesson(self, entry: AuditEntry) -> None:
        """Bring the index of lessons up to date after a change was committed."""
        if self._is_audit_long():
            self._lessons = journal_schema.index_lessons(self._database)
            self._entries = self._audited_changes
        else:
            self._lessons.add(entry)
            self._entries += 1

    def _is_audit_long(self) -> bool:
        return self._entries > self._audited_changes + self._audited_changes // 10

    def _remember(
        self, request: str, first: int, examples: Sequence[Row], totals: Totals
    ) -> Totals:
        """Store the name of a call, delete the oldest one, and return the updated totals."""
        rows = self._database.rows
        ((newest,),) = rows("SELECT ifnull(max(number), 0) FROM requests")
        call = newest + 1, request, first, len(examples)
        digests = journal_schema.describe_call(examples)
        added = journal_schema.insert_request(self._database, *call, *digests)
        oldest = newest + 1 - self._remembered_requests
        gone = rows("SELECT checksum FROM requests WHERE number <= ?", oldest)
        rows("DELETE FROM requests WHERE number <= ?", oldest)
        totals = totals.count_requests(1, [added])
        return totals.count_requests(-1, [checksum for (checksum,) in gone])

    def _find_request(self, examples: Sequence[Row], request: str | None) -> list[int] | None:
        """Return the ids of an earlier call with this name and these examples, or `None`."""
        select = "SELECT first, count, content, keys FROM requests WHERE name = ?"
        call = self._database.rows(select, request)
        if not call:
            return None
        first, count, content, keys = call[0]
        if content is None:
            raise InputError(
                f"request {request!r} was used for examples forgotten since: choose another name"
            )
        if count != len(examples) or not journal_schema.is_same_call(examples, content, keys):
            raise InputError(
                f"request {request!r} was used for other examples: choose another name"
            )
        return list(range(first, first + count))

    def _find_rows(self, ids: Sequence[int], label: str | None) -> dict[int, "_StoredRow"]:
        """Return the rows with these ids or this label that exist, by id."""
        select = f"SELECT id, label, {SIZE}, checksum FROM examples WHERE live AND"
        rows = [] if label is None else self._database.rows(f"{select} label = ?", label)
        for id in ids:
            if 0 < id < 2**63:
                rows += self._database.rows(f"{select} id = ?", id)
        return {id: _StoredRow(*row) for id, *row in rows}

    def _remove_waste(self) -> None:
        if self._waste > max(self._waste_bytes, self._database.size() // 3):
            with self._database.transaction():
                journal_schema.copy_live_rows(self._database)
            self._database.give_back_free_pages()
            self._waste = 0


class _StoredRow(NamedTuple):
    """The columns of an example that are needed to forget it."""

    label: str
    size: int
    checksum: bytes
