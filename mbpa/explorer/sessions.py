"""Visitors: what each has done and looks at, and how they are told what cannot be."""

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

MOST_SESSIONS = 1000  # whose deeds are remembered
Done = TypeVar("Done")


@dataclass
class Session:
    """What one visitor has done and looks at.

    Kept here and not in components of Gradio, for which every open page would hold a connection.
    """

    deeds: list[Deed] = field(default_factory=list)
    queues: dict[str, list[Opinion]] = field(default_factory=dict)
    """Of the review lists, by their titles."""
    chosen: int = 0
    """Place in the list that is looked at."""

    def settle(self, title: str, opinion: Opinion) -> None:
        """Take it from a list, which may be another by now."""
        self.queues[title] = [each for each in self.queues.get(title, ()) if each != opinion]


class Visits:
    """The sessions of visitors; the least recent are forgotten when there are too many."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def session(self, request: gr.Request) -> Session:
        """Of whoever asks."""
        name = request.session_hash or ""
        session = self._sessions.pop(name, None) or Session()
        self._sessions[name] = session
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session


async def told(work: Awaitable[Done]) -> Done:
    """What comes of it; what cannot be is told to the visitor, and the page stays as it is."""
    try:
        return await work
    except Overloaded as error:
        raise refusal("too much at once, try again") from error
    except (InputError, JournalError) as error:
        raise refusal(str(error)) from error


def refusal(why: str) -> gr.Error:
    said = escape(why[:1].upper() + why[1:] + ".")
    return gr.Error(said, title="Not done", print_exception=False)
