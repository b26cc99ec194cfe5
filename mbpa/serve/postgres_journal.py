"""A journal in PostgreSQL: an ordered log that any number of replicas write and follow.

A call is durable when it returns, and takes effect as a whole or not at all. PostgreSQL does the
work: each write is one call of a function there (`postgres_schema`). To follow the log, a replica
remembers the position and the hash of the last event that it has read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from mbpa.serve import journal_schema, postgres_schema
from mbpa.serve.audit import AuditEntry
from mbpa.serve.example_journal import (
    AUDITED_CHANGES,
    REMEMBERED_REQUESTS,
    Example,
    ExampleFilter,
    InputError,
    ListedExample,
    make_example,
    validate_request,
    validate_row,
)
from mbpa.serve.journal_errors import DamagedError, JournalError, UnavailableError
from mbpa.serve.journal_schema import Row
from mbpa.serve.postgres_connection import DatabaseLink, LimitedConnection, describe_url
from mbpa.serve.shared_journal import Changes, ReplicaStatus, SharedJournal, SharedState

TELLING_INTERVAL_S = 1.0
MAX_CHANGES_AT_ONCE = 10_000  # a replica that is further behind loads everything anew
KEPT_COLUMNS = "position, time_ms, name, action, first, count, label, new_label"
_SELECT = """
SELECT id, label, text, {picture}, key FROM mbpa.examples WHERE {where} ORDER BY id
"""
_PICTURE_WITHOUT_KEY = "CASE WHEN key IS NULL THEN picture END"


@dataclass(frozen=True)
class ConnectedReplica:
    """A replica that is connected to the database, as the database lists it."""

    name: str
    position: int


class PostgresJournal(SharedJournal):
    """Taught examples in a PostgreSQL database, shared by any number of processes.

    Args:
        url: address of the database, ``postgresql://…``.
        clock: returns the seconds since 1970, UTC.

    Raises:
        JournalError: the address is wrong, the database cannot be used, holds no run, or was
            written by a newer version.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self._url, self._name = url, describe_url(url)
        self._clock, self._pid = clock, os.getpid()
        # One connection each for writing, following, listening, and answering questions.
        self._writer, self._reader, self._listener, self._browser = (
            DatabaseLink(url, kind) for kind in ("writer", "reader", "listener", "browser")
        )
        self._position, self._hash, self._head = 0, b"", 0
        self._restored, self._renames = frozenset[int](), list[AuditEntry]()
        self._outage: str | None = None
        self._is_followed = False  # by a thread that notices when the database is back
        self._current_at = self._snapshot_at = time.monotonic()
        self._snapshot, self._told_position, self._told_at = 0, -1, 0.0
        try:
            with self._browser.use() as connection:
                self._run = require_run(connection, self._name)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def read_only(self) -> str | None:
        """Reason why the database cannot be used now; it is tried again once a second."""
        return self._outage

    def require_owner(self) -> None:
        if os.getpid() != self._pid:
            raise JournalError(f"{self._name} was opened by another process: open it again here")

    def close(self) -> None:
        for link in (self._writer, self._reader, self._listener, self._browser):
            link.close()

    # Writing

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
        if not examples:
            return []
        content, key_digests = journal_schema.describe_call(examples)
        row = self._write(
            "SELECT * FROM mbpa.learn(%b, %b::text, %b, %b::text[], %b::text[], %b::bytea[],"
            " %b::bytea[], %b::bytea, %b, %b, %b, %b)",
            self._now_ms(),
            by,
            restoring,
            [label for label, _, _ in examples],
            [item if isinstance(item, str) else None for _, item, _ in examples],
            [item if isinstance(item, bytes) else None for _, item, _ in examples],
            [key for _, _, key in examples],
            None if request is None else request.encode(),
            content,
            key_digests,
            REMEMBERED_REQUESTS,
            AUDITED_CHANGES,
        )
        _, first, count, known_content, known_keys, is_known = row
        if is_known:
            return _match_request(request, examples, first, count, known_content, known_keys)
        return list(range(first, first + count))

    def find_repeated(self, examples: Sequence[Row], request: str) -> list[int] | None:
        validate_request(request)
        select = "SELECT first, count, content, keys FROM mbpa.requests WHERE name = %b"
        with self._using(self._writer) as connection:
            call = connection.execute(select, [request.encode()], binary=True).fetchone()
        return None if call is None else _match_request(request, examples, *call)

    def forget(
        self,
        ids: Sequence[SupportsIndex] = (),
        label: str | None = None,
        *,
        by: str | None = None,
    ) -> list[int]:
        numbers = [id for id in map(operator.index, ids) if 0 < id < 2**63]
        row = self._write(
            "SELECT * FROM mbpa.forget(%b, %b::text, %b::bigint[], %b::text, %b)",
            self._now_ms(),
            by,
            numbers,
            label,
            AUDITED_CHANGES,
        )
        return list(row[1])

    def rename(
        self,
        label: str,
        new_label: str,
        *,
        last_trained: int | None = None,
        by: str | None = None,
    ) -> dict[int, int]:
        validate_row(new_label, "", None)
        if label == new_label:
            return {}
        row = self._write(
            "SELECT * FROM mbpa.rename(%b, %b::text, %b::text, %b::text, %b::bigint, %b)",
            self._now_ms(),
            by,
            label,
            new_label,
            last_trained,
            AUDITED_CHANGES,
        )
        return dict(zip(row[1], row[2], strict=True))

    def replace_model(
        self, run_file: bytes, model_files: bytes, *, examples: int, by: str | None = None
    ) -> None:
        self._write(
            "SELECT mbpa.change_model(%b, %b::text, 'retrain', %b, %b, %b, %b, %b)",
            self._now_ms(),
            by,
            digest_run_file(run_file),
            run_file,
            model_files,
            examples,
            AUDITED_CHANGES,
        )

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        with self._using(self._writer) as connection, connection.transaction():
            connection.execute("SELECT FROM mbpa.head FOR UPDATE")
            yield

    def _write(self, statement: str, *arguments: Any) -> Any:
        with self._using(self._writer) as connection:
            return connection.execute(statement, arguments, binary=True).fetchone()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # Following

    def read_changes(self) -> Changes | None:
        asked_at = time.monotonic()
        with self._using(self._reader) as connection:
            cursor = connection.cursor(binary=True)
            since = {"after": self._position, "most": MAX_CHANGES_AT_ONCE}
            rows = cursor.execute(postgres_schema.READ_CHANGES, since)
            found = rows.fetchall()
        events = sorted(row for row in found if row[1] is not None)
        if not events or events[0][:2] != (self._position, self._hash):
            return None
        positions = [event[0] for event in events]
        if positions != list(range(self._position, self._position + len(events))):
            raise DamagedError(f"{self._name}: damaged: events are missing from the log")
        present = [row for row in found if row[1] is None]
        changes = self._make_changes(events[1:], present)
        self._position, self._hash = events[-1][0], events[-1][1]
        self._head, self._current_at = max(self._head, self._position), asked_at
        self._outage = None
        return changes

    def _make_changes(self, events: Sequence[Any], present: Sequence[Any]) -> Changes:
        touched = frozenset(id for event in events for id in event[9])
        restored = {row[0] for row in present if row[10]}
        self._restored = (self._restored - touched) | restored
        renames = [_make_entry(event) for event in events if event[2] in ("rename", "merge")]
        self._renames += renames
        return Changes(
            position=events[-1][0] if events else self._position,
            touched=touched,
            present=[Example(row[0], row[3], row[11], row[12]) for row in sorted(present)],
            renames=bool(renames),
            replaces_model=any(event[2] in ("retrain", "copy") for event in events),
        )

    @contextlib.contextmanager
    def load(self, *, size: int) -> Iterator[SharedState]:
        asked_at = time.monotonic()
        with self._using(self._reader) as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            run = require_run(connection, self._name)
            if run != self._run:
                raise JournalError(f"{self._name} holds another run since: restart")
            state = read_state(connection, size)
            parts = list(state.parts)
        # The transaction is over: the caller may take longer than one may be idle.
        self._current_at, self._outage = asked_at, None
        yield replace(state, parts=iter(parts))

    def adopt(self, state: SharedState) -> None:
        self._position, self._hash = state.change, state.hash
        self._head = self._snapshot = state.change
        self._restored, self._renames = state.restored_ids, list(state.renames)
        self._snapshot_at = time.monotonic()

    def wait_for_news(self, timeout_s: float) -> int | None:
        with self._using(self._listener) as connection:
            self._is_followed = True
            if not connection.is_listening:
                connection.execute(f"LISTEN {postgres_schema.CHANNEL}")
                connection.is_listening = True
                return None  # what happened before is not announced
            self._tell_position(connection)
            news = list(connection.notifies(timeout=timeout_s, stop_after=1))
            if news:
                news += connection.notifies(timeout=0)
            self._head = max([self._head, *(int(each.payload) for each in news)])
            return self._head if news else None

    def _tell_position(self, connection: LimitedConnection) -> None:
        """Let the database list how far this replica is, at most once a second."""
        now = time.monotonic()
        if self._told_position != self._position and now > self._told_at + TELLING_INTERVAL_S:
            self._told_position, self._told_at = self._position, now
            name = f"mbpa {socket.gethostname()[:20]}:{self._pid} at {self._position}"
            connection.execute("SELECT set_config('application_name', %s, false)", [name])

    @property
    def status(self) -> ReplicaStatus:
        now = time.monotonic()
        return ReplicaStatus(
            position=self._position,
            lag=max(0, self._head - self._position),
            stale_s=now - self._current_at,
            snapshot=self._snapshot,
            snapshot_age_s=now - self._snapshot_at,
        )

    # Contents

    @property
    def change(self) -> int:
        return self._position

    @property
    def restored_ids(self) -> frozenset[int]:
        return self._restored

    def renames(self) -> list[AuditEntry]:
        return list(self._renames)

    def examples(
        self, after: int = 0, limit: int | None = None, *, with_pictures: bool = True
    ) -> Iterator[Example]:
        picture = "picture" if with_pictures else _PICTURE_WITHOUT_KEY
        select = _SELECT.format(picture=picture, where="id > %b") + " LIMIT %b"
        with self._using(self._browser) as connection:
            rows = connection.execute(select, [after, limit], binary=True).fetchall()
        return (_make_example(row) for row in rows)

    def example(self, id: int) -> Example | None:
        if not 0 < id < 2**63:
            return None
        select = _SELECT.format(picture="picture", where="id = %b")
        with self._using(self._browser) as connection:
            row = connection.execute(select, [id], binary=True).fetchone()
        return None if row is None else _make_example(row)

    def list_examples(
        self,
        wanted: ExampleFilter,
        *,
        limit: int,
        after: int | None = None,
        newest_first: bool = False,
        last_trained: int = 0,
    ) -> list[ListedExample]:
        trained = "(id <= %(last_trained)s OR is_restored)"
        where = ["true"]
        if after is not None:
            where.append(f"id {'<' if newest_first else '>'} %(after)s")
        if wanted.label is not None:
            where.append("label = %(label)s")
        if wanted.since_ms is not None:
            where.append("time_ms >= %(since)s")
        if wanted.is_trained is not None:
            where.append(f"{trained} = %(is_trained)s")
        select = f"""
        SELECT id, label, text, {trained}, time_ms, name FROM mbpa.examples
        WHERE {" AND ".join(where)} ORDER BY id {"DESC" if newest_first else "ASC"} LIMIT %(limit)s
        """
        values = {
            "after": after,
            "label": wanted.label,
            "since": wanted.since_ms,
            "is_trained": wanted.is_trained,
            "last_trained": last_trained,
            "limit": limit,
        }
        with self._using(self._browser) as connection:
            return [ListedExample(*row) for row in connection.execute(select, values)]

    def audit(self, *, limit: int, before: int | None = None) -> list[AuditEntry]:
        select = f"""
        SELECT {KEPT_COLUMNS} FROM mbpa.events WHERE position < %s ORDER BY position DESC LIMIT %s
        """
        first = 2**63 - 1 if before is None else before
        with self._using(self._browser) as connection:
            return [AuditEntry(*row) for row in connection.execute(select, [first, limit])]

    def require_same_run(self, run_file: bytes, place: object) -> None:
        with self._using(self._browser) as connection:
            require_same_run(connection, self._name, digest_run_file(run_file), place)

    def read_model(self) -> tuple[bytes, bytes]:
        with self._using(self._browser) as connection:
            return _read_model(connection)

    def open_link(self, kind: str, *, limit_s: float) -> DatabaseLink:
        """Return a further connection to the database."""
        return DatabaseLink(self._url, kind, limit_s=limit_s)

    @contextlib.contextmanager
    def _using(self, link: DatabaseLink) -> Iterator[LimitedConnection]:
        """Use a connection; remember that the database is away if it fails.

        While it is away, only following it is tried, so that no client waits for it.
        """
        self.require_owner()
        is_following = link in (self._reader, self._listener)
        if self._outage is not None and self._is_followed and not is_following:
            raise UnavailableError(self._outage)
        try:
            with link.use() as connection:
                yield connection
            if not self._is_followed:
                self._outage = None
        except UnavailableError as error:
            self._outage = str(error)
            raise


