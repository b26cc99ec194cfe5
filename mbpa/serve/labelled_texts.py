"""Labelled texts from a CSV or JSONL file; errors are reported in one line."""

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
from mbpa.serve.input_checks import check_label, check_text
from mbpa.serve.journal import InputError

ORIGIN, ORIGINS = "origin", ("trained", "taught")  # the column that `mbpa export` writes
ENCODINGS = "utf-8-sig", "utf-16"  # chosen by the byte order mark
MAX_FIELD_CHARACTERS = 1 << 20  # characters per field of a CSV file


@dataclass(frozen=True)
class LabelledTexts:
    """Distinct pairs of a text and its label, in the order of the file."""

    takes: ClassVar[Literal["texts"]] = "texts"
    """Kind of the items, as in `Encoder.takes`."""
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    rows: int
    """Number of rows in the file, without empty ones."""
    contradictions: int
    """Number of texts with more than one label; all of them are kept."""
    lessons: tuple[tuple[str, str], ...] = ()
    """Texts and labels that were taught to an exported run after it was trained, in order."""

    @property
    def items(self) -> tuple[str, ...]:
        """Items to embed."""
        return self.texts

    @property
    def duplicates(self) -> int:
        """Number of rows left out because they repeat another one."""
        return self.rows - len(self.texts)


def read_labelled_texts(
    path: Path,
    *,
    text: str = "text",
    label: str = "label",
    encoding: str | None = None,
    option: str = "text",
) -> LabelledTexts:
    """Read a file of texts and labels: JSONL or CSV with a header, depending on the suffix.

    A file that `mbpa export` wrote says of each row whether it was trained or taught. The taught
    ones become lessons, exactly as they were; if none was trained, all are examples to train with.

    Args:
        text, label: names of the columns. If `label` is the default, there is no such column, and
            there is only one other column besides the texts, that one holds the labels.
        encoding: UTF-8 by default, or UTF-16 if the file begins with its byte order mark.
        option: command-line option that names the column of texts, for error messages.

    Raises:
        RunError: a line is invalid; the message names it.
    """
    content = _decode_file(path, encoding)
    is_json = path.suffix.lower() in {".jsonl", ".ndjson", ".json"}
    lines = _parse_json_lines(path, content) if is_json else _parse_csv(path, content)
    numbered = list(lines)
    origins = {row.get(ORIGIN) for _, row in numbered}
    is_exported = "trained" in origins and origins <= set(ORIGINS)
    pairs: dict[tuple[str, str], None] = {}
    lessons: list[tuple[str, str]] = []
    rows = 0
    names: tuple[str, str] | None = None
    for number, row in numbered:
        names = names or _choose_columns(path, list(row), text, label, option)
        pair = _parse_pair(f"{path}, line {number}", row, *names, trim=not is_exported)
        if pair is None:
            continue
        if is_exported and row[ORIGIN] == "taught":
            lessons.append(pair)
        else:
            rows += 1
            pairs.setdefault(pair)
    if not pairs:
        raise RunError(f"{path} has no rows with a text and a label")
    labels_per_text = Counter(text for text, _ in pairs)
    texts, labels = zip(*pairs, strict=True)
    if len(set(labels)) == 1:
        raise RunError(f"{path} has only one label, {labels[0]!r}: at least two are needed")
    contradictions = sum(count > 1 for count in labels_per_text.values())
    return LabelledTexts(texts, labels, rows, contradictions, tuple(lessons))


def _decode_file(path: Path, encoding: str | None) -> str:
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
            f"{path}, line {line}: not {chosen.removesuffix('-sig').upper()} text; pass the "
            "encoding of the file, such as --encoding cp1252"
        ) from error


def _parse_csv(path: Path, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    head = content[: content.find("\n") if "\n" in content else None]
    delimiter = max(",;\t", key=head.count)  # spreadsheets use different ones in different locales
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    number = 1
    try:
        for row in reader:
            if row and not names:
                names = row
            elif len(row) > len(names):
                raise RunError(
                    f"{path}, line {number}: more fields than the header has; a text that "
                    f"contains {delimiter!r} must be quoted"
                )
            elif row:
                yield number, dict(zip(names, row, strict=False))  # a row may lack its last fields
            number = reader.line_num + 1  # first line of the next row: a field may span lines
    except csv.Error as error:
        raise RunError(f"{path}, line {number}: {error}") from error


def _parse_json_lines(path: Path, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
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


def _choose_columns(
    path: Path, names: list[str], text: str, label: str, option: str
) -> tuple[str, str]:
    """Return the names of the text and label columns, given all names in the first row."""
    others = [name for name in names if name != text]
    if label == "label" and label not in names and len(others) == 1:
        label = others[0]
    for what, name in ((option, text), ("label", label)):
        if name not in names:
            raise RunError(
                f"{path} has no column {name!r}, only {', '.join(map(repr, names))}: name the "
                f"column of the {what}s with --{what} NAME"
            )
    return text, label


def _parse_pair(
    where: str, row: dict[str, Any], text: str, label: str, *, trim: bool
) -> tuple[str, str] | None:
    """Return the text and label of a row; `None` if both are empty.

    Args:
        where: the place in the file, for error messages.
        row: the fields.
        text, label: names of the columns.
        trim: remove white space around the text. Labels are always trimmed.
    """
    values = []
    for name in (text, label):
        value = row.get(name)
        if name == label and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # numbered labels
        if value is not None and not isinstance(value, str):
            raise RunError(f"{where}: {name!r} must be text, got {value!r}")
        value = value or ""
        values.append(value.strip() if trim or name == label or not value.strip() else value)
    if not any(values):
        return None
    for name, value, check in zip((text, label), values, (check_text, check_label), strict=True):
        try:
            check(value)
        except InputError as error:
            raise RunError(f"{where}: {name!r}: {error}") from error
    return values[0], values[1]
