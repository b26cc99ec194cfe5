"""The audit trail of a journal: who changed what and when, one entry per durable change.

Entries name ids, never texts, so that a forgotten text leaves no trace here either. Of labels they
hold only the names that were changed.

Standard library only.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

Action = Literal["learn", "restore", "forget", "rename", "merge", "retrain", "copy"]
"""The last two are changes of a run in a database only, which all replicas must follow."""
TEACHING_ACTIONS = ("learn", "restore")  # these add the examples from `first` on


@dataclass(frozen=True)
class AuditEntry:
    """One change of a journal."""

    change: int
    """Number of the change; every change increases it."""
    time_ms: int
    """Time of the change, in milliseconds since 1970, UTC."""
    by: str | None
    """Name of the token that was used; `None` if there was none."""
    action: Action
    first: int
    """Lowest id of the examples that were changed."""
    count: int
    """Number of examples that were changed."""
    label: str | None = None
    """Former name of a label that was renamed or merged into another."""
    new_label: str | None = None

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"action must be one of {get_args(Action)}, got {self.action!r}")

    def to_row(self) -> tuple[int | str | None, ...]:
        """Return the values of the columns, without the checksum."""
        return astuple(self)


class LessonIndex:
    """When and by whom each example was taught, by id.

    A lesson covers consecutive ids, and ids increase from lesson to lesson.
    """

    def __init__(self, entries: Iterable[AuditEntry] = ()) -> None:
        self._firsts, self._counts, self._times_ms = array("q"), array("q"), array("q")
        self._names: list[str | None] = []
        for entry in entries:
            self.add(entry)

    def add(self, entry: AuditEntry) -> None:
        """Add the entry of the latest lesson; other entries are ignored."""
        if entry.action in TEACHING_ACTIONS:
            self._firsts.append(entry.first)
            self._counts.append(entry.count)
            self._times_ms.append(entry.time_ms)
            self._names.append(entry.by)

    def find(self, id: int) -> tuple[int, str | None] | None:
        """Return the time in milliseconds and the name of the token; `None` if not recorded."""
        place = bisect_right(self._firsts, id) - 1
        if place < 0 or id >= self._firsts[place] + self._counts[place]:
            return None
        return self._times_ms[place], self._names[place]

    def find_first_since(self, time_ms: int) -> int | None:
        """Return the lowest id that was taught at this time or later; `None` if there is none."""
        times = zip(self._firsts, self._times_ms, strict=True)
        return next((first for first, taught_ms in times if taught_ms >= time_ms), None)


def apply_renames(labels: Sequence[str], entries: Iterable[AuditEntry]) -> tuple[str, ...]:
    """Return the current names of the labels that a head was trained with.

    A renamed label takes its row of the head with it. A label that was merged into another trained
    label leaves its row behind, which then has a name that no label can have.

    Args:
        labels: one name per row of the head.
        entries: the changes since then, oldest first.
    """
    names = list(labels)
    places = {name: place for place, name in enumerate(names)}
    for entry in entries:
        if entry.action not in ("rename", "merge") or entry.label is None:
            continue
        place = places.pop(entry.label, None)
        if place is None:
            continue
        names[place] = f"\n{place}"
        if entry.action == "rename" and entry.new_label is not None:
            retired = places.get(entry.new_label)
            if retired is not None:
                names[retired] = f"\n{retired}"
            names[place] = entry.new_label
            places[entry.new_label] = place
    return tuple(names)


def is_label(name: str) -> bool:
    """Return whether a name that `apply_renames` returned belongs to a label, not to a left row."""
    return not name.startswith("\n")


def format_time(time_ms: int) -> str:
    """Return a time in ISO 8601, UTC, with milliseconds."""
    whole = datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{time_ms % 1000:03}Z"
