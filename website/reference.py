"""Pages of the reference, one per public name and one per command.

Public names are those that the modules below list in `__all__`, and a few that documents name.
mkdocstrings fills their pages from the docstrings; commands are described by the help texts of
their options.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import types
import typing
from pathlib import Path
from typing import Any

import griffe

from mbpa import cli
from mbpa.cli import journal, lm
from mbpa.cli.command import Command

ROOT = Path(__file__).parents[1]
MODULES = {
    "mbpa": "The library",
    "mbpa.teaching": "Classifiers that are taught",
    "mbpa.language": "Language models",
    "mbpa.memory": "Memory backends",
    "mbpa.encoders": "Encoders",
    "mbpa.serve": "Serving from Python",
    "mbpa.testing": "Conformance suites",
}
"""Public modules and their titles, in the order of the navigation."""
NAMED_IN_DOCUMENTS = {
    "mbpa.memory": ("qdrant.QdrantMemory", "milvus.MilvusMemory"),
    "mbpa.encoders": (
        *("base.Encoder", "text.encoder", "image.encoder"),
        *("own.wrap_encoder", "pictures.standardize"),
    ),
    "mbpa.serve": ("teaching.teach",),
}
"""Public names that are imported from a submodule, since they need an extra."""
GROUPS = {"lm": lm.COMMANDS, "journal": journal.COMMANDS}


@dataclasses.dataclass(frozen=True)
class PublicName:
    """A name with a page of its own."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """What to import, such as `mbpa.MbPA`."""
        return f"{self.module}.{self.name}"

    @property
    def page(self) -> str:
        """Name of the file of its page, relative to docs/."""
        return f"reference/{self.module.replace('.', '-')}/{self.name}.md"

    @property
    def summary(self) -> str:
        """First sentence of its docstring."""
        docstring = get_object(self.path).docstring
        assert docstring is not None, f"{self.path} must have a docstring"
        return docstring.value.split("\n\n")[0].replace("\n", " ")


@functools.cache
def load_package() -> griffe.Module:
    """Return the package as griffe reads it, without importing it."""
    package = griffe.load("mbpa", search_paths=[str(ROOT)], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    return package


def get_object(path: str) -> griffe.Object:
    """Return what a dotted path such as `mbpa.MbPA` stands for.

    `mbpa.tune` is a function, which hides the module that it comes from.
    """
    found: Any = load_package()
    for part in path.split(".")[1:]:
        owner, found = found, found.members[part]
    found = found.final_target if found.is_alias else found
    if found.is_module and path != "mbpa" and part in (owner.exports or ()):
        found = found.members.get(part, found)
    return found


def list_modules() -> dict[str, str]:
    """Return the public modules with their titles, and the integrations that there are."""
    found = dict(MODULES)
    for path in sorted((ROOT / "mbpa" / "integrations").glob("*.py")):
        if not path.stem.startswith("_"):
            found[f"mbpa.integrations.{path.stem}"] = f"Integration: {path.stem}"
    return found


@functools.cache
def list_names() -> dict[str, tuple[PublicName, ...]]:
    """Return the public names of each module that no earlier module has."""
    found: dict[str, tuple[PublicName, ...]] = {}
    seen: set[str] = set()
    for module in list_modules():
        exported = get_object(module).exports or ()
        listed = (*(str(each) for each in exported), *NAMED_IN_DOCUMENTS.get(module, ()))
        names = []
        for name in sorted(listed, key=lambda name: name.rpartition(".")[2].lower()):
            thing = get_object(f"{module}.{name}")
            if not thing.is_module and thing.canonical_path not in seen:
                seen.add(thing.canonical_path)
                names.append(PublicName(module, name))
        found[module] = tuple(names)
    return found


def list_commands() -> dict[str, type[Command]]:
    """Return all commands by their full names, such as `mbpa lm read`."""
    found: dict[str, type[Command]] = {}
    for name, command in cli.COMMANDS.items():
        for part, each in GROUPS.get(name, {"": command}).items():
            found[f"mbpa {name} {part}".strip()] = each
    return found


def make_navigation() -> list[Any]:
    """Return the navigation of the reference."""
    sections: list[Any] = ["reference/index.md"]
    for module, names in list_names().items():
        pages: list[Any] = [f"reference/{module.replace('.', '-')}/index.md"]
        pages += [{each.name.rpartition(".")[2]: each.page} for each in names]
        sections.append({list_modules()[module]: pages})
    commands = [{name: get_command_page(name)} for name in list_commands()]
    return [*sections, {"Commands": ["reference/commands/index.md", *commands]}]


def write_pages() -> dict[str, str]:
    """Return the Markdown of all pages, by the name of the file."""
    pages = {"reference/index.md": _write_index()}
    for module, names in list_names().items():
        folder = f"reference/{module.replace('.', '-')}"
        pages[f"{folder}/index.md"] = _write_module(module, names)
        for each in names:
            title = each.name.rpartition(".")[2]
            target = get_object(each.path).canonical_path
            pages[each.page] = f"---\ntitle: {title}\n---\n\n::: {target}\n"
    commands = list_commands()
    pages["reference/commands/index.md"] = _write_commands(commands)
    for name, command in commands.items():
        pages[get_command_page(name)] = _write_command(name, command)
    return pages


def link_names(html: str, url: str) -> str:
    """Link code such as `mbpa.Adapted(k=20)`, outside of links and blocks, to its page.

    Args:
        html: the content of a page.
        url: the address of that page, relative to the site.
    """
    pages = {each.path: each.page for names in list_names().values() for each in names}

    def link(found: re.Match[str]) -> str:
        page = pages.get(found[2])
        if page is None:
            return found[0]
        target = os.path.relpath(page.removesuffix(".md"), url or ".")
        return f'<a class="name" href="{target}/">{found[0]}</a>'

    parts = re.split(r"(<pre.*?</pre>|<a .*?</a>|<h\d.*?</h\d>)", html, flags=re.DOTALL)
    code = re.compile(r"(<code>)(mbpa(?:\.\w+)+)((?:\([^<]*\))?</code>)")
    parts[::2] = [code.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def _write_index() -> str:
    lines = ["# Reference", "", "Every public name and every command, from their docstrings.", ""]
    lines += ["| module | |", "| --- | --- |"]
    for module, title in list_modules().items():
        lines.append(f"| [`{module}`]({module.replace('.', '-')}/index.md) | {title} |")
    lines.append("| [`mbpa …`](commands/index.md) | Commands |")
    return "\n".join(lines) + "\n"


def _write_module(module: str, names: tuple[PublicName, ...]) -> str:
    docstring = get_object(module).docstring
    assert docstring is not None, f"{module} must have a docstring"
    lines = [f"# `{module}`", "", docstring.value, "", "| name | |", "| --- | --- |"]
    for each in names:
        summary = each.summary.replace("|", "\\|")
        lines.append(f"| [`{each.name}`]({each.name}.md) | {summary} |")
    return "\n".join(lines) + "\n"


def get_command_page(name: str) -> str:
    """Return the name of the file of a command's page, relative to docs/."""
    return f"reference/commands/{name.removeprefix('mbpa ').replace(' ', '-')}.md"


