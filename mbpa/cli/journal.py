"""`mbpa journal copy`: copy a run between a directory and a PostgreSQL database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mbpa.cli.command import Command
from mbpa.errors import RunError

DESCRIPTION = """Where a run keeps what it was taught: in a directory, or in a PostgreSQL database
for several replicas. `mbpa journal COMMAND --help` describes a command."""


@dataclass(frozen=True)
class JournalCommands(Command):
    """Where a run keeps what it was taught: `mbpa journal copy`."""

    def run(self) -> int:
        raise AssertionError("the command line runs one of the commands of `mbpa journal`")


@dataclass(frozen=True)
class Copy(Command):
    """Copy a run from a directory to a PostgreSQL database, or back.

    Examples with their ids, request ids, the audit trail and the model are copied, all or nothing.
    The source stays as it is. From then on the two are separate runs.
    """

    source: tyro.conf.Positional[str]
    """Run directory that is not being served, or postgresql://USER@HOST/DATABASE."""
    target: tyro.conf.Positional[str]
    """Address of an empty database, or a directory.
    A password can be given in the file ~/.pgpass or the environment variable PGPASSWORD."""
    again: bool = False
    """Replace the run in the directory, including everything it was taught."""

    def run(self) -> int:
        from mbpa.serve import journal_copy
        from mbpa.serve.journal import JournalError
        from mbpa.serve.postgres_connection import is_database_url

        from_database, to_database = is_database_url(self.source), is_database_url(self.target)
        if from_database == to_database:
            raise RunError("one of the two must be a directory, the other postgresql://…")
        try:
            if to_database:
                if self.again:
                    raise RunError("--again is for directories: copy to an empty database")
                count = journal_copy.copy_to_database(Path(self.source), self.target)
            else:
                out = Path(self.target)
                count = journal_copy.copy_to_directory(self.source, out, replace=self.again)
        except JournalError as error:
            raise RunError(str(error)) from error
        print(f"copied {count} examples")
        return 0


COMMANDS: dict[str, type[Command]] = {"copy": Copy}
