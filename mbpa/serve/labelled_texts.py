"""Texts and labels from a CSV or JSONL file, as people have them; what cannot be is one line."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mbpa.errors import RunError
from mbpa.serve.answers import check_label, check_text
from mbpa.serve.journal import InputError

ENCODINGS = "utf-8-sig", "utf-16"  # a byte order mark tells which
MOST_FIELD = 1 << 20  # characters in a field of a CSV file


@dataclass(frozen=True)
class Spreadsheet:
    """Distinct pairs of a text and its label, in the order of the file."""

    takes: ClassVar[Literal["texts"]] = "texts"
    """What an encoder of its items takes."""
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    rows: int
    """In the file, without empty ones."""
    contradictions: int
    """Texts that come with more than one label; all of them are kept."""

    @property
    def items(self) -> tuple[str, ...]:
        """What is to be embedded."""
        return self.texts

    @property
    def duplicates(self) -> int:
        """Rows that say what another one says, and were left out."""
        return self.rows - len(self.texts)


def read_spreadsheet(
    path: Path,
    *,
    text: str = "text",
    label: str = "label",
    encoding: str | None = None,
    option: str = "text",
) -> Spreadsheet:
    """Read a file of texts and labels: JSONL if its name ends so, else CSV with a header.

    Args:
        text, label: names of the columns; a single other column beside the text's is the label's.
        encoding: UTF-8 by default, or UTF-16 where the file begins with its mark.
        option: of the command, that names the column of texts.

    Raises:
        RunError: naming the line that cannot be.
    """
    content = _decoded(path, encoding)
    is_json = path.suffix.lower() in {".jsonl", ".ndjson", ".json"}
    lines = _json_lines(path, content) if is_json else _csv_lines(path, content)
    pairs: dict[tuple[str, str], None] = {}
    rows = 0
    names: tuple[str, str] | None = None
    for number, row in lines:
        names = names or _columns(path, list(row), text, label, option)
        pair = _pair(f"{path}, line {number}", row, *names)
        if pair is not None:
            rows += 1
            pairs.setdefault(pair)
    if not pairs:
        raise RunError(f"{path} has no rows with a text and a label")
    meanings = Counter(said for said, _ in pairs)
    texts, labels = zip(*pairs, strict=True)
    if len(set(labels)) == 1:
        raise RunError(f"{path} has one label only, {labels[0]!r}: there is nothing to tell apart")
    return Spreadsheet(texts, labels, rows, sum(count > 1 for count in meanings.values()))


def _decoded(path: Path, encoding: str | None) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    if data[:4] in (b"PK\x03\x04", b"\xd0\xcf\x11\xe0"):  # newer and older workbooks
        raise RunError(f"{path} is a workbook: save the sheet as CSV (UTF-8)")
    chosen = encoding or ENCODINGS[data[:2] in (b"\xff\xfe", b"\xfe\xff")]
    try:
        return data.decode(chosen)
    except LookupError as error:
        raise RunError(f"there is no encoding {encoding!r}") from error
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        line = data.count(b"\n", 0, at) + 1
        raise RunError(
            f"{path}, line {line}: not {chosen.removesuffix('-sig').upper()} text; name its "
            "encoding, such as --encoding cp1252"
        ) from error


def _csv_lines(path: Path, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    head = content[: content.find("\n") if "\n" in content else None]
    delimiter = max(",;\t", key=head.count)  # what a spreadsheet writes depends on its language
    csv.field_size_limit(MOST_FIELD)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    number = 1
    try:
        for row in reader:
            if row and not names:
                names = row
            elif len(row) > len(names):
                raise RunError(
                    f"{path}, line {number}: has more fields than the header; a text with a "
                    f"{delimiter!r} in it must stand in quotes"
                )
            elif row:
                yield number, dict(zip(names, row, strict=False))  # a short row lacks the last ones
            number = reader.line_num + 1  # where the next one begins: a field may have many lines
    except csv.Error as error:
        raise RunError(f"{path}, line {number}: {error}") from error


def _json_lines(path: Path, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path}, line {number}: must be a JSON object ({error})") from error
        if not isinstance(row, dict):
            raise RunError(f"{path}, line {number}: must be a JSON object, got {line[:40]!r}")
        yield number, row


def _columns(path: Path, names: list[str], text: str, label: str, option: str) -> tuple[str, str]:
    """Names of the columns in this file, by those of its first row."""
    others = [name for name in names if name != text]
    if label == "label" and label not in names and len(others) == 1:
        label = others[0]
    for what, name in ((option, text), ("label", label)):
        if name not in names:
            raise RunError(
                f"{path} has no column {name!r}, but {', '.join(map(repr, names))}: say which "
                f"holds the {what} with --{what} NAME"
            )
    return text, label


def _pair(where: str, row: dict[str, Any], text: str, label: str) -> tuple[str, str] | None:
    """Text and label of a row, trimmed; `None` for a row without either."""
    values = []
    for name in (text, label):
        value = row.get(name)
        if name == label and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # numbered labels
        if value is not None and not isinstance(value, str):
            raise RunError(f"{where}: {name!r} must be text, got {value!r}")
        values.append((value or "").strip())
    if not any(values):
        return None
    for name, value, check in zip((text, label), values, (check_text, check_label), strict=True):
        try:
            check(value)
        except InputError as error:
            raise RunError(f"{where}: {name!r}: {error}") from error
    return values[0], values[1]
