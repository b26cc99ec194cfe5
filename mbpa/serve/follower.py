"""Following the log of a shared journal, and waiting until a replica has reached a position."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping

from mbpa.serve.classifier import Classifier
from mbpa.serve.client import POSITION_HEADER
from mbpa.serve.journal_errors import JournalError, UnavailableError
from mbpa.serve.shared_journal import SharedJournal

POLL_S = 1.0  # between looks at the log if no news arrive
COLLECTING_S = 0.004  # during which changes are collected, to be applied at once
RETRY_S = 0.5  # between attempts to reach a database that is away
STALE_S = 3.0  # answers say how old their state may be if it may be older than this
WAIT_S = 3.0  # for a position that a request asks for
WAIT_STEP_S = 0.02
STALE_HEADER = "X-MbPA-Stale"
LATEST = "latest"

log = logging.getLogger("mbpa.serve")


class Follower:
    """A thread that applies to a classifier what other replicas write.

    Args:
        classifier: the classifier.
        journal: its journal.
    """

    def __init__(self, classifier: Classifier, journal: SharedJournal) -> None:
        self._classifier, self._journal = classifier, journal
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mbpa-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; this takes up to `POLL_S`."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            try:
                self._classifier.follow(self._journal.wait_for_news(POLL_S))
                self._is_stopped.wait(COLLECTING_S)
            except UnavailableError:  # the journal's status and `read_only` say so
                self._is_stopped.wait(RETRY_S)
            except Exception:
                log.exception("the log could not be followed")
                self._is_stopped.wait(RETRY_S)


class PositionGate:
    """Holds requests back until the replica has reached the position that they ask for.

    The header `X-MbPA-Position` of a request holds the position that an earlier answer gave, or
    "latest" for everything that was acknowledged before the request.
    """

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier

    def make_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer, whose state is at most at the position they give."""
        status, position = self._classifier.replica, self._classifier.position
        if status is None:
            return []
        headers = [(POSITION_HEADER.lower().encode(), b"%d" % (position or 0))]
        if status.stale_s > STALE_S:
            headers.append((STALE_HEADER.lower().encode(), b"%.1f" % status.stale_s))
        return headers

    async def wait(self, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Wait until a request can be answered; return a status and a reason if it cannot.

        Args:
            headers: headers of the request.
        """
        asked = headers.get(POSITION_HEADER.lower().encode())
        if asked is None or self._classifier.position is None:
            return None
        if asked == LATEST.encode():
            return await self._reach_latest()
        if not asked.isdigit() or len(asked) > 18:
            text = asked[:40].decode("latin-1")
            return 422, f"{POSITION_HEADER} must be a position or {LATEST!r}, got {text!r}"
        return await self._reach(int(asked))

    async def _reach_latest(self) -> tuple[int, str] | None:
        try:
            await asyncio.to_thread(self._classifier.follow)
        except JournalError as error:
            return 503, str(error)
        return None

    async def _reach(self, position: int) -> tuple[int, str] | None:
        if (self._classifier.position or 0) >= position:
            return None
        deadline = time.monotonic() + WAIT_S
        with contextlib.suppress(JournalError):
            await asyncio.to_thread(self._classifier.follow, position)
        while (self._classifier.position or 0) < position:
            if time.monotonic() > deadline:
                why = f"this replica is at position {self._classifier.position}, not {position}"
                return 503, f"{why}: try again, or another replica"
            await asyncio.sleep(WAIT_STEP_S)  # the follower goes on
        return None
