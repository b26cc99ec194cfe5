"""Conformance suites for extensions of the library: memory backends and rules.

Each suite compares with a reference too simple to be wrong: a memory with a list that is searched
linearly, a batched rule with an autograd loop for one query at a time. A broken contract raises an
`AssertionError` that names the part, the expected and the actual value. The suites do not touch the
global random state.
"""

from mbpa.testing.memory import check_memory
from mbpa.testing.rule import check_rule

__all__ = ["check_memory", "check_rule"]
