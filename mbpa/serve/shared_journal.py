"""What a journal promises that several replicas share: an ordered log that each of them follows.

Positions in the log are the numbers of the journal's changes.

Standard library only.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from mbpa.serve.audit import AuditEntry
from mbpa.serve.example_journal import Example, ExampleJournal, JournalState


@dataclass(frozen=True)
class SharedState(JournalState):
    """Everything that a run in a database holds after one of its changes."""

    hash: bytes
    """Hash of the event of the change."""
    run_file: bytes
    """Content of `run.json`."""
    model_files: bytes
    """The model, as an archive."""
    renames: tuple[AuditEntry, ...]
    restored_ids: frozenset[int]


@dataclass(frozen=True)
class Changes:
    """What was written since the last event that was read."""

    position: int
    """Position of the last event."""
    touched: frozenset[int]
    """Ids of all examples that were added, removed or relabelled."""
    present: Sequence[Example]
    """Those of them that exist at that position, with their keys."""
    renames: bool
    """Whether a label was renamed or merged."""
    replaces_model: bool
    """Whether the model was replaced."""


@dataclass(frozen=True)
class ReplicaStatus:
    """How far a replica has followed the log."""

    position: int
    """Position of the last event that it has read."""
    lag: int
    """Number of further events that it knows of and has not read."""
    stale_s: float
    """Seconds since it last knew that there were no further events."""
    snapshot: int
    """Position at which it last loaded everything."""
    snapshot_age_s: float
    """Seconds since then."""


class SharedJournal(ExampleJournal):
    """A journal that other processes write as well.

    `change`, `restored_ids` and `renames` are as of the last position that was read.
    """

    @abc.abstractmethod
    def load(self, *, size: int) -> contextlib.AbstractContextManager[SharedState]:
        """Return a context with everything that the journal holds after its last change."""

    @abc.abstractmethod
    def adopt(self, state: SharedState) -> None:
        """Follow the log from a state on that was loaded."""

    @abc.abstractmethod
    def read_changes(self) -> Changes | None:
        """Return what was written since the last call; `None` if everything must be loaded anew.

        That is so if events that were read before are lost, as after a fail-over to a standby that
        had not received them, or if there are too many events.

        Raises:
            UnavailableError: the journal cannot be read now.
        """

    @abc.abstractmethod
    def wait_for_news(self, timeout_s: float) -> int | None:
        """Wait for changes, for `timeout_s` at most.

        Returns:
            The highest position that was announced; `None`: none was, so look whether there is one.

        Raises:
            UnavailableError: the journal cannot be read now.
        """

    @abc.abstractmethod
    def exclusively(self) -> contextlib.AbstractContextManager[None]:
        """Keep all others from writing; what is written in this context takes effect at its end."""

    @abc.abstractmethod
    def replace_model(
        self, run_file: bytes, model_files: bytes, *, examples: int, by: str | None = None
    ) -> None:
        """Make a model that of the run, for all replicas.

        Args:
            run_file: content of `run.json`.
            model_files: the model, as an archive.
            examples: highest id of those that it was trained with, for the audit trail.
            by: name of the token, for the audit trail.
        """

    @abc.abstractmethod
    def read_model(self) -> tuple[bytes, bytes]:
        """Return the content of `run.json`, and the model as an archive."""

    @abc.abstractmethod
    def require_same_run(self, run_file: bytes, place: object) -> None:
        """Raise `JournalError` unless a `run.json` is, or was, that of the run in the journal."""

    @property
    @abc.abstractmethod
    def status(self) -> ReplicaStatus:
        """How far this replica has followed the log."""
