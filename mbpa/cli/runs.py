"""The commands that maintain a run, or the service that serves it, such as `mbpa export`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import RunError


@dataclass(frozen=True)
class RunCommand(Command):
    """A command for a run directory, or for a running service."""

    run_or_url: tyro.conf.Positional[str]
    """Run directory written by `mbpa teach`.
    While it is being served, the URL of the service instead, such as http://127.0.0.1:8000."""
    token: str | None = None
    """Token of the service, if it requires one; by default the environment variable MBPA_TOKEN."""


@dataclass(frozen=True)
class Export(RunCommand):
    """Write the examples of a run to a file that `mbpa teach` and spreadsheets read.

    A column says which examples were trained and which were taught later. `mbpa teach` makes a
    classifier with the same answers from it.
    """

    out: Path = Path("taught.csv")
    """File to write: JSONL if its name ends in .jsonl, else CSV.
    Pictures are written to a folder beside it."""
    label: str | None = None
    """Export examples of this label only."""
    origin: Literal["trained", "taught"] | None = None
    """Export only what the run was trained with, or only what it was taught later."""
    again: bool = False
    """Replace an existing file."""

    def run(self) -> int:
        from mbpa.serve import client, export

        if self.out.exists() and not self.again:
            raise RunError(f"{self.out} exists: use --again to replace it")
        source: export.ExampleSource
        if client.is_url(self.run_or_url):
            source = export.ServiceSource(_open_service(self.run_or_url, self.token))
        else:
            source = export.RunSource(Path(self.run_or_url))
        with source:
            count = export.export_examples(source, self.out, label=self.label, origin=self.origin)
        print(f"wrote {count} {'example' if count == 1 else 'examples'} to {self.out}")
        return 0


@dataclass(frozen=True)
class Audit(RunCommand):
    """List who taught and forgot what and when, newest first."""

    limit: int = 20
    """Number of changes to list."""

    def run(self) -> int:
        from mbpa.serve import client, export
        from mbpa.serve.schemas import MAX_LISTED_PER_CALL, make_audited_change

        if not 1 <= self.limit <= MAX_LISTED_PER_CALL:
            raise RunError(f"limit must be between 1 and {MAX_LISTED_PER_CALL}, got {self.limit}")
        if client.is_url(self.run_or_url):
            service = _open_service(self.run_or_url, self.token)
            changes = service.get("/audit", {"limit": self.limit})["changes"]
        else:
            with export.open_journal(Path(self.run_or_url)) as journal:
                found = journal.audit(limit=self.limit)
            changes = [make_audited_change(each).model_dump() for each in found]
        for change in changes:
            print(_describe_change(change))
        if not changes:
            print("no change is recorded")
        return 0


def _describe_change(change: Mapping[str, Any]) -> str:
    """Return a line about an entry of the audit trail, as `GET /audit` returns it."""
    count, first = change["count"], change["first"]
    what = f"example {first}" if count == 1 else f"{count} examples from {first} on"
    return f"{change['time']}  {change['by'] or '-':12}  {change['action']:8}  {what}"


def _open_service(url: str, token: str | None) -> Any:
    from mbpa.serve.client import ServiceClient

    return ServiceClient(url, token or os.environ.get("MBPA_TOKEN") or None)
