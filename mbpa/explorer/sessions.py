"""Sessions of visitors: their changes and selections; and error messages to them."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from html import escape
from typing import TypeVar

import gradio as gr

from mbpa.explorer.actions import Deed
from mbpa.explorer.review import Opinion
from mbpa.serve.batching import Overloaded
from mbpa.serve.journal import InputError, JournalError

MOST_SESSIONS = 1000  # sessions kept in memory
Done = TypeVar("Done")


@dataclass
class Session:
    """The changes one visitor has made, and what they are looking at.

    It is kept here rather than in Gradio's state components, for which every open page would hold
    a connection.
    """

    deeds: list[Deed] = field(default_factory=list)
    queues: dict[str, list[Opinion]] = field(default_factory=dict)
    """Examples of the review lists, by title."""
    chosen: int = 0
    """Index of the selected example in the current list."""

    def settle(self, title: str, opinion: Opinion) -> None:
        """Remove an example from a list, if it is still there."""
        self.queues[title] = [each for each in self.queues.get(title, ()) if each != opinion]


class Visits:
    """The sessions of visitors; the least recently used are dropped if there are too many."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def session(self, request: gr.Request) -> Session:
        """Return the session of the visitor who sent this request."""
        name = request.session_hash or ""
        session = self._sessions.pop(name, None) or Session()
        self._sessions[name] = session
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session


async def told(work: Awaitable[Done]) -> Done:
    """Await work and return its result; show expected errors to the visitor as a message.

    On such an error the page stays as it is.
    """
    try:
        return await work
    except Overloaded as error:
        raise refusal("too much at once, try again") from error
    except (InputError, JournalError) as error:
        raise refusal(str(error)) from error


def refusal(why: str) -> gr.Error:
    said = escape(why[:1].upper() + why[1:] + ".")
    return gr.Error(said, title="Not done", print_exception=False)
