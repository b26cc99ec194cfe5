"""The reference covers every public name and command, and every argument is described."""

from __future__ import annotations

import dataclasses
import re

import griffe
import pytest

import mbpa
from mbpa.cli import main
from website import reference

NAMES = [each for names in reference.list_names().values() for each in names]


def describe_parameters(thing: griffe.Object) -> dict[str, str]:
    """Return what the docstring of a function or class says about each parameter."""
    sections = [] if thing.docstring is None else thing.docstring.parsed
    return {
        parameter.name.lstrip("*"): parameter.description
        for section in sections
        if section.kind is griffe.DocstringSectionKind.parameters
        for parameter in section.value
    }


def list_undocumented(path: str, thing: griffe.Object) -> list[str]:
    """Return the arguments of a function or class, and of its methods, without a description."""
    described = describe_parameters(thing)
    inner: list[str] = []
    if thing.is_class:
        fields = {name: each for name, each in thing.members.items() if each.is_attribute}
        described |= {name: each.docstring.value for name, each in fields.items() if each.docstring}
        for name, member in thing.members.items():
            is_shown = not name.startswith("_") or name == "__call__"
            if is_shown and member.is_function and member.docstring is not None:
                inner += list_undocumented(f"{path}.{name}", member)
    names = [each.name.lstrip("*") for each in getattr(thing, "parameters", ())]
    return inner + [
        f"{path}({name})"
        for name in names
        if name not in ("self", "cls") and not described.get(name, "").strip()
    ]


@pytest.mark.parametrize("public", NAMES, ids=lambda public: public.path)
def test_every_argument_is_described(public: reference.PublicName) -> None:
    assert not list_undocumented(public.path, reference.get_object(public.path))


def test_every_public_name_has_a_page() -> None:
    pages = reference.write_pages()
    shown = {line for text in pages.values() for line in text.splitlines() if line[:4] == "::: "}
    documented = {reference.get_object(line[4:]).canonical_path for line in shown}
    for name in set(mbpa.__all__) - {"testing"}:
        assert reference.get_object(f"mbpa.{name}").canonical_path in documented, name
    for module in reference.list_modules():
        for name in map(str, reference.get_object(module).exports or ()):
            thing = reference.get_object(f"{module}.{name}")
            assert thing.is_module or thing.canonical_path in documented, f"{module}.{name}"


@pytest.mark.parametrize("command", reference.list_commands())
def test_pages_of_commands_have_the_options_of_their_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split()[1:], "--help"]) == 0
    printed = set(
        re.findall(r"^\W*(--[a-z][\w-]*)(?:, (--[a-z][\w-]*))?", capsys.readouterr().out, re.M)
    )
    options = {option for pair in printed for option in pair if option}
    page = reference.write_pages()[reference.get_command_page(command)]
    described = re.findall(r"^`(--[\w-]+)[^`]*`(?:, `(--[\w-]+)`)?$", page, re.M)
    assert {option for pair in described for option in pair if option} == options
    fields = dataclasses.fields(reference.list_commands()[command])
    assert page.count("\n:   ") == len(fields)
