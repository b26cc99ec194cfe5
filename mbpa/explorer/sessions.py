"""Sessions of visitors, with their changes and selections, and error messages to visitors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape

import gradio as gr

from mbpa.errors import RunError
from mbpa.explorer.actions import Change
from mbpa.explorer.review import Opinion
from mbpa.serve.batching import Overloaded, ResultT
from mbpa.serve.journal import InputError, JournalError, ListedExample

MAX_SESSIONS = 1000  # sessions kept in memory


@dataclass
class Session:
    """The changes one visitor has made, and what they are looking at.

    It is kept here rather than in Gradio's state components, for which every open page would hold
    a connection.
    """

    by: str | None = None
    """Name of the visitor's token; `None` if the page requires none."""
    changes: list[Change] = field(default_factory=list)
    queues: dict[str, list[Opinion]] = field(default_factory=dict)
    """Examples of the review lists, by title."""
    chosen: int = 0
    """Index of the selected example in the current list."""
    taught: list[ListedExample] = field(default_factory=list)
    """Examples that the list of taught ones shows."""
    chosen_taught: int | None = None
    """Id of the example that is selected there."""
    chosen_label: str | None = None
    """The label that is selected in the list of labels."""

    def record(self, change: Change) -> None:
        """Record a change, so that it can be undone. If it cannot, neither can earlier ones."""
        self.changes = [*self.changes, change] if change.can_be_undone else []

    def renumber(self, ids: Mapping[int, int]) -> None:
        """Replace ids in the changes by those under which the examples were brought back."""
        self.changes = [
            replace(
                each,
                added=tuple(ids.get(id, id) for id in each.added),
                removed={ids.get(id, id): lesson for id, lesson in each.removed.items()},
            )
            for each in self.changes
        ]

    def remove(self, title: str, opinion: Opinion) -> None:
        """Remove an example from a list, if it is still there."""
        self.queues[title] = [each for each in self.queues.get(title, ()) if each != opinion]


class Sessions:
    """The sessions of visitors; the least recently used are dropped if there are too many.

    Args:
        name_visitor: returns the name of a visitor's token, given the user name of the login.
    """

    def __init__(self, name_visitor: Callable[[str | None], str | None]) -> None:
        self._name_visitor = name_visitor
        self._sessions: dict[str, Session] = {}

    def get_session(self, request: gr.Request) -> Session:
        """Return the session of the visitor who sent this request."""
        name = request.session_hash or ""
        session = self._sessions.pop(name, None) or Session()
        self._sessions[name] = session
        session.by = self._name_visitor(request.username)
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    def renumber(self, ids: Mapping[int, int]) -> None:
        """Replace ids of examples in the changes of all visitors."""
        for session in self._sessions.values():
            session.renumber(ids)


async def show_errors(work: Awaitable[ResultT]) -> ResultT:
    """Await work and return its result; show expected errors to the visitor as a message.

    On such an error the page stays as it is.
    """
    try:
        return await work
    except Overloaded as error:
        raise make_refusal("too many requests at once, try again") from error
    except (InputError, JournalError, RunError) as error:
        raise make_refusal(str(error)) from error


def make_refusal(why: str) -> gr.Error:
    """Return an error that Gradio shows as a message, for which the text must be escaped."""
    message = escape(why[:1].upper() + why[1:] + ".")
    return gr.Error(message, title="Not done", print_exception=False)
