"""Episodic memories: pairs of a key (an embedding) and a value (a label or regression target)."""

from mbpa.memory import validation
from mbpa.memory.base import Memory
from mbpa.memory.exact import ExactMemory
from mbpa.memory.neighbors import Candidates, Entries, Neighbors

__all__ = ["Candidates", "Entries", "ExactMemory", "Memory", "Neighbors", "validation"]
