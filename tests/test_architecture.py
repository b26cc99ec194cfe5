"""Imports go one way, so that every module can be read knowing only those below it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import mbpa

ROOT = Path(mbpa.__file__).parent
# Each row may import from the rows above it, and from its own package.
LAYERS = [
    {"errors", "files"},
    {"device", "replay", "hugging_face"},
    {"memory"},
    {"modules"},
    {"kernels", "rules", "adaptation"},
    {"predictors"},
    {"checkpoint", "explanation", "memory_module", "serialization"},
    {"model_state"},
    {"model"},
    {"teaching"},
    {"evaluation", "stream"},
    {"tune"},
    {"testing", "encoders", "language", "integrations"},
    {"serve", "demo"},
    {"explorer"},
    {"cli"},
]
WITHIN_A_LAYER = {("adaptation", "rules")}  # adaptation runs rules, which know nothing of it
LIGHT = {"torch", "numpy", "safetensors", "jaxtyping", "tqdm"}  # what `import mbpa` may load


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in ROOT.rglob("*.py")
        if path != ROOT / "__init__.py"
    }


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "mbpa":
                names |= {f"mbpa.{alias.name}" for alias in node.names}
                if all((ROOT / f"{alias.name}.py").exists() for alias in node.names):
                    continue  # modules, nothing of the public face
            names.add(node.module or "")
    return names


def is_kernel(name: str) -> bool:
    """Return whether a module is written in Triton."""
    return "fused" in name or "search_kernels" in name


def layer(part: str) -> int:
    found = [i for i, parts in enumerate(LAYERS) if part in parts]
    assert found, f"mbpa.{part} has no place in LAYERS"
    return found[0]


def test_imports_go_one_way() -> None:
    for name, tree in modules().items():
        part = name.split(".")[0]
        for other in imported(tree):
            if not other.startswith("mbpa.") or other.startswith("mbpa.__"):
                continue
            target = other.split(".")[1]
            if target == part or (part, target) in WITHIN_A_LAYER:
                continue
            assert layer(target) < layer(part), f"mbpa.{name} must not import {other}"


def test_the_library_knows_nothing_of_experiments_benchmarks_and_trials() -> None:
    for name, tree in modules().items():
        roots = {other.split(".")[0] for other in imported(tree)}
        assert not roots & {"experiments", "benchmarks", "reliability", "tests"}, name


def test_users_of_the_public_face_are_above_it() -> None:
    """`import mbpa` from inside would load everything; only the top rows may."""
    for name, tree in modules().items():
        if "mbpa" in imported(tree):
            assert layer(name.split(".")[0]) >= layer("testing"), name


def test_the_core_imports_little_besides_torch() -> None:
    import sys

    for name, tree in modules().items():
        if layer(name.split(".")[0]) >= layer("serve") and not name.startswith("testing"):
            continue
        roots = {other.split(".")[0] for other in imported(tree)}
        if is_kernel(name):  # imported only where there is Triton
            roots -= {"triton"}
        if name == "memory.graph_index":  # imported only when a GraphMemory is made
            roots -= {"usearch"}
        if name in ("memory.milvus", "memory.qdrant"):  # likewise, when one of theirs is made
            roots -= {"pymilvus", "qdrant_client"}
        if name in ("encoders.image", "encoders.pictures"):  # imported only to read a picture
            roots -= {"PIL"}
        if name == "hugging_face":  # imported only when a model is loaded
            roots -= {"transformers", "huggingface_hub"}
        if name.startswith("integrations."):  # each needs the library of its name
            roots -= {name.split(".")[1].removesuffix("_base"), "pytorch_lightning"}
        if name.startswith("language."):  # imported only when a model or a document is read
            roots -= {"transformers", "huggingface_hub", "tokenizers", "gguf", "pypdf"}
        assert roots <= LIGHT | {"mbpa"} | set(sys.stdlib_module_names), name


def test_no_code_from_a_file_is_run() -> None:
    for name, tree in modules().items():
        assert not {"pickle", "dill", "cloudpickle", "joblib"} & imported(tree), name
        safe = {
            node.func
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and any(
                each.arg == "weights_only" and getattr(each.value, "value", None) is True
                for each in node.keywords
            )
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used != "torch.save", name
                assert used != "torch.load" or node in safe, name


def test_kernels_are_imported_only_where_they_are_used() -> None:
    for name, tree in modules().items():
        if not is_kernel(name):
            at_the_top = imported(ast.Module([n for n in tree.body if not _is_block(n)], []))
            assert not any(is_kernel(other) for other in at_the_top), name


def _is_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)
