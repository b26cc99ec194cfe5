"""The tables of a journal, and the checksums that reveal damage to them.

Every row has a checksum. The table of counters holds the exclusive or of the checksums of all rows,
so that a row that is lost or reappears is detected, too.

Standard library only.
"""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b
from typing import Any, Self

from mbpa.serve.audit import AuditEntry, LessonIndex
from mbpa.serve.database import Database, Schema
from mbpa.serve.journal_errors import DamagedError

JOURNAL_FORMAT = 3  # 1: without checksums; 2: without the audit trail

Row = tuple[str, str | bytes | None, bytes | None]
"""An example to write: label, text or picture file, key."""

_CHECKSUM_BYTES = 8
_CONTENT_BYTES = 16  # size of the digest that identifies the examples of a call
_ZERO_CHECKSUM = bytes(_CHECKSUM_BYTES)
_TABLES = {
    "examples": """(
    id INTEGER PRIMARY KEY, live INTEGER NOT NULL CHECK (live IN (0, 1)),
    restored INTEGER NOT NULL CHECK (restored IN (0, 1)),
    label BLOB NOT NULL, text BLOB, key BLOB, checksum BLOB NOT NULL
)""",
    "requests": """(
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, first INTEGER NOT NULL,
    count INTEGER NOT NULL, content BLOB, keys BLOB, checksum BLOB NOT NULL
)""",
    "audit": """(
    change INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, name TEXT, action TEXT NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, label TEXT, new_label TEXT,
    checksum BLOB NOT NULL
)""",
    "counters": """(
    change INTEGER NOT NULL, last INTEGER NOT NULL,
    examples INTEGER NOT NULL, example_checksums BLOB NOT NULL,
    requests INTEGER NOT NULL, request_checksums BLOB NOT NULL,
    entries INTEGER NOT NULL, entry_checksums BLOB NOT NULL, checksum BLOB NOT NULL
)""",
}
# Zeros of the same length keep the row's size and place, so SQLite overwrites it.
OVERWRITE = """
UPDATE examples SET live = 0, restored = 0, label = zeroblob(length(CAST(label AS BLOB))),
    text = zeroblob(length(CAST(text AS BLOB))), key = zeroblob(length(key)),
    checksum = zeroblob(length(checksum))
WHERE id = ?
"""
SIZE = """
length(CAST(label AS BLOB)) + ifnull(length(CAST(text AS BLOB)), 0) + ifnull(length(key), 0)
+ length(checksum) + 13
"""  # 13: SQLite's overhead for a short row
# Labels and texts are read as bytes, because damaged UTF-8 could not be read otherwise.
_VERIFY_EXAMPLES = """
SELECT id, restored, CASE typeof(label) WHEN 'text' THEN CAST(label AS BLOB) END,
    typeof(text), CAST(text AS BLOB), key, checksum
FROM examples WHERE live
"""
_VERIFY_REQUESTS = "SELECT number, name, first, count, content, keys, checksum FROM requests"
_SELECT_ENTRIES = """
SELECT change, time_ms, name, action, first, count, label, new_label, checksum FROM audit
"""
_TAGS = {type(None): b"n", int: b"i", str: b"s", bytes: b"b"}
_SQLITE_TYPES = {type(None): "null", str: "text", bytes: "blob"}  # SQLite's names of the types


@dataclass(frozen=True)
class Totals:
    """The single row of the table of counters."""

    change: int = 0
    """Number of committed writes."""
    last: int = 0
    """Highest id ever assigned."""
    examples: int = 0
    example_checksums: bytes = _ZERO_CHECKSUM
    requests: int = 0
    request_checksums: bytes = _ZERO_CHECKSUM
    entries: int = 0
    """Number of entries of the audit trail."""
    entry_checksums: bytes = _ZERO_CHECKSUM

    def count_examples(self, sign: int, checksums: Sequence[bytes]) -> Self:
        """Return the totals after adding (1) or removing (-1) these examples."""
        count = self.examples + sign * len(checksums)
        combined = combine_checksums([self.example_checksums, *checksums])
        return replace(self, examples=count, example_checksums=combined)

    def count_requests(self, sign: int, checksums: Sequence[bytes]) -> Self:
        """Return the totals after adding (1) or removing (-1) these remembered requests."""
        count = self.requests + sign * len(checksums)
        combined = combine_checksums([self.request_checksums, *checksums])
        return replace(self, requests=count, request_checksums=combined)

    def count_entries(self, sign: int, checksums: Sequence[bytes]) -> Self:
        """Return the totals after adding (1) or removing (-1) these entries of the audit trail."""
        count = self.entries + sign * len(checksums)
        combined = combine_checksums([self.entry_checksums, *checksums])
        return replace(self, entries=count, entry_checksums=combined)

    def write(self, database: Database) -> None:
        columns = astuple(self)
        database.rows(
            "UPDATE counters SET change = ?, last = ?, examples = ?, example_checksums = ?,"
            " requests = ?, request_checksums = ?, entries = ?, entry_checksums = ?, checksum = ?",
            *(*columns, compute_checksum(*columns)),
        )


