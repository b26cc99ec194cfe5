"""`mbpa teach`: make a run from examples."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import RunError


@dataclass(frozen=True)
class Teach(Command):
    """Make a classifier from a spreadsheet of texts and labels, or from a folder of pictures.

    Embeds them, trains a head, fills the memory, and tunes; `mbpa serve` starts what it wrote.
    """

    after_interrupt: ClassVar[str] = "run the same command again: what was embedded is kept"

    data: tyro.conf.Positional[Path]
    """The file: JSONL if its name ends in .jsonl, else CSV with a header. Or a folder, with a
    sub-folder of pictures for each label."""
    out: Path = Path("run")
    """Directory of the run."""
    text: str = "text"
    """Name of the column of texts."""
    label: str = "label"
    """Name of the column of labels; if there is one other column, that."""
    image: str | None = None
    """Name of a column of paths to pictures, which are then taught in place of texts."""
    encoding: str | None = None
    """Of the file, such as cp1252; by default UTF-8."""
    encoder: str | None = None
    """A directory or a name of Hugging Face; by default a packaged MiniLM for texts, and for
    pictures "edges", a plain one that needs no weights."""
    cache: Path = Path("~/.cache/mbpa/embeddings")
    """Where embeddings are kept for the next time."""
    again: bool = False
    """Replace the run in the directory, with all that it was taught."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to embed; auto: on a GPU if there is one."""
    progress: bool = True
    """Show progress bars on standard error."""

    def run(self) -> int:
        from mbpa.serve import run_directory, teaching

        start = time.perf_counter()
        if not self.data.exists():
            raise RunError(f"{self.data} cannot be read: No such file or directory")
        run_directory.require_free(self.out, replace=self.again)
        try:
            data, encoder = self._given()
        except ValueError as error:
            raise RunError(str(error)) from error
        cache = self.cache.expanduser()
        taught = teaching.teach(data, encoder, cache=cache, progress=self.progress)
        teaching.write_taught(taught, data, self.out, replace=self.again)
        print(teaching.report(taught, data))
        print(f"wrote {self.out} in {time.perf_counter() - start:.1f} s\n")
        print(f"next: mbpa serve {self.out}, or with a page to it: mbpa explore {self.out}")
        return 0

    def _given(self) -> tuple[Any, Any]:
        """The examples, and the encoder for them."""
        from mbpa.device import choose_device
        from mbpa.encoders import image, text
        from mbpa.serve import labelled_images, labelled_texts

        device = choose_device(self.device)
        columns: dict[str, Any] = {"label": self.label, "encoding": self.encoding}
        if self.data.is_dir() or self.image is not None:
            encoder = image.encoder(self.encoder or image.DEFAULT, device=device)
            pictures = labelled_images.read_album(
                self.data, column=self.image or "image", progress=self.progress, **columns
            )
            return pictures, encoder
        if self.data.is_file() and self.data.suffix.lower() in image.SUFFIXES:
            raise RunError(
                f"{self.data} is a picture: name a folder, with a sub-folder of pictures a label"
            )
        data = labelled_texts.read_spreadsheet(self.data, text=self.text, **columns)
        return data, text.encoder(self.encoder or text.DEFAULT, device=device)
