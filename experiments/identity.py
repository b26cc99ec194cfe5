"""Digest of the source code that the result of an experiment depends on.

Work begun with different code is not resumed. Only the modules that an experiment imports, directly
or indirectly, count: a change to the service does not discard a search.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {"experiments", "mbpa"}


def digest_code(module: str) -> str:
    """Return a digest of the sources of a module and of all our modules that it imports."""
    digest = hashlib.sha256()
    for name, path in sorted(find_dependencies(module).items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_dependencies(module: str) -> dict[str, Path]:
    """Return the source files of a module and of our modules that it imports, by their names."""
    packages = PACKAGES | {module.split(".")[0]}
    found: dict[str, Path] = {}
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name.split(".")[0] not in packages:
            continue
        seen.add(name)
        if path := _find_source(name):
            found[name] = path
            waiting += _find_imports(ast.parse(path.read_bytes()))
    return found


def _find_source(name: str) -> Path | None:
    """Return the file of a module; `None` if there is no such module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the name is that of an attribute, not of a module
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _find_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names of imported modules, of the packages around them, and of imported attributes,
    which may be modules as well.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
