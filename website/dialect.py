"""GitHub's Markdown in the dialect of Python-Markdown, which MkDocs uses.

Python-Markdown wants four spaces before everything within an item of a list and an empty line
before a list, and has no formulas. Here these are fences of the language `math`, or within a line
in $`…`$, as on GitHub. They become MathML, which browsers draw without a script or a font of ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown_it import MarkdownIt

INDENT = 4
DRAWING = re.compile(r'<img alt="([^"]*)" src="([^"]*\.svg)"[^>]*>')
FORMULA = re.compile(r"\$`([^`]+)`\$")
MARKER = re.compile(r"(?:[-*+]|\d+[.)]) +")


def translate(markdown: str) -> str:
    """Return the same document for Python-Markdown."""
    fenced = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
    parts, end = [], 0
    for found in fenced.finditer(markdown):
        parts += [_translate_prose(markdown[end : found.start()]), found[0]]
        end = found.end()
    return indent_lists("".join([*parts, _translate_prose(markdown[end:])]))


def _translate_prose(text: str) -> str:
    text = re.sub(r"^<!-- .* -->$", "", text, flags=re.MULTILINE)  # marks of generated blocks
    return FORMULA.sub(lambda found: convert(found[1]), text)


def indent_lists(markdown: str) -> str:
    """Indent everything within an item of a list by four spaces per level."""
    lines = markdown.split("\n")
    widths: list[list[int]] = [[] for _ in lines]  # of the markers of all items around a line
    starts = set()
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0:
            starts.add(token.map[0])
        if token.type == "list_item_open":
            first, last = token.map
            outer = sum(widths[first])
            marker = MARKER.match(lines[first][outer:].lstrip())
            assert marker is not None, lines[first]
            for number in range(first + 1, last):
                widths[number].append(len(marker[0]))
    translated = []
    for number, (line, width) in enumerate(zip(lines, widths, strict=True)):
        if number in starts and translated and translated[-1].strip():
            translated.append("")
        indented = min(sum(width), len(line) - len(line.lstrip()))
        translated.append(" " * (INDENT * len(width)) + line[indented:] if line.strip() else "")
    return "\n".join(translated)


def _draw_formula(source: str, *_: Any, **__: Any) -> str:
    formula = convert(source, display="block")
    formula = formula.replace("<mo>&#x02016;", '<mo stretchy="false">&#x02016;')  # ‖, both as high
    return f'<div class="formula scrolls" tabindex="0">{formula}</div>'


MATH_FENCE = {"name": "math", "class": "formula", "format": _draw_formula}


def inline_drawings(html: str, docs: Path) -> str:
    """Replace pictures in SVG by their content, so that they take on the colours of the page.

    A drawing uses `currentColor`. Its own `style` sets colours for GitHub, which shows it as an
    image; in a page they would override ours.

    Args:
        html: the content of a page.
        docs: the folder of all documents and drawings.
    """

    def insert(found: re.Match[str]) -> str:
        alt, name = found[1], Path(found[2]).name
        (path,) = docs.rglob(name)
        svg = re.sub(r"<style>.*?</style>", "", path.read_text("utf-8"), flags=re.DOTALL)
        return svg.replace("<svg ", f'<svg class="drawing" role="img" aria-label="{alt}" ', 1)

    return DRAWING.sub(insert, html)