@dataclass(frozen=True)
class VerifiedCounts:
    """Counts made while every row of a journal was verified."""

    totals: Totals
    labels: Counter[str]
    restored_ids: frozenset[int]
    waste: int
    """Size of the overwritten rows, in bytes."""
    lessons: LessonIndex


# Checksums


def compute_checksum(*parts: int | str | bytes | None, size: int = _CHECKSUM_BYTES) -> bytes:
    """Return a digest of the parts, their types and their lengths."""
    digest = blake2b(digest_size=size)
    for part in parts:
        content = part if isinstance(part, bytes) else str("" if part is None else part).encode()
        digest.update(b"%s%d:" % (_TAGS[type(part)], len(content)))
        digest.update(content)
    return digest.digest()


def combine_checksums(checksums: Sequence[bytes]) -> bytes:
    """Return the exclusive or of checksums, which does not depend on their order."""
    total = 0
    for checksum in checksums:
        total ^= int.from_bytes(checksum, "big")
    return total.to_bytes(_CHECKSUM_BYTES, "big")


def describe_call(examples: Sequence[Row]) -> tuple[bytes, bytes]:
    """Return a digest of the examples of a call, and one digest per key.

    The digests remain when the examples are forgotten, because the name of a call must not be
    reused for other examples. Anyone who has the file and guesses an example exactly can confirm
    from them that it was present.
    """
    parts: list[str | bytes | None] = []
    for label, item, key in examples:
        parts += [label, item, key if item is None else None]
    keys = b"".join(compute_checksum(key) for _, _, key in examples)
    return compute_checksum(*parts, size=_CONTENT_BYTES), keys


def is_same_call(examples: Sequence[Row], content: bytes, keys: bytes) -> bool:
    """Return whether these examples match the digests of a call; texts may lack their keys."""
    given_content, given_keys = describe_call(examples)
    return given_content == content and all(
        (item is not None and key is None)
        or given_keys[place : place + _CHECKSUM_BYTES] == keys[place : place + _CHECKSUM_BYTES]
        for place, (_, item, key) in zip(
            range(0, len(keys), _CHECKSUM_BYTES), examples, strict=True
        )
    )


# Rows


def insert_example(database: Database, id: int, restored: bool, example: Row) -> bytes:
    """Write a live example and return its checksum."""
    label, item, key = example
    content = item.encode() if isinstance(item, str) else item
    checksum = compute_checksum(
        id, int(restored), label.encode(), _SQLITE_TYPES[type(item)], content, key
    )
    values = id, int(restored), label, item, key, checksum
    database.rows("INSERT INTO examples VALUES (?, 1, ?, ?, ?, ?, ?)", *values)
    return checksum


def insert_request(database: Database, *call: int | str | bytes | None) -> bytes:
    """Write a remembered request and return its checksum."""
    checksum = compute_checksum(*call)
    database.rows("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?)", *call, checksum)
    return checksum


