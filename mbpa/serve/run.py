"""A run directory: what `mbpa teach` makes and a classifier starts from.

RUN/run.json         what it is: encoder, trained labels, threshold
RUN/model/           the trained head, the predictor, how rows of new labels are made; a checkpoint
RUN/journal.sqlite   every example: those it was made from, and those taught since
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa import image, text
from mbpa.checkpoint import load_checkpoint, save_checkpoint
from mbpa.embedding import Encoder
from mbpa.errors import CheckpointError, RunError
from mbpa.rows import NewRows, require_unit_norm
from mbpa.serve.journal import Journal
from mbpa.spec import build, describe

# What knows of texts alone cannot read pictures, and what knows no rows would leave them zero.
FORMATS = {"texts": 1, "images": 2}
WITH_ROWS = 3
RUN, MODEL, JOURNAL = "run.json", "model", "journal.sqlite"
ROWS, MIDDLE = "rows", ("direction", "weight", "bias")  # in the checkpoint


@dataclass(frozen=True)
class RunInfo:
    """What `run.json` says."""

    key_dim: int
    labels: tuple[str, ...]
    """Those the head was trained with, in the order of its rows."""
    trained_examples: int
    """Examples with ids up to this are what it was trained with."""
    threshold: float
    encoder: str | None
    """`None`: it takes keys only."""
    fingerprint: str | None = None
    """Of the encoder."""
    summary: dict[str, Any] | None = None
    """How it was made and what it reached; for people to read."""
    takes: Literal["texts", "images"] = "texts"
    """What the encoder is of."""

    def write(self, directory: Path, *, has_rows: bool = False) -> None:
        told = dict(vars(self))
        format = WITH_ROWS if has_rows else FORMATS[self.takes]
        if format == 1:
            del told["takes"]
        content = {"format": format, "mbpa": mbpa.__version__, **told}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (directory / RUN).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> RunInfo:
        path = directory / RUN
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.pop("format") not in (*FORMATS.values(), WITH_ROWS):
                raise RunError(f"{path} was written by a newer mbpa: upgrade mbpa")
            content.pop("mbpa")
            labels = tuple(content.pop("labels"))
            return cls(labels=labels, **content)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(
                f"{directory} is no run: there is no {RUN}; make one with `mbpa teach`"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path} is damaged: {error}") from error


def write_run(
    directory: Path,
    info: RunInfo,
    head: nn.Linear,
    predictor: mbpa.Predictor,
    examples: Iterable[tuple[str, str | bytes | None]],
    keys: Float[Tensor, "N D"],
    rows: NewRows | None = None,
) -> None:
    """Make a run directory of a trained head and its examples, (label, text or picture) and
    key each.

    Args:
        rows: how those of new labels are made, of keys of unit norm; by default they are zero.

    Raises:
        ValueError: with `rows`, a key has another norm.
    """
    if rows is not None:
        require_unit_norm(keys)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"head": dict(head.state_dict())}
    description = {"predictor": describe(predictor)}
    if rows is not None:
        tensors[ROWS] = {name: getattr(rows, name).detach() for name in MIDDLE}
        description[ROWS] = {"scale": rows.scale, "offset": rows.offset}
    save_checkpoint(directory / MODEL, tensors=tensors, description=description)
    written = [
        (label, said, as_bytes(key))
        for (label, said), key in zip(examples, keys.cpu(), strict=True)
    ]
    with Journal(directory / JOURNAL) as journal:
        journal.learn(written)
    info.write(directory, has_rows=rows is not None)


class Model(NamedTuple):
    """What is in `model/`."""

    head: nn.Linear
    """On the device that was asked for."""
    predictor: mbpa.Predictor
    rows: NewRows | None
    """On the CPU; `None` in runs that were made before there were any."""


def read_model(directory: Path, info: RunInfo, device: str | torch.device) -> Model:
    """The model of a run."""
    try:
        saved = load_checkpoint(directory / MODEL)
        head = nn.Linear(info.key_dim, len(info.labels), device=device)
        head.load_state_dict(saved.tensors["head"])
        predictor = build(saved.description["predictor"])
        if not isinstance(predictor, mbpa.Predictor):
            raise ValueError(f"{predictor!r} is no predictor")
        rows = None
        if ROWS in saved.description:
            direction, weight, bias = (saved.tensors[ROWS][name] for name in MIDDLE)
            rows = NewRows(direction, weight, bias, **saved.description[ROWS])
    except (CheckpointError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RunError(f"the model in {directory} cannot be used: {error}") from error
    return Model(head, predictor, rows)


def read_encoder(info: RunInfo, device: str | torch.device) -> Encoder[Any] | None:
    """The encoder that a run was made with; `None` if it takes keys only.

    Raises:
        ValueError: it is not on this machine.
    """
    if info.encoder is None:
        return None
    if info.takes == "images":
        return image.encoder(info.encoder, device=device)
    return text.encoder(info.encoder, device=device)


def as_bytes(key: Float[Tensor, "D"]) -> bytes:
    """A key on the CPU as the journal keeps it."""
    return key.detach().numpy().astype("<f4").tobytes()


def from_bytes(key: bytes) -> Float[np.ndarray, "D"]:
    """A key that the journal kept."""
    return np.frombuffer(key, "<f4")
