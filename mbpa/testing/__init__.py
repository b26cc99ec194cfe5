"""Conformance suites for those who extend the library: a backend for the memory, a rule.

Each compares with something too simple to be wrong: a memory with a list that is searched from end
to end, a batched rule with a loop of autograd for one query. A contract that is broken raises an
`AssertionError`: which part, what was expected, what came. Global random numbers are left alone.
"""

from mbpa.testing.memory import check_memory
from mbpa.testing.rule import check_rule

__all__ = ["check_memory", "check_rule"]