def insert_entry(database: Database, entry: AuditEntry) -> bytes:
    """Write an entry of the audit trail and return its checksum."""
    row = entry.to_row()
    checksum = compute_checksum(*row)
    database.rows("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *row, checksum)
    return checksum


def delete_entries(database: Database, newest: int) -> list[bytes]:
    """Delete entries of the audit trail before the newest ones; return their checksums.

    Entries of lessons of which an example is left are kept: they say who taught it. Names that were
    changed are kept, because rows of the head are found by them.
    """
    gone = """
    FROM audit WHERE change <= (SELECT max(change) FROM audit) - ?
    AND action NOT IN ('rename', 'merge') AND NOT EXISTS (
        SELECT 1 FROM examples WHERE live AND id >= first AND id < first + count
        AND action IN ('learn', 'restore')
    )"""
    checksums = [checksum for (checksum,) in database.rows(f"SELECT checksum {gone}", newest)]
    database.rows(f"DELETE {gone}", newest)
    return checksums


def read_entries(database: Database, before: int, limit: int) -> list[AuditEntry]:
    """Return entries of the audit trail, newest first, that are older than change `before`."""
    select = f"{_SELECT_ENTRIES} WHERE change < ? ORDER BY change DESC LIMIT ?"
    return [AuditEntry(*row[:-1]) for row in database.rows(select, before, limit)]


def read_renames(database: Database) -> list[AuditEntry]:
    """Return the entries of labels that were renamed or merged, oldest first."""
    select = f"{_SELECT_ENTRIES} WHERE action IN ('rename', 'merge') ORDER BY change"
    return [AuditEntry(*row[:-1]) for row in database.rows(select)]


def index_lessons(database: Database) -> LessonIndex:
    """Read the audit trail and return the index of its lessons."""
    rows = database.stream(f"{_SELECT_ENTRIES} ORDER BY change")
    return LessonIndex(AuditEntry(*row[:-1]) for row in rows)


def copy_live_rows(database: Database) -> None:
    """Move the live examples to a new table and drop the one with overwritten rows."""
    database.rows("ALTER TABLE examples RENAME TO forgotten")
    SCHEMA.create(database, "examples")
    database.rows("INSERT INTO examples SELECT * FROM forgotten WHERE live ORDER BY id")
    database.rows("DROP TABLE forgotten")


def copy_renamed_rows(
    database: Database, ids: Mapping[int, int], label: str, *, clears_restored: bool
) -> list[bytes]:
    """Copy the live examples to a new table, some with another label; return their checksums.

    Changing rows in place would move others, of which copies could then stay in gaps. Here rows are
    only appended, in the order of their ids.

    Args:
        database: the journal.
        ids: new ids by old ids of the examples to rename. A new id is the old one, or higher than
            all others, in the same order.
        label: their new label.
        clears_restored: they no longer count as restored.
    """
    database.rows("ALTER TABLE examples RENAME TO forgotten")
    SCHEMA.create(database, "examples")
    checksums: list[bytes] = []
    last = 0

    def copy_up_to(id: int) -> None:
        copied = "SELECT * FROM forgotten WHERE live AND id > ? AND id < ? ORDER BY id"
        database.rows(f"INSERT INTO examples {copied}", last, id)

    def insert(id: int, new_id: int) -> None:
        select = "SELECT restored, text, key FROM forgotten WHERE id = ?"
        ((restored, item, key),) = database.rows(select, id)
        row = (label, item, key)
        is_restored = bool(restored) and not clears_restored
        checksums.append(insert_example(database, new_id, is_restored, row))

    for id in sorted(ids):
        copy_up_to(id)
        if ids[id] == id:
            insert(id, id)
        last = id
    copy_up_to(2**63 - 1)
    for id, new_id in sorted(ids.items()):
        if id != new_id:
            insert(id, new_id)
    database.rows("DROP TABLE forgotten")
    return checksums


def verify(database: Database) -> VerifiedCounts:
    """Read every row, compare all checksums, and return the counts.

    Raises:
        DamagedError: a checksum differs, or rows or acknowledged calls are missing.
    """
    try:
        found = _verify_rows(database)
    except (sqlite3.DatabaseError, LookupError, TypeError, ValueError) as error:
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_IOERR", "SQLITE_NOMEM")):
            raise
        raise _describe_damage(database, str(error)) from error
    if (missing := database.acknowledged - found.totals.change) > 0:
        raise _describe_damage(
            database,
            f"the last {missing} acknowledged calls are missing; if this is an old backup, delete "
            f"{database.path.name}.lock",
        )
    return found


def _verify_rows(database: Database) -> VerifiedCounts:
    ((*columns, checksum),) = database.rows("SELECT * FROM counters")
    if checksum != compute_checksum(*columns):
        raise _describe_damage(database, "the counters were altered")
    totals = Totals(*columns)
    labels, restored, checksums = Counter[str](), [], []
    for *parts, checksum in database.stream(_VERIFY_EXAMPLES):
        id, is_restored, label, *_ = parts
        if checksum != compute_checksum(*parts):
            raise _describe_damage(database, f"example {id} was altered")
        labels[label.decode()] += 1
        restored += [id] * is_restored
        checksums.append(checksum)
    found = Totals(totals.change, totals.last).count_examples(1, checksums)
    checksums = []
    for *parts, checksum in database.stream(_VERIFY_REQUESTS):
        if checksum != compute_checksum(*parts):
            raise _describe_damage(database, f"request {parts[0]} was altered")
        checksums.append(checksum)
    found = found.count_requests(1, checksums)
    checksums, lessons = [], LessonIndex()
    for *parts, checksum in database.stream(f"{_SELECT_ENTRIES} ORDER BY change"):
        if checksum != compute_checksum(*parts):
            raise _describe_damage(database, f"entry {parts[0]} of the audit trail was altered")
        checksums.append(checksum)
        lessons.add(AuditEntry(*parts))
    if found.count_entries(1, checksums) != totals:
        raise _describe_damage(
            database, f"{totals.examples} examples were written, {found.examples} were found"
        )
    ((waste,),) = database.rows(f"SELECT ifnull(sum({SIZE}), 0) FROM examples WHERE NOT live")
    return VerifiedCounts(totals, labels, frozenset(restored), waste, lessons)


def _describe_damage(database: Database, what: str) -> DamagedError:
    return DamagedError(f"{database.path}: damaged ({what}): restore it from a backup")


# New files, and earlier formats


def _fill(database: Database) -> None:
    columns = astuple(Totals())
    checksum = compute_checksum(*columns)
    database.rows("INSERT INTO counters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *columns, checksum)


def _upgrade(database: Database, format: int) -> None:
    rows = database.rows
    found = {name for (name,) in rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
    known = {"examples", "requests", "counters"}
    if format == 2 and found == known:
        _add_audit(database)
    elif format == 1 and found <= {*known, "restored"}:
        _add_checksums(database, found)
    else:
        raise _describe_damage(database, f"format {format}, tables {', '.join(sorted(found))}")


def _add_audit(database: Database) -> None:
    """Add an empty audit trail to a journal of format 2; its other rows stay as they are."""
    ((*columns, checksum),) = database.rows("SELECT * FROM counters")
    if checksum != compute_checksum(*columns):
        raise _describe_damage(database, "the counters were altered")
    database.rows("DROP TABLE counters")
    SCHEMA.create(database, "audit", "counters")
    _fill(database)
    Totals(*columns).write(database)


def _add_checksums(database: Database, found: set[str]) -> None:
    """Copy the tables of format 1, which had no checksums, to new ones."""
    rows = database.rows
    for name in found:
        rows(f"ALTER TABLE {name} RENAME TO earlier_{name}")
    SCHEMA.create(database, *_TABLES)
    _fill(database)
    marks = rows("SELECT id FROM earlier_restored") if "restored" in found else []
    restored = {id for (id,) in marks}
    totals = Totals(*rows("SELECT change, last FROM earlier_counters")[0])
    select = "SELECT id, label, text, key FROM earlier_examples WHERE live ORDER BY id"
    checksums = [
        insert_example(database, id, id in restored, (label, item, key))
        for id, label, item, key in database.stream(select)
    ]
    totals = totals.count_examples(1, checksums)
    calls = rows("SELECT number, name, first, count FROM earlier_requests ORDER BY number")
    checksums = [_copy_request(database, *call) for call in calls]
    totals.count_requests(1, checksums).write(database)
    for name in found:
        rows(f"DROP TABLE earlier_{name}")


def _copy_request(database: Database, number: int, name: str, first: int, count: int) -> bytes:
    """Copy a request of format 1. Its digests are null if any of its examples were forgotten."""
    select = "SELECT label, text, key FROM examples WHERE id >= ? AND id < ?"
    examples: list[Any] = database.rows(select, first, first + count)
    digests = describe_call(examples) if len(examples) == count else (None, None)
    return insert_request(database, number, name, first, count, *digests)


SCHEMA = Schema(JOURNAL_FORMAT, _TABLES, _fill, _upgrade)
