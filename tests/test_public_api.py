"""The public names are these, each documented; a change to the list is a decision."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import tomllib
from pathlib import Path

import pytest

import mbpa

PUBLIC = {
    *("MbPA", "split", "score_stream", "Engine", "Explanation"),
    *("tune", "AdaptationGrid", "Tuning", "leave_one_out"),
    *("Memory", "ExactMemory", "GraphMemory", "ShardedMemory", "Neighbors"),
    *("InverseDistance", "Gaussian", "ExpDot", "Uniform", "Balanced"),
    *("Rule", "Gradient", "RMSprop", "Adam", "MAP"),
    *("Predictor", "Parametric", "Adapted", "NeighborVote", "Mixture"),
    *("CheckpointError", "MissingExtraError"),
    "testing",
}
MODULES = sorted(info.name for info in pkgutil.walk_packages(mbpa.__path__, "mbpa."))
if importlib.util.find_spec("avalanche") is None:  # it is not among the packages for development
    MODULES.remove("mbpa.integrations.avalanche")


def test_the_public_names_are_these() -> None:
    assert set(mbpa.__all__) == PUBLIC
    assert len(mbpa.__all__) == len(PUBLIC)
    assert all(hasattr(mbpa, name) for name in PUBLIC)


def test_public_names_and_their_methods_are_documented() -> None:
    for name in PUBLIC - {"testing"}:
        thing = getattr(mbpa, name)
        assert thing.__doc__, name
        for attribute, member in vars(thing).items() if isinstance(thing, type) else ():
            inherited = any(hasattr(base, attribute) for base in thing.__bases__)
            if callable(member) and not attribute.startswith("_") and not inherited:
                assert member.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    opening = (importlib.import_module(name).__doc__ or "").strip().splitlines()
    assert 1 <= len(opening) <= 12


def test_the_version_is_the_one_that_is_cited() -> None:
    root = Path(__file__).parents[1]
    assert f"version: {mbpa.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"## {mbpa.__version__}" in (root / "CHANGELOG.md").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
