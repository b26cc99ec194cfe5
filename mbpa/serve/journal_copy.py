"""`mbpa journal copy`: copy a run between a directory and a PostgreSQL database, both ways.

Ids, request ids, the audit trail, the number of changes and the model stay the same, so the answers
are equal to the bit.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mbpa import files
from mbpa.errors import RunError
from mbpa.serve import journal_schema, postgres_schema
from mbpa.serve.audit import AuditEntry
from mbpa.serve.backup import Archive
from mbpa.serve.database import BACKUP_SUFFIX, Database
from mbpa.serve.example_journal import Example, ExampleFilter, ExampleJournal
from mbpa.serve.export import open_journal
from mbpa.serve.journal import Journal
from mbpa.serve.journal_errors import JournalError
from mbpa.serve.journal_schema import SCHEMA, Row, Totals
from mbpa.serve.postgres_connection import DatabaseLink, describe_url
from mbpa.serve.postgres_journal import (
    KEPT_COLUMNS,
    PostgresJournal,
    digest_run_file,
    read_state,
    require_run,
    require_server,
)
from mbpa.serve.run_directory import replace_directory, reporting_errors
from mbpa.serve.run_info import JOURNAL_FILE, RUN_FILE, RunInfo
from mbpa.serve.shared_run import pack_model, unpack_model

COPY_LIMIT_S = 600.0  # for one step of a copy in the database
EXAMPLES_PER_PART = 1000
DATABASE_ACTIONS = ("retrain", "copy")  # entries that a journal in a file does not have


def copy_to_database(directory: Path, url: str) -> int:
    """Copy a run that is not being served to a database; return the number of examples.

    Everything is copied, or nothing.

    Raises:
        RunError: the run cannot be read.
        JournalError: the database cannot be used, or holds a run already.
    """
    name = describe_url(url)
    link = DatabaseLink(url, "copy", limit_s=COPY_LIMIT_S)
    with open_journal(directory) as journal, link.use() as connection:
        try:
            info = RunInfo.read(directory)
            run_file = (directory / RUN_FILE).read_bytes()
            model_files = pack_model(directory / info.model)
            with connection.transaction():
                _create(connection, name)
                _write_examples(connection, journal)
                _write_history(connection, journal)
                connection.execute(
                    "SELECT mbpa.change_model(%b, NULL, 'copy', %b, %b, %b, %b, %b)",
                    [
                        int(time.time() * 1000),
                        digest_run_file(run_file),
                        run_file,
                        model_files,
                        info.trained_examples,
                        0,
                    ],
                )
            connection.execute("ANALYZE mbpa.examples, mbpa.events")
            return len(journal)
        finally:
            link.close()


def _create(connection: Any, name: str) -> None:
    require_server(connection, name)
    ((encoding,),) = connection.execute("SHOW server_encoding")
    if encoding != "UTF8":
        raise JournalError(f"{name}: the encoding of the database must be UTF8, got {encoding}")
    ((schema,),) = connection.execute("SELECT to_regnamespace('mbpa')::text")
    if schema is not None:
        raise JournalError(f"{name} holds a run already: copy to an empty database")
    connection.execute(postgres_schema.CREATE)


def _write_examples(connection: Any, journal: Journal) -> None:
    connection.execute(
        "CREATE TEMPORARY TABLE copied (LIKE mbpa.examples INCLUDING STORAGE) ON COMMIT DROP"
    )
    columns = "id, is_restored, label, text, picture, key, time_ms, name, checksum"
    types = ["int8", "bool", "text", "text", "bytea", "bytea", "int8", "text", "int8"]
    with connection.cursor().copy(f"COPY copied ({columns}) FROM STDIN BINARY") as copy:
        copy.set_types(types)
        for example, taught_ms, by in _list_examples(journal):
            is_restored = example.id in journal.restored_ids
            item = example.text, example.image, example.key
            copy.write_row((example.id, is_restored, example.label, *item, taught_ms, by, 0))
    connection.execute(
        f"""
        INSERT INTO mbpa.examples ({columns})
        SELECT id, is_restored, label, text, picture, key, time_ms, name,
            mbpa.digest(id, is_restored, label, text, picture, key) FROM copied ORDER BY id
        """
    )


def _list_examples(journal: Journal) -> Iterator[tuple[Example, int | None, str | None]]:
    """Return each example with the time of its teaching and the name of the token."""
    last = 0
    while part := list(journal.examples(last, EXAMPLES_PER_PART)):
        listed = journal.list_examples(ExampleFilter(), limit=len(part), after=last)
        for example, about in zip(part, listed, strict=True):
            assert example.id == about.id
            yield example, about.taught_ms, about.by
        last = part[-1].id


def _write_history(connection: Any, journal: Journal) -> None:
    """Write the audit trail, the remembered requests, and the head."""
    columns = f"{KEPT_COLUMNS}, ids"
    with connection.cursor().copy(f"COPY mbpa.events ({columns}) FROM STDIN") as copy:
        for entry in _list_entries(journal):
            copy.write_row((*entry.to_row(), []))
    requests = journal.requests()
    with connection.cursor().copy("COPY mbpa.requests FROM STDIN BINARY") as copy:
        copy.set_types(["int8", "bytea", "int8", "int8", "bytea", "bytea"])
        for number, name, *rest in requests:
            copy.write_row((number, name.encode(), *rest))
    run = uuid.uuid4()
    connection.execute(
        """
        INSERT INTO mbpa.head SELECT true, %s, %s, %s, sha256(%s), %s, %s,
            count(*), coalesce(bit_xor(checksum), 0) FROM mbpa.examples
        """,
        [
            postgres_schema.FORMAT,
            run,
            journal.change,
            run.bytes,
            journal.last,
            max((request[0] for request in requests), default=0),
        ],
    )


def _list_entries(journal: Journal) -> Iterator[AuditEntry]:
    before: int | None = None
    while part := journal.audit(limit=EXAMPLES_PER_PART, before=before):
        yield from part
        before = part[-1].change


def copy_to_directory(url: str, out: Path, *, replace: bool = False) -> int:
    """Copy the run of a database, as of one moment, to a directory; return the number of examples.

    Raises:
        RunError: the directory is not free.
        JournalError: the database cannot be used.
    """
    link = DatabaseLink(url, "copy", limit_s=COPY_LIMIT_S)
    try:
        with reporting_errors(out), replace_directory(out, replace=replace) as directory:
            return write_copy(link, describe_url(url), directory)
    finally:
        link.close()


def write_copy(link: DatabaseLink, name: str, directory: Path) -> int:
    """Write the run of a database, as of one moment, to an empty directory."""
    with link.use() as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        require_run(connection, name)
        state = read_state(connection, EXAMPLES_PER_PART, with_pictures=True)
        info = RunInfo.parse(state.run_file, f"{RUN_FILE} in {name}")
        unpack_model(state.model_files, directory / info.model)
        examples = (
            (each.id, each.id in state.restored_ids, (each.label, each.item, each.key))
            for part in state.parts
            for each in part
        )
        entries = connection.execute(
            f"SELECT {KEPT_COLUMNS} FROM mbpa.events WHERE action <> ALL(%s) ORDER BY position",
            [list(DATABASE_ACTIONS)],
        )
        kept = [AuditEntry(*row) for row in entries]
        requests = [
            (number, name.decode(), *rest)
            for number, name, *rest in connection.execute(
                "SELECT * FROM mbpa.requests ORDER BY number", binary=True
            )
        ]
        totals = Totals(change=state.change, last=state.last)
        _write_journal(directory / JOURNAL_FILE, totals, examples, requests, kept)
    files.write_durably(directory / RUN_FILE, state.run_file)
    with Journal(directory / JOURNAL_FILE, writable=False) as journal:  # verifies what was written
        if len(journal) != state.count:
            raise RunError(f"{name}: {state.count} examples were written, {len(journal)} found")
    return state.count


def make_shared_archive(journal: ExampleJournal) -> Archive:
    """Make the archive of a run in a database; writes do not wait for it."""
    assert isinstance(journal, PostgresJournal)
    link = journal.open_link("backup", limit_s=COPY_LIMIT_S)
    try:
        with tempfile.TemporaryDirectory(prefix="mbpa-") as folder:
            directory = Path(folder)
            write_copy(link, journal.name, directory)
            with Journal(directory / JOURNAL_FILE) as copied:
                return Archive(directory, copied, directory / f"{JOURNAL_FILE}{BACKUP_SUFFIX}")
    finally:
        link.close()


def _write_journal(
    path: Path,
    totals: Totals,
    examples: Iterator[tuple[int, bool, Row]],
    requests: list[tuple[Any, ...]],
    entries: list[AuditEntry],
) -> None:
    database = Database(path, SCHEMA, create=True, writable=True)
    try:
        with database.writing(), database.transaction():
            added = [
                journal_schema.insert_example(database, id, is_restored, row)
                for id, is_restored, row in examples
            ]
            totals = totals.count_examples(1, added)
            added = [journal_schema.insert_request(database, *call) for call in requests]
            totals = totals.count_requests(1, added)
            added = [journal_schema.insert_entry(database, entry) for entry in entries]
            totals.count_entries(1, added).write(database)
        with database.writing():
            database.empty_log()
            database.acknowledge(totals.change)
    finally:
        database.close()
