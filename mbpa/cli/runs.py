"""The commands that maintain a run, or the service that serves it, such as `mbpa export`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import RunError


@dataclass(frozen=True, kw_only=True)
class RunCommand(Command):
    """A command for a run directory, or for a running service."""

    run_or_url: tyro.conf.Positional[str]
    """Run directory written by `mbpa teach`.
    While it is being served, the URL of the service instead, such as http://127.0.0.1:8000."""
    token: str | None = None
    """Token of the service, if it requires one; by default the environment variable MBPA_TOKEN."""


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Backup(RunCommand):
    """Write a run to one file, also while it is being served; `mbpa restore` makes a run of it."""

    out: Path
    """File to write, a tar archive."""
    again: bool = False
    """Replace an existing file."""

    def run(self) -> int:
        from mbpa.serve import backup, client, export
        from mbpa.serve.journal import JournalError

        if self.out.exists() and not self.again:
            raise RunError(f"{self.out} exists: use --again to replace it")
        if client.is_url(self.run_or_url):
            service = _open_service(self.run_or_url, self.token)
            with backup.writing_whole(self.out) as file:
                service.download("/backup", file)
        else:
            directory = Path(self.run_or_url)
            try:
                with export.open_journal(directory) as journal:
                    backup.back_up(directory, journal, self.out)
            except JournalError as error:
                raise RunError(str(error)) from error
        print(f"wrote {self.out}, {self.out.stat().st_size / 1e6:.1f} MB")
        return 0


@dataclass(frozen=True)
class Restore(Command):
    """Make a run from a backup. It is verified before it takes its place."""

    archive: tyro.conf.Positional[Path]
    """File that `mbpa backup` wrote."""
    out: Path = Path("run")
    """Directory to write the run to."""
    again: bool = False
    """Replace the run in the directory, including everything it was taught."""

    def run(self) -> int:
        from mbpa.serve.backup import restore

        for name, what in restore(self.archive, self.out, replace=self.again):
            print(f"{name:10} {what}")
        print(f"wrote {self.out}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Retrain(RunCommand):
    """Train a run again with everything that it holds: its training file and what it was taught.

    A service answers and learns meanwhile, and changes over without dropping a request.
    """

    after_interrupt: ClassVar[str] = "the run is as it was, unless a service trains it"

    progress: bool = True
    """Show progress bars on standard error; not for a service."""

    def run(self) -> int:
        from mbpa.serve import client, retraining
        from mbpa.serve.classifier import Classifier
        from mbpa.serve.journal import JournalError

        if client.is_url(self.run_or_url):
            service = _open_service(self.run_or_url, self.token)
            result = service.post("/retrain", {})
            examples, labels = result["examples"], result["labels"]
            accuracy, threshold = result["accuracy"], result["threshold"]
        else:
            directory = Path(self.run_or_url)
            try:
                with Classifier.load(directory, encodes=False) as classifier:
                    info = retraining.retrain(classifier, directory, progress=self.progress)
            except JournalError as error:
                raise RunError(_advise(error)) from error
            summary = info.summary or {}
            examples, labels = summary["examples"], len(info.labels)
            accuracy, threshold = summary.get("accuracy"), info.threshold
        print(f"trained with {examples} examples of {labels} labels, threshold {threshold:.2f}")
        if accuracy is not None:
            print(f"accuracy on held-out examples {accuracy:.1%}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Rename(RunCommand):
    """Rename a label, as if it had been taught with the new name from the start."""

    label: tyro.conf.Positional[str]
    """Label to rename."""
    to: tyro.conf.Positional[str]
    """New name, which no label has yet."""

    def run(self) -> int:
        count = self._change("rename", {"label": self.label, "to": self.to})
        print(f"{count} {'example has' if count == 1 else 'examples have'} the label {self.to!r}")
        return 0

    def _change(self, kind: str, names: dict[str, str]) -> int:
        """Rename or merge in the service or in the directory; return the number of examples."""
        from mbpa.serve import client
        from mbpa.serve.classifier import Classifier
        from mbpa.serve.input_checks import check_label
        from mbpa.serve.journal import InputError, JournalError

        if client.is_url(self.run_or_url):
            service = _open_service(self.run_or_url, self.token)
            return int(service.post(f"/labels/{kind}", names)["examples"])
        try:
            for name in names.values():
                check_label(name)
            with Classifier.load(self.run_or_url, encodes=False) as classifier:
                return len(getattr(classifier, kind)(*names.values()))
        except (InputError, JournalError) as error:
            raise RunError(_advise(error)) from error


@dataclass(frozen=True, kw_only=True)
class Merge(Rename):
    """Merge a label into another, as if its examples had been taught with that one."""

    label: tyro.conf.Positional[str]
    """Label to merge; it ceases to exist."""
    to: tyro.conf.Positional[str]
    """Label that its examples get."""

    def run(self) -> int:
        count = self._change("merge", {"label": self.label, "into": self.to})
        print(f"{count} {'example' if count == 1 else 'examples'} moved to the label {self.to!r}")
        return 0


def _advise(error: Exception) -> str:
    """Return the message of an error; if the run is being served, say what to do."""
    from mbpa.serve.journal import InUseError

    hint = "; or give the URL of the service in place of the directory"
    return f"{error}{hint if isinstance(error, InUseError) else ''}"


def _describe_change(change: Mapping[str, Any]) -> str:
    """Return a line about an entry of the audit trail, as `GET /audit` returns it."""
    count, first = change["count"], change["first"]
    what = f"example {first}" if count == 1 else f"{count} examples from {first} on"
    if change["label"] is not None:
        what = f"{change['label']!r} to {change['new_label']!r}, {count} examples"
    return f"{change['time']}  {change['by'] or '-':12}  {change['action']:8}  {what}"


def _open_service(url: str, token: str | None) -> Any:
    from mbpa.serve.client import ServiceClient

    return ServiceClient(url, token or os.environ.get("MBPA_TOKEN") or None)
