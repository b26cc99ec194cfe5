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
    """Directory or Hugging Face name of an encoder, or MODULE:FUNCTION for one of your own.
    The function returns an `Encoder`, or a function from a list of texts or pictures to keys.
    The default is a packaged MiniLM for texts, and a packaged EfficientNet for pictures."""
    max_lost_points: float | None = 1.0
    """Points of accuracy that labels taught later may cost those known now, for example 1 for
    96% → 95%. None sets no limit."""
    max_answered_out_of_scope: float | None = None
    """Share of the queries that belong to no label which may be answered, such as 0.05.
    By default it answers if it is more often right than wrong."""
    memory: Literal["exact", "graph", "auto"] = "exact"
    """Kind of memory of a run that adapts its head to the nearest examples: "exact" compares with
    all; "graph" finds most of the nearest much faster on a CPU (pip install 'mbpa[graph]'); "auto"
    is exact up to 100,000 examples. Runs with a learner, which most are, have no memory."""
    cache: Path = Path("~/.cache/mbpa/embeddings")
    """Directory where embeddings are cached for the next run; those of your own encoder are not."""
    again: bool = False
    """Replace the run in the directory, including everything it was taught."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to embed on; auto uses a GPU if there is one."""
    progress: bool = True
    """Show progress bars on standard error."""

    def run(self) -> int:
        from mbpa.encoders import own
        from mbpa.serve import run_directory, teaching

        start = time.perf_counter()
        is_own = own.is_own_encoder(self.encoder or "")
        if not self.data.exists():
            raise RunError(f"{self.data} cannot be read: No such file or directory")
        if self.max_lost_points is not None and not 0 <= self.max_lost_points < math.inf:
            raise RunError(
                f"--max-lost-points must be None or at least 0, got {self.max_lost_points}"
            )
        share = self.max_answered_out_of_scope
        if share is not None and not 0 < share < 1:
            raise RunError(f"--max-answered-out-of-scope must be between 0 and 1, got {share}")
        run_directory.require_free(self.out, replace=self.again)
        try:
            data, encoder = self._load_data()
        except ValueError as error:
            raise RunError(str(error)) from error
        try:
            taught = teaching.teach(
                data,
                encoder,
                # The fingerprint of an encoder of one's own may stay when its keys change.
                cache=None if is_own else self.cache.expanduser(),
                max_lost_points=self.max_lost_points,
                max_answered_out_of_scope=share,
                memory=self.memory,
                progress=self.progress,
            )
        except ValueError as error:
            why = f"{self.encoder} cannot be used: {error}" if is_own else str(error)
            raise RunError(why) from error
        teaching.write_new_run(taught, data, self.out, replace=self.again)
        print(teaching.report(taught, data))
        print(f"wrote {self.out} in {time.perf_counter() - start:.1f} s\n")
        which = f"{self.out} --encoder {self.encoder}" if is_own else f"{self.out}"
        print(f"next: mbpa serve {which}, or with a web page: mbpa explore {which}")
        return 0

    def _load_data(self) -> tuple[Any, Any]:
        """Return the examples and the encoder for them."""
        from mbpa.device import choose_device
        from mbpa.encoders import image, pictures, text
        from mbpa.serve import labelled_images, labelled_texts

        device = choose_device(self.device)
        columns: dict[str, Any] = {"label": self.label, "encoding": self.encoding}
        if self.data.is_dir() or self.image is not None:
            encoder = self._import_encoder("images") or image.encoder(
                self.encoder or image.DEFAULT_ENCODER, device=device
            )
            images = labelled_images.read_labelled_images(
                self.data, column=self.image or "image", progress=self.progress, **columns
            )
            return images, encoder
        if self.data.is_file() and self.data.suffix.lower() in pictures.SUFFIXES:
            raise RunError(
                f"{self.data} is a picture: pass a folder with one sub-folder of pictures per label"
            )
        data = labelled_texts.read_labelled_texts(self.data, text=self.text, **columns)
        return data, self._import_encoder("texts") or text.encoder(
            self.encoder or text.DEFAULT_ENCODER, device=device
        )

    def _import_encoder(self, takes: Literal["texts", "images"]) -> Any:
        """Return the user's own encoder; `None` if the option does not name one."""
        from mbpa.encoders import own

        if self.encoder is None or not own.is_own_encoder(self.encoder):
            return None
        source = own.import_encoder(self.encoder)
        return own.wrap_encoder(source, takes=takes, normalizes=True)
