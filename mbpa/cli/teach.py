"""The command `mbpa teach`, which creates a run from examples."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import RunError


@dataclass(frozen=True)
class Teach(Command):
    """Create a classifier from a spreadsheet of texts and labels, or from a folder of pictures.

    Embeds the examples, trains a head, fills the memory and tunes. `mbpa serve` serves the result.
    """

    after_interrupt: ClassVar[str] = (
        "run the same command again to continue: finished embeddings are cached"
    )

    data: tyro.conf.Positional[Path]
    """File of examples: JSONL if its name ends in .jsonl, else CSV with a header.
    Or a folder with one sub-folder of pictures per label."""
    out: Path = Path("run")
    """Directory to write the run to."""
    text: str = "text"
    """Name of the column that holds the texts."""
    label: str = "label"
    """Name of the column that holds the labels.
    If there is no column "label" and only one other column, the default is that one."""
    image: str | None = None
    """Name of a column that holds paths to pictures, which are then taught instead of texts."""
    encoding: str | None = None
    """Encoding of the file, such as cp1252; UTF-8 by default."""
    encoder: str | None = None
    """Directory or Hugging Face name of an encoder.
    The default is a packaged MiniLM for texts, and a packaged EfficientNet for pictures."""
    max_lost_points: float | None = 1.0
    """Points of accuracy that labels taught later may cost those known now, for example 1 for
    96% → 95%. None sets no limit, which gives the best accuracy over all labels."""
    cache: Path = Path("~/.cache/mbpa/embeddings")
    """Directory where embeddings are cached for the next run."""
    again: bool = False
    """Replace the run in the directory, including everything it was taught."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to embed on; auto uses a GPU if there is one."""
    progress: bool = True
    """Show progress bars on standard error."""

    def run(self) -> int:
        from mbpa.serve import run_directory, teaching

        start = time.perf_counter()
        if not self.data.exists():
            raise RunError(f"{self.data} cannot be read: No such file or directory")
        if self.max_lost_points is not None and not 0 <= self.max_lost_points < math.inf:
            raise RunError(
                f"--max-lost-points must be None or at least 0, got {self.max_lost_points}"
            )
        run_directory.require_free(self.out, replace=self.again)
        try:
            data, encoder = self._load_data()
        except ValueError as error:
            raise RunError(str(error)) from error
        cache = self.cache.expanduser()
        taught = teaching.teach(
            data,
            encoder,
            cache=cache,
            max_lost_points=self.max_lost_points,
            progress=self.progress,
        )
        teaching.write_new_run(taught, data, self.out, replace=self.again)
        print(teaching.report(taught, data))
        print(f"wrote {self.out} in {time.perf_counter() - start:.1f} s\n")
        print(f"next: mbpa serve {self.out}, or with a web page: mbpa explore {self.out}")
        return 0

    def _load_data(self) -> tuple[Any, Any]:
        """Return the examples and the encoder for them."""
        from mbpa.device import choose_device
        from mbpa.encoders import image, pictures, text
        from mbpa.serve import labelled_images, labelled_texts

        device = choose_device(self.device)
        columns: dict[str, Any] = {"label": self.label, "encoding": self.encoding}
        if self.data.is_dir() or self.image is not None:
            encoder = image.encoder(self.encoder or image.DEFAULT_ENCODER, device=device)
            images = labelled_images.read_labelled_images(
                self.data, column=self.image or "image", progress=self.progress, **columns
            )
            return images, encoder
        if self.data.is_file() and self.data.suffix.lower() in pictures.SUFFIXES:
            raise RunError(
                f"{self.data} is a picture: pass a folder with one sub-folder of pictures per label"
            )
        data = labelled_texts.read_labelled_texts(self.data, text=self.text, **columns)
        return data, text.encoder(self.encoder or text.DEFAULT_ENCODER, device=device)
