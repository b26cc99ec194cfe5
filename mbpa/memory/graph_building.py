"""Building a graph of many entries without the memory's lock, while it is read and written to.

Some entries are added last. Until then they are queries like those to come, with which it is tried
out how widely to search the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.memory.graph_index import Graph
from mbpa.memory.graph_widths import GraphContent, Widths, calibrate, order_for_calibration
from mbpa.memory.ring import Ints

ENTRIES_PER_STEP = 64  # added before it is checked whether to stop


@dataclass(frozen=True, eq=False)
class GraphBuilder:
    """Fills a graph with entries, and tries out how widely to search it."""

    graph: Graph
    """An empty graph."""
    content: GraphContent
    """The entries of the memory. One that is overwritten meanwhile gets another label, and its node
    is stale from the beginning.
    """
    should_stop: Callable[[], bool]
    """Whether to end early."""
    is_awaited: Callable[[], bool]
    """Whether reads are exhaustive until the graph is in use. All processors then work on it;
    otherwise they are left to those who use the other graphs.
    """

    def build(
        self,
        slots: Ints,
        labels: Ints,
        get_recent: Callable[[], Sequence[Float[Tensor, "D"]]],
        *,
        least_width: int,
        target_recall: float,
    ) -> Widths | None:
        """Add the entries in these slots.

        Args:
            slots: slots of the entries.
            labels: labels of the entries when the work began.
            get_recent: returns recent queries, with which widths are tried out. If there are none,
                this is done with keys that are not in the graph yet: those in it are found more
                easily.
            least_width: the narrowest width to try.
            target_recall: share of the true nearest entries to find.

        Returns:
            How widely to search the graph, or `None` if this is not known.

        Raises:
            StoppedError: the work was told to stop.
        """
        order, spared = order_for_calibration(len(slots))
        slots, labels = slots[order], labels[order]
        inside, last = slice(len(slots) - spared), slice(len(slots) - spared, None)
        self._add(slots[inside], labels[inside])
        recent = get_recent()
        keys = self.content.keys[torch.from_numpy(slots[last])].to(self.content.norms.dtype)
        widths = calibrate(
            self.graph,
            self.content,
            labels[inside],
            torch.stack(list(recent)) if recent else keys,
            are_keys=not recent,
            least=least_width,
            target=target_recall,
            should_stop=self.should_stop,
        )
        self._add(slots[last], labels[last])
        return widths

    def _add(self, slots: Ints, labels: Ints) -> None:
        for start in range(0, len(slots), ENTRIES_PER_STEP):
            if self.should_stop():
                raise StoppedError
            part = slice(start, start + ENTRIES_PER_STEP)
            is_current = self.content.labels[slots[part]] == labels[part]
            keys = self.content.keys[torch.from_numpy(slots[part][is_current])]
            self.graph.add(labels[part][is_current], keys, use_all_threads=self.is_awaited())


class StoppedError(Exception):
    """Work in the background was told to stop."""
