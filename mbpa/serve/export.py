"""`mbpa export`: write the examples of a run to a CSV or JSONL file that `mbpa teach` reads."""

from __future__ import annotations

import abc
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from mbpa import files
from mbpa.encoders import pictures
from mbpa.errors import RunError
from mbpa.serve.audit import format_time
from mbpa.serve.client import ServiceClient
from mbpa.serve.journal import ExampleFilter, InUseError, Journal, JournalError
from mbpa.serve.run_info import JOURNAL_FILE, RunInfo

Origin = Literal["trained", "taught"]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
EXAMPLES_PER_PART = 1000


def open_journal(directory: Path, *, writable: bool = False) -> Journal:
    """Open the journal of a run that is not being served.

    Raises:
        RunError: there is no run, it is damaged, or it is being served.
    """
    RunInfo.read(directory)
    try:
        return Journal(directory / JOURNAL_FILE, create=False, writable=writable)
    except InUseError as error:
        raise RunError(
            f"{error}; or give the URL of the service in place of the directory"
        ) from error
    except JournalError as error:
        raise RunError(str(error)) from error


class ExampleSource(abc.ABC):
    """Where the examples to export come from. Use it as a context manager, which closes it."""

    takes: str | None
    """"texts" or "images"; `None`: embeddings only."""

    @abc.abstractmethod
    def list_examples(self, label: str | None, origin: Origin | None) -> Iterator[dict[str, Any]]:
        """Return the examples as `GET /examples` does, by rising id."""

    @abc.abstractmethod
    def read_picture(self, id: int) -> bytes | None:
        """Return the picture of an example; `None` if it was forgotten meanwhile."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the source holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RunSource(ExampleSource):
    """A run directory that is not being served."""

    def __init__(self, directory: Path) -> None:
        info = RunInfo.read(directory)
        self.takes = None if info.encoder is None else info.takes
        self._last_trained = info.trained_examples
        self._journal = open_journal(directory)

    def list_examples(self, label: str | None, origin: Origin | None) -> Iterator[dict[str, Any]]:
        wanted = ExampleFilter(label, None, None if origin is None else origin == "trained")
        last: int | None = None
        while found := self._journal.list_examples(
            wanted, limit=EXAMPLES_PER_PART, after=last, last_trained=self._last_trained
        ):
            for each in found:
                yield {
                    "id": each.id,
                    "label": each.label,
                    "text": each.text,
                    "origin": "trained" if each.is_trained else "taught",
                    "taught_at": None if each.taught_ms is None else format_time(each.taught_ms),
                    "by": each.by,
                }
            last = found[-1].id

    def read_picture(self, id: int) -> bytes | None:
        found = self._journal.example(id)
        return None if found is None else found.image

    def close(self) -> None:
        self._journal.close()


class ServiceSource(ExampleSource):
    """A running service."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self.takes = client.get("/stats")["takes"]

    def list_examples(self, label: str | None, origin: Origin | None) -> Iterator[dict[str, Any]]:
        return self._client.list_examples({"label": label, "origin": origin})

    def read_picture(self, id: int) -> bytes | None:
        file = io.BytesIO()
        self._client.download(f"/examples/{id}/image", file)
        return file.getvalue()

    def close(self) -> None:
        pass  # every request has a connection of its own


def export_examples(
    source: ExampleSource, out: Path, *, label: str | None = None, origin: Origin | None = None
) -> int:
    """Write the examples to a file, JSONL or CSV depending on its suffix; return their number.

    Pictures are written to a folder beside it, and the file holds their paths.

    Raises:
        RunError: there is nothing to export, or the run holds embeddings without texts.
    """
    if source.takes is None:
        raise RunError("the run was made without an encoder: its embeddings cannot be exported")
    kind = "text" if source.takes == "texts" else "image"
    folder = out.with_name(f"{out.stem}-pictures")
    rows = []
    for example in source.list_examples(label, origin):
        if kind == "text":
            item = example["text"]
        else:
            item = _write_picture(folder, example["id"], source.read_picture(example["id"]))
        if item is not None:
            rows.append({kind: item} | {name: example[name] for name in _COLUMNS})
    if not rows:
        raise RunError("no example matches: nothing was written")
    content = _format_json(rows) if out.suffix.lower() in JSON_SUFFIXES else _format_csv(rows)
    files.write_durably(out, content.encode())
    return len(rows)


_COLUMNS = ("label", "origin", "taught_at", "by")


def _write_picture(folder: Path, id: int, picture: bytes | None) -> str | None:
    """Write a picture and return its path relative to the exported file."""
    if picture is None:
        return None
    suffix = ".png" if pictures.get_media_type(picture) == "image/png" else ".jpg"
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_file(folder / f"{id}{suffix}", picture)
    return f"{folder.name}/{id}{suffix}"


def _format_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _format_json(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
