"""A memory is chosen by a word, and nothing is chosen silently in place of what is missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from mbpa.errors import MissingExtraError
from mbpa.memory import ExactMemory, GraphMemory, make_memory


def test_each_word_names_a_memory() -> None:
    exact = make_memory("exact", 50, 3, value_dtype=torch.int32)
    assert type(exact) is ExactMemory
    assert exact.value_dtype == torch.int32
    graph, auto = make_memory("graph", 50, 3), make_memory("auto", 50, 3)
    assert isinstance(graph, GraphMemory)
    assert isinstance(auto, GraphMemory)
    assert graph.exact_below < auto.exact_below == 100_000


def test_on_other_devices_auto_is_exact_and_graph_is_refused() -> None:
    assert type(make_memory("auto", 50, 3, device="meta")) is ExactMemory
    with pytest.raises(ValueError, match="device must be a CPU, got meta"):
        make_memory("graph", 50, 3, device="meta")


@pytest.mark.parametrize("kind", ["graph", "auto"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mbpa\[graph\]'"):
        make_memory(kind, 50, 3)
