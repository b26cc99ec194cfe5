"""While the tests run, jaxtyping and beartype check the shapes that our packages annotate.

The hook must be in place before anything imports `mbpa`, hence the order below.
"""

import ast
import functools
import gc
import importlib.util
import inspect
import os
import random
import re
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, get_type_hints

import hypothesis
import jaxtyping
import numpy
import pytest
import torch
from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import _import_hook

# As mypy reads them: an int will do for a float. `Self` is beyond beartype in a decorated method.
with_beartype = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=FrozenDict({Self: Any}),
        violation_type=jaxtyping.TypeCheckError,
    )
)
checkers: dict[tuple[object, ...], Callable[..., Any]] = {}


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with checks of its annotations; sizes are bound anew at each call."""
    is_symbolic = any("{" in str(hint) for hint in function.__annotations__.values())
    is_within_another = "<locals>" in function.__qualname__
    if is_symbolic or is_within_another or inspect.isgeneratorfunction(function):
        return jaxtyping.jaxtyped(function, typechecker=make_checker)
    try:
        function.__annotations__ = get_type_hints(function, include_extras=True)
    except (NameError, ValueError):  # imported for mypy only, or beyond jaxtyping
        return jaxtyping.jaxtyped(function, typechecker=make_checker)
    checked = with_beartype(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        with jaxtyping.jaxtyped("context"):
            return checked(*args, **kwargs)

    return call


def make_checker(signature: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checker of arguments, given an empty function with the annotations to check.

    A function within a function is decorated at each call of the outer one, and beartype takes
    longer to write a checker than most of our functions take to run, so checkers are cached.
    """
    annotations = tuple(signature.__annotations__.items())
    key = signature.__module__, signature.__qualname__, signature.__code__, annotations
    if key not in checkers:
        checkers[key] = with_beartype(signature)
    return checkers[key]


# In the background of a shell interrupts are ignored, and whatever is started there ignores them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class OnlyShapes(_import_hook.JaxtypingTransformer):
    """Applies `check_shapes` to functions that state a shape; mypy checks the others.

    jaxtyping's own decorator checks arguments twice, and functions without a shape as well, which
    was a third of the processor time of the tests.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = [each for each in ast.walk(node.args) if isinstance(each, ast.arg)]
        hints = [node.returns, *(each.annotation for each in arguments)]
        if any(SHAPED.search(ast.unparse(hint)) for hint in hints if hint is not None):
            decorator = self._typechecker.get_ast().keywords[0].value  # without jaxtyped(...)
            node.decorator_list.append(ast.copy_location(decorator, node))
        self.generic_visit(node)
        return node


ROOT = Path(importlib.util.find_spec("mbpa").submodule_search_locations[0]).parent
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for package in ("mbpa", "experiments")
    for path in (ROOT / package).rglob("*.py")
}
MODULES = [name for name, source in SOURCES.items() if "from jaxtyping import" in source]
KINDS = "Bool|Float|Int|Int64|Shaped|UInt8"
ALIASES = re.findall(rf"^(\w+) = .*\b(?:{KINDS})\[", "\n".join(SOURCES.values()), re.MULTILINE)
SHAPED = re.compile(rf"\b(?:{'|'.join([KINDS, *ALIASES])})\b")
# Triton compiles the source of its kernels, and must find them undecorated.
TYPECHECKED = [
    name
    for name in MODULES
    if not any(word in name for word in ("fused", "search_kernels", "__init__"))
]
_import_hook.JaxtypingTransformer = OnlyShapes
jaxtyping.install_import_hook(TYPECHECKED, "conftest.check_shapes")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported; test_fused wants it

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are as many as the cores

hypothesis.settings.register_profile("mbpa", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("mbpa")


def pytest_collection_finish() -> None:
    """Exempt what has been imported from garbage collection. It is never freed, and traversing it
    was 5 to 8% of the processor time.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo the exemption: nanobind reports objects that are alive at the very end as leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_seed_for_every_test() -> None:
    """Keep random numbers of a test independent of the tests before it in the same worker."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Switch the checks off, for arguments that the library itself must refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that writes a module into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])

    def write(source: str) -> str:
        name = f"own_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write
