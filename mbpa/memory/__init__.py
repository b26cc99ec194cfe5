"""Episodic memories: pairs of a key (what the embedding gave) and a value (what was to be said)."""

from mbpa.memory import validation
from mbpa.memory.base import Memory
from mbpa.memory.exact import ExactMemory
from mbpa.memory.neighbors import Candidates, Entries, Neighbors

__all__ = ["Candidates", "Entries", "ExactMemory", "Memory", "Neighbors", "validation"]