def _write_commands(commands: dict[str, type[Command]]) -> str:
    lines = ["# Commands", "", "`mbpa COMMAND --help` prints the same.", ""]
    lines += ["| command | |", "| --- | --- |"]
    for name, command in commands.items():
        summary = (command.__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()
        target = get_command_page(name).rpartition("/")[2]
        lines.append(f"| [`{name}`]({target}) | {' '.join(summary.split())} |")
    return "\n".join(lines) + "\n"


def _write_command(name: str, command: type[Command]) -> str:
    """Describe a command by its docstring and by the docstrings of its fields."""
    hints = typing.get_type_hints(command)
    positional, options = [], []
    for field in dataclasses.fields(typing.cast(Any, command)):
        is_positional = "Positional" in str(field.type)
        (positional if is_positional else options).append(field)
    paragraphs = [" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n")]
    arguments = "".join(f" {_name_argument(field)}" for field in positional)
    usage = f"$ {name}{arguments}{' [OPTIONS]' if options else ''}"
    lines = [f"# `{name}`", "", *"\n\n".join(paragraphs).split("\n"), ""]
    lines += ["```console", usage, "```", ""]
    if positional:
        lines += ["## Arguments", ""]
    for field in positional:
        lines += [f"`{_name_argument(field)}`", *_describe(command, field.name), ""]
    if options:
        lines += ["## Options", ""]
    for field in options:
        flag = "--" + field.name.replace("_", "-")
        kind = _name_kind(hints[field.name])
        shown = f"`{flag}`, `--no-{flag[2:]}`" if kind == "bool" else f"`{flag} {kind}`"
        lines += [shown, *_describe(command, field.name)]
        if isinstance(field.default, bool):
            lines += ["", "    Default: on"] if field.default else []
        elif field.default not in (None, dataclasses.MISSING):
            lines += ["", f"    Default: `{field.default}`"]
        lines.append("")
    return "\n".join(lines) + "\n"


def _name_argument(field: dataclasses.Field[Any]) -> str:
    return field.name.upper() + (" …" if "tuple" in str(field.type) else "")


def _name_kind(hint: Any) -> str:
    """Return what an option takes, such as `PATH`, `INT` or `auto|cpu|cuda`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return "|".join(
            _name_kind(each) for each in typing.get_args(hint) if each is not type(None)
        )
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(str(each) for each in typing.get_args(hint))
    if hint is bool:
        return "bool"
    return "TEXT" if hint is str else getattr(hint, "__name__", str(hint)).upper()


def _describe(command: type[Command], field: str) -> list[str]:
    """Return the docstring of a field as a definition; it may be that of a base class."""
    for base in command.__mro__:
        members = get_object(f"{base.__module__}.{base.__qualname__}").members
        if field in members and members[field].docstring is not None:
            docstring = members[field].docstring
            assert docstring is not None
            return [":   " + docstring.value.replace("\n", "\n    ")]
    raise LookupError(f"{command.__qualname__}.{field} must have a docstring")