def require_run(connection: LimitedConnection, name: str) -> str:
    """Return the identity of the run in a database; raise `JournalError` if it cannot be used."""
    require_server(connection, name)
    ((table,),) = connection.execute("SELECT to_regclass('mbpa.head')::text")
    select = "SELECT format, run::text FROM mbpa.head"
    head = connection.execute(select).fetchone() if table else None
    if head is None:
        raise JournalError(f"{name} holds no run: put one there with `mbpa journal copy`")
    if head[0] > postgres_schema.FORMAT:
        raise JournalError(f"{name} was written by a newer mbpa: upgrade mbpa")
    return str(head[1])


def require_server(connection: LimitedConnection, name: str) -> None:
    """Raise `JournalError` if a server is too old."""
    version = connection.info.server_version
    if version < postgres_schema.MIN_SERVER_VERSION:
        least = postgres_schema.MIN_SERVER_VERSION // 10000
        raise JournalError(f"{name}: PostgreSQL must be {least} or later, got {version // 10000}")


def require_same_run(connection: LimitedConnection, name: str, digest: str, place: object) -> None:
    """Raise `JournalError` unless the `run.json` of this digest is, or was, that of the run."""
    select = "SELECT count(*) FROM mbpa.models WHERE digest = %s"
    ((count,),) = connection.execute(select, [digest])
    if not count:
        raise JournalError(f"{name} holds another run than {place}")


