"""Connections to PostgreSQL that are made again after a failure, and errors of one line."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator
from typing import Any

from mbpa.errors import MissingExtraError
from mbpa.serve.journal_errors import JournalError, UnavailableError

try:
    import psycopg
    from psycopg import conninfo, errors, pq
    from psycopg.types import numeric
except ImportError as error:
    raise MissingExtraError("a journal in PostgreSQL", extra="replicas") from error

CALL_LIMIT_S = 5.0  # after which a call to the database counts as failed
LOCK_LIMIT_S = 4.0  # for other writers, which take milliseconds
CONNECT_LIMIT_S = 5


class LimitedConnection(psycopg.Connection[Any]):
    """A connection on which no single wait for the database takes longer than a limit."""

    limit_s = CALL_LIMIT_S
    is_listening = False

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.limit_s if timeout is None else timeout)
        except psycopg.OperationalError:
            if timeout is None and not self.closed:  # what it answers later belongs to no call
                self.pgconn.finish()
            raise

    def is_alive(self) -> bool:
        """Return whether the server has neither closed nor ended the connection, as far as known.

        Between calls it sends nothing else, unless the connection listens to notifications.
        """
        if self.closed or self.is_listening:
            return not self.closed
        is_busy = self.info.transaction_status != pq.TransactionStatus.IDLE
        return is_busy or not select.select([self.fileno()], [], [], 0)[0]


class DatabaseLink:
    """A connection to a database that is made again after it broke; for one thread at a time.

    Args:
        url: address of the database.
        kind: what it is for; the database lists it under this name.
        limit_s: maximum seconds to wait for the database in a call.
    """

    def __init__(self, url: str, kind: str, *, limit_s: float = CALL_LIMIT_S) -> None:
        self._url, self._name, self._kind = url, describe_url(url), kind
        self._limit_s = limit_s
        self._lock = threading.RLock()
        self._connection: LimitedConnection | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[LimitedConnection]:
        """Yield the connection, in autocommit mode; raise `JournalError` for its errors."""
        with self._lock:
            try:
                if self._connection is None or not self._connection.is_alive():
                    self.close()
                    self._connection = self._connect()
                yield self._connection
            except psycopg.Error as error:
                if not isinstance(error, psycopg.OperationalError | psycopg.InternalError):
                    raise translate_error(self._name, error) from error
                self.close()
                raise translate_error(self._name, error) from error

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connect(self) -> LimitedConnection:
        connection = LimitedConnection.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_LIMIT_S,
            application_name=f"mbpa {self._kind}",
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
        )
        connection.limit_s = self._limit_s
        # All as bigint. By default two small numbers are smallint, and their sum may overflow.
        for dumper in (numeric.Int8Dumper, numeric.Int8BinaryDumper):
            connection.adapters.register_dumper(int, dumper)
        try:
            connection.execute(
                """
                SELECT set_config('default_transaction_isolation', 'read committed', false),
                    set_config('lock_timeout', %(lock)s, false),
                    set_config('idle_in_transaction_session_timeout', %(idle)s, false),
                    set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                        WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)
                """,
                {
                    "lock": f"{LOCK_LIMIT_S * 1000:.0f}ms",
                    "idle": f"{2 * self._limit_s * 1000:.0f}ms",
                },
            )
        except BaseException:
            connection.close()
            raise
        return connection


def is_database_url(place: str) -> bool:
    """Return whether a command was given a database rather than a directory."""
    return place.startswith(("postgresql://", "postgres://"))


def describe_url(url: str) -> str:
    """Return the address of a database without its password.

    Raises:
        JournalError: it is not an address of a PostgreSQL database.
    """
    if not is_database_url(url):
        raise JournalError("the database must be given as postgresql://USER@HOST/DATABASE")
    try:
        parts = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise JournalError(f"the address of the database is wrong: {_first_line(error)}") from None
    user = f"{parts['user']}@" if parts.get("user") else ""
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"postgresql://{user}{parts.get('host') or 'localhost'}{port}/{parts.get('dbname', '')}"


def translate_error(name: str, error: psycopg.Error) -> JournalError:
    """Return our error for one of PostgreSQL's, which says in one line what to do."""
    if isinstance(error, errors.DiskFull):
        return UnavailableError(f"{name}: the disk of the database is full: free some space")
    if isinstance(error, errors.ReadOnlySqlTransaction):
        return UnavailableError(f"{name} takes no writes: it is a standby, or set to read-only")
    if isinstance(error, errors.LockNotAvailable):
        return UnavailableError(f"{name} is busy with another write: try again")
    if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
        return JournalError(f"{name} holds no run: put one there with `mbpa journal copy`")
    if isinstance(error, errors.InsufficientPrivilege):
        return JournalError(f"{name}: {_first_line(error)}: grant it to the user")
    if isinstance(error, psycopg.OperationalError):
        why = _first_line(error) or type(error).__name__
        return UnavailableError(f"{name} cannot be used: {why}")
    return JournalError(f"{name}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """Return the essence of a message of libpq, which may list an attempt per line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line.rpartition("FATAL: ")[2].strip() or line
