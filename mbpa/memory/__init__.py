"""Episodic memories: pairs of a key (an embedding) and a value (a label or regression target)."""

from mbpa.memory import validation
from mbpa.memory.base import Memory
from mbpa.memory.choosing import MemoryKind, make_memory
from mbpa.memory.exact import ExactMemory
from mbpa.memory.graph import GraphMemory
from mbpa.memory.neighbors import Candidates, Entries, Holdings, Neighbors
from mbpa.memory.schema import check_schema
from mbpa.memory.sharded import ShardedMemory
from mbpa.memory.stored import Found, StoredMemory, StoredState

__all__ = [
    "Candidates",
    "Entries",
    "ExactMemory",
    "Found",
    "GraphMemory",
    "Holdings",
    "Memory",
    "MemoryKind",
    "Neighbors",
    "ShardedMemory",
    "StoredMemory",
    "StoredState",
    "check_schema",
    "make_memory",
    "validation",
]