def read_state(
    connection: LimitedConnection, size: int, *, with_pictures: bool = False
) -> SharedState:
    """Read everything that a run holds, inside a transaction that sees one state."""
    head = connection.execute(
        "SELECT position, last_id, examples, hash FROM mbpa.head", binary=True
    ).fetchone()
    assert head is not None
    run_file, model_files = _read_model(connection)
    renames = connection.execute(
        f"SELECT {KEPT_COLUMNS} FROM mbpa.events WHERE action IN ('rename', 'merge')"
        " ORDER BY position"
    )
    entries = tuple(AuditEntry(*row) for row in renames)
    restored = connection.execute("SELECT id FROM mbpa.examples WHERE is_restored")
    picture = "picture" if with_pictures else _PICTURE_WITHOUT_KEY
    return SharedState(
        change=head[0],
        last=head[1],
        count=head[2],
        parts=_read_parts(connection, picture, size),
        hash=head[3],
        run_file=run_file,
        model_files=model_files,
        renames=entries,
        restored_ids=frozenset(id for (id,) in restored),
    )


def _read_parts(
    connection: LimitedConnection, picture: str, size: int
) -> Iterator[Sequence[Example]]:
    select = _SELECT.format(picture=picture, where="true")
    with connection.cursor("examples", binary=True) as cursor:
        cursor.execute(select, binary=True)
        while rows := cursor.fetchmany(size):
            yield [_make_example(row) for row in rows]


