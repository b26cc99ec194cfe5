"""Qdrant in local mode and Milvus fulfil the contract; a bulk load can be interrupted.

Milvus Lite stands for Milvus. The slow tests start a server of Milvus where one is installed
(`pip install --no-deps milvus`, x86-64 only).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from mbpa.memory import ExactMemory, StoredMemory
from mbpa.testing import check_memory

Make = Callable[..., StoredMemory]
_numbers = itertools.count()


@pytest.fixture(params=("qdrant", "milvus", pytest.param("milvus-server", marks=pytest.mark.slow)))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that attaches to a collection, a new one by default."""
    kind: Any
    with ExitStack() as stack:
        if request.param == "qdrant":
            module = pytest.importorskip("qdrant_client", reason="needs the extra qdrant")
            from mbpa.memory.qdrant import QdrantMemory as kind

            client = module.QdrantClient(":memory:")
        else:
            module = pytest.importorskip("pymilvus", reason="needs the extra milvus")
            from mbpa.memory.milvus import MilvusMemory as kind

            if request.param == "milvus":
                pytest.importorskip("milvus_lite", reason="needs milvus-lite")
                client = module.MilvusClient(str(tmp_path / "milvus.db"))
            else:
                client = module.MilvusClient(request.getfixturevalue("milvus_address"))
        stack.callback(client.close)

        def attach(*form: Any, collection: str | None = None, **named: Any) -> StoredMemory:
            name = collection or f"entries{next(_numbers)}"
            found: StoredMemory = kind(client, name, *form, **named)
            return found

        yield attach


@pytest.fixture(scope="module")
def milvus_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server of Milvus; return its address."""
    server = pytest.importorskip("milvus", reason="needs milvus, x86-64").MilvusServer()
    server.set_base_dir(str(tmp_path_factory.mktemp("milvus")))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # it leaves sockets of ports that are taken
        server.start()
    try:
        yield f"http://127.0.0.1:{server.listen_port}"
    finally:
        server.stop()


@pytest.mark.heavy
def test_it_fulfils_the_contract(make: Make) -> None:
    def attach(memory: Any, read_only: bool) -> StoredMemory:
        return make(
            memory.capacity,
            memory.key_shape,
            collection=memory.collection,
            read_only=read_only,
            take_over=not read_only,
        )

    check_memory(make, exact=False, attach=attach)


def test_neighbours_are_those_of_an_exact_memory(make: Make) -> None:
    draws = torch.Generator().manual_seed(0)
    keys, values = torch.randn(300, 16, generator=draws), torch.randn(300, 2, generator=draws)
    form: dict[str, Any] = {"value_shape": (2,), "value_dtype": torch.float32}
    single, stored = ExactMemory(250, 16, **form), make(250, 16, **form, rows_per_call=64)
    for memory in (single, stored):
        memory.write(keys, values)
        memory.delete([60, 299])
    queries = torch.randn(20, 16, generator=draws)
    expected, found = single.read(queries, 10), stored.read(queries, 10)
    for name in ("ids", "distances", "values", "keys", "mask"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_milvus_searches_more_widely_if_told_to(make: Make, request: Any) -> None:
    if "milvus" not in request.node.callspec.id:
        pytest.skip("a setting of Milvus")
    draws = torch.Generator().manual_seed(0)
    keys, values = torch.randn(300, 16, generator=draws), torch.arange(300)
    graph = {"index_type": "HNSW", "index_params": {"M": 4, "efConstruction": 8}}
    memory = make(300, 16, **graph, search_params={"ef": 300})
    memory.write(keys, values)
    single = ExactMemory(300, 16)
    single.write(keys, values)
    assert torch.equal(memory.read(keys[:20], 10).ids, single.read(keys[:20], 10).ids)


def test_a_bulk_load_continues_after_it_was_interrupted(make: Make) -> None:
    keys, values = torch.randn(100, 8), torch.arange(100)
    memory: Any = make(100, 8)
    upsert, calls = memory._upsert, itertools.count()

    def fail(*arguments: Any) -> None:
        if next(calls) == 3:
            raise ConnectionError("the server is gone")
        upsert(*arguments)

    memory._upsert = fail
    with pytest.raises(ConnectionError, match="the server is gone"):
        memory.load(keys, values, rows_per_write=20)
    again: Any = make(100, 8, collection=memory.collection, take_over=True)
    assert len(again) == 60
    steps: list[int] = []
    again.load(keys, values, rows_per_write=20, tick=steps.append)
    assert steps == [60, 20, 20]
    found = again.entries()
    assert torch.equal(found.ids, torch.arange(100))
    assert torch.equal(found.keys, keys)
    assert torch.equal(found.values, values)
    again.load(keys, values)  # nothing is left to do
    for other in (keys[:50], keys + 1):
        with pytest.raises(ValueError, match="hold the first of these rows"):
            again.load(other, values[: len(other)])
    with pytest.raises(ValueError, match="at most capacity=100"):
        again.load(torch.randn(101, 8), torch.arange(101))


def test_keys_that_would_be_rounded_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"dtype must be at most float32.*got torch\.float64"):
        make(10, 2, dtype=torch.float64)
