"""`mbpa check --database`: verify a run in a database, and list the replicas that serve it."""

from __future__ import annotations

from pathlib import Path

from mbpa.errors import RunError
from mbpa.serve import postgres_schema
from mbpa.serve.journal_errors import DamagedError
from mbpa.serve.postgres_connection import DatabaseLink, LimitedConnection, describe_url
from mbpa.serve.postgres_journal import (
    digest_run_file,
    list_replicas,
    read_state,
    require_run,
    require_same_run,
)
from mbpa.serve.run_info import RUN_FILE, RunInfo, stack_keys
from mbpa.serve.shared_run import read_shared_model

CHECK_LIMIT_S = 600.0  # for one step of a check in the database
EXAMPLES_PER_PART = 1000


def check_database(url: str, directory: Path) -> list[tuple[str, str]]:
    """Verify the checksums of a run in a database, and that its parts fit together.

    Args:
        url: address of the database.
        directory: the run that it must hold.

    Returns:
        The parts that were verified, each as a name and a few words.

    Raises:
        RunError: the directory is not a run, or the model in the database is damaged.
        JournalError: the database cannot be used, holds another run, or is damaged.
    """
    RunInfo.read(directory)
    name = describe_url(url)
    link = DatabaseLink(url, "check", limit_s=CHECK_LIMIT_S)
    try:
        with link.use() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            require_run(connection, name)
            run_file = (directory / RUN_FILE).read_bytes()
            require_same_run(connection, name, digest_run_file(run_file), directory)
            found = _check_rows(connection, name)
            return [*found, *_describe_replicas(connection)]
    finally:
        link.close()


def _check_rows(connection: LimitedConnection, name: str) -> list[tuple[str, str]]:
    for select, what in (
        (postgres_schema.FIND_ALTERED, "example {} was altered"),
        (postgres_schema.FIND_UNLINKED, "event {} of the log was altered"),
    ):
        if (row := connection.execute(select).fetchone()) is not None:
            raise DamagedError(f"{name}: damaged ({what.format(row[0])}): restore a backup")
    ((examples, checksum),) = connection.execute("SELECT examples, checksum FROM mbpa.head")
    ((count, combined),) = connection.execute(postgres_schema.COUNT)
    if (count, combined) != (examples, checksum):
        raise DamagedError(
            f"{name}: damaged ({examples} examples were written, {count} were found): restore a "
            "backup"
        )
    state = read_state(connection, EXAMPLES_PER_PART)
    info, _ = read_shared_model(name, state.run_file, state.model_files, "cpu")
    labels = set()
    for part in state.parts:
        stack_keys(name, part, info.key_dim)
        labels |= {each.label for each in part}
    if state.last < info.trained_examples:
        raise RunError(f"{name}: the model was trained with examples that are not there")
    return [
        ("run.json", f"{len(info.labels)} trained labels, keys of {info.key_dim} numbers"),
        ("model", f"{len(state.model_files)} bytes"),
        ("journal", f"{count} examples of {len(labels)} labels at position {state.change}"),
    ]


def _describe_replicas(connection: LimitedConnection) -> list[tuple[str, str]]:
    ((head,),) = connection.execute("SELECT position FROM mbpa.head")
    found = [
        (
            "replica",
            f"{each.name} at position {each.position}, {max(0, head - each.position)} behind",
        )
        for each in list_replicas(connection)
    ]
    return found or [("replicas", "none is connected")]