def _read_model(connection: LimitedConnection) -> tuple[bytes, bytes]:
    select = "SELECT info, files FROM mbpa.models ORDER BY position DESC LIMIT 1"
    row = connection.execute(select, binary=True).fetchone()
    if row is None or row[1] is None:
        raise DamagedError("the database has no model: copy the run there again")
    return row[0], row[1]


def list_replicas(connection: LimitedConnection) -> list[ConnectedReplica]:
    """Return the replicas that are connected to a database."""
    select = """
    SELECT substring(application_name from '^mbpa (.*) at \\d+$'),
        substring(application_name from '\\d+$')::bigint
    FROM pg_stat_activity WHERE datname = current_database()
    AND application_name ~ '^mbpa .* at \\d+$' ORDER BY 1
    """
    return [ConnectedReplica(*row) for row in connection.execute(select)]


def digest_run_file(content: bytes) -> str:
    """Return what identifies a `run.json`."""
    return hashlib.sha256(content).hexdigest()


def _match_request(
    request: str | None,
    examples: Sequence[Row],
    first: int,
    count: int,
    content: bytes | None,
    keys: bytes | None,
) -> list[int]:
    """Return the ids of an earlier call; raise `InputError` if it had other examples."""
    if content is None or keys is None:
        raise InputError(
            f"request {request!r} was used for examples forgotten since: choose another name"
        )
    if count != len(examples) or not journal_schema.is_same_call(examples, content, keys):
        raise InputError(f"request {request!r} was used for other examples: choose another name")
    return list(range(first, first + count))


def _make_example(row: Sequence[Any]) -> Example:
    id, label, text, picture, key = row
    return make_example(id, label, text if picture is None else picture, key)


def _make_entry(event: Sequence[Any]) -> AuditEntry:
    position, _, action, label, new_label, time_ms, name, first, count = itertools.islice(event, 9)
    return AuditEntry(position, time_ms, name, action, first, count, label, new_label)
