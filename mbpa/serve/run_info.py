"""The contents of a run directory, which `mbpa teach` writes and a classifier loads.

RUN/run.json         description: encoder, trained labels, threshold
RUN/model/           checkpoint: the trained head and the learner, or else the predictor and how to
                     make rows for new labels; `run.json` names it, since `mbpa retrain` writes
                     another one
RUN/journal.sqlite   all examples: those the run was made from, and those taught since
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa import files
from mbpa.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mbpa.encoders import image, text
from mbpa.encoders.base import Encoder
from mbpa.encoders.own import FunctionEncoder, OwnEncoder, wrap_encoder
from mbpa.errors import CheckpointError, RunError
from mbpa.memory.choosing import MEMORY_KINDS, MemoryKind
from mbpa.modules.new_rows import NewRows, require_unit_norm
from mbpa.serialization import build, describe
from mbpa.serve.journal import Example, Journal
from mbpa.teaching import Learner
from mbpa.teaching.combination import MAX_LOST_POINTS

RUN_FORMAT = 7
# 6: the memory is always exact; 5: no learner, and the head is ours; 4: the model is in `model`.
EARLIER_FORMATS = (1, 2, 3)  # texts; pictures; rows for new labels. None has a checksum.
MAX_KEY_NORM = 1e15  # upper limit on the norm of a key
RUN_FILE, MODEL_DIRECTORY, JOURNAL_FILE = "run.json", "model", "journal.sqlite"
ROWS, ROW_TENSORS = "rows", ("direction", "weight", "bias")  # in the checkpoint
LEARNER = "learner"  # in the checkpoint


@dataclass(frozen=True)
class RunInfo:
    """The contents of `run.json`."""

    key_dim: int
    labels: tuple[str, ...]
    """Labels that the head was trained with, in the order of its rows."""
    trained_examples: int
    """Highest id of the examples that the head was trained with."""
    threshold: float
    encoder: str | None
    """Name of the encoder; `None`: the run takes keys only."""
    fingerprint: str | None = None
    """Fingerprint of the encoder."""
    summary: dict[str, Any] | None = None
    """How the run was made and the accuracy it reached, for people to read."""
    takes: Literal["texts", "images"] = "texts"
    """Kind of items that the encoder takes."""
    model: str = MODEL_DIRECTORY
    """Name of the directory that holds the model."""
    change: int = 0
    """Number of the last change of the journal that the head was trained after. Labels that were
    renamed later have other names in `labels`."""
    max_lost_points: float | None = MAX_LOST_POINTS
    """How many points of accuracy on trained labels new labels may cost; `None`: any number. Only
    for runs with a learner."""
    max_answered_out_of_scope: float | None = None
    """Share of the queries that belong to no label which may be answered, by which the threshold is
    chosen; `None`: it is where answers are more often right than wrong."""
    has_own_head: bool = False
    """Whether the head is the user's own, trained elsewhere with examples that are not in the run.
    It takes the keys of its encoder as they are, keeps all its rows whatever is forgotten, and is
    not trained again."""
    memory: MemoryKind = "exact"
    """Kind of memory of a model that adapts its head. A learner has none."""

    def write(self, directory: Path) -> None:
        """Write `run.json` durably."""
        files.write_durably(directory / RUN_FILE, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of `run.json`."""
        content = {"format": RUN_FORMAT, "mbpa": mbpa.__version__, **vars(self)}
        content["sha256"] = files.digest_json(content)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        return f"{text}\n".encode()

    @classmethod
    def read(cls, directory: Path) -> RunInfo:
        """Read `run.json` and verify it.

        Raises:
            RunError: the file is missing, damaged, or was written by a newer mbpa.
        """
        path = directory / RUN_FILE
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunError(
                f"{directory} is not a run (it has no {RUN_FILE}): create one with `mbpa teach`"
            ) from error
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, name: str) -> RunInfo:
        """Parse and verify the content of a `run.json`, which messages call `name`.

        Raises:
            RunError: it is damaged, or was written by a newer mbpa.
        """
        try:
            return cls._parse(json.loads(content.decode()))
        except _NewerFormat as error:
            raise RunError(f"{name} was written by a newer mbpa: upgrade mbpa") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{name} is damaged: {error}") from error

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> RunInfo:
        format = content["format"]
        if type(format) is not int or format < 1:
            raise ValueError(f"format must be a positive integer, got {format!r}")
        if format > RUN_FORMAT:
            raise _NewerFormat
        if format not in EARLIER_FORMATS and content.pop("sha256") != files.digest_json(content):
            raise ValueError("its checksum is wrong")
        del content["format"], content["mbpa"]
        labels = content.pop("labels")
        if type(labels) is not list:
            raise ValueError(f"labels must be a list, got {type(labels).__name__}")
        info = cls(labels=tuple(labels), **content)
        info._require_types()
        return info

    def _require_types(self) -> None:
        """Raise `ValueError` for values that no run has; earlier formats have no checksum."""
        is_right = (
            type(self.key_dim) is int
            and self.key_dim > 0
            and all(isinstance(label, str) and label for label in self.labels)
            and len(set(self.labels)) == len(self.labels)
            and type(self.trained_examples) is int
            and self.trained_examples >= 0
            and type(self.threshold) in (int, float)
            and 0 <= self.threshold <= 1
            and isinstance(self.encoder, str | None)
            and isinstance(self.fingerprint, str | None)
            and isinstance(self.summary, dict | None)
            and self.takes in ("texts", "images")
            and isinstance(self.model, str)
            and is_model_directory(self.model)
            and type(self.change) is int
            and self.change >= 0
            and type(self.max_lost_points) in (int, float, type(None))
            and 0 <= (self.max_lost_points or 0) < math.inf
            and type(self.max_answered_out_of_scope) in (float, type(None))
            and 0 <= (self.max_answered_out_of_scope or 0) < 1
            and type(self.has_own_head) is bool
            and self.memory in MEMORY_KINDS
        )
        if not is_right:
            raise ValueError("a field has an invalid value")


def is_model_directory(name: str) -> bool:
    """Return whether a directory of this name in a run may hold its model."""
    return re.fullmatch(rf"{MODEL_DIRECTORY}(-[0-9a-f]{{32}})?", name) is not None


class _NewerFormat(Exception):
    """The format is newer than this version supports."""


def write_run(
    directory: Path,
    info: RunInfo,
    head: nn.Linear,
    method: Method,
    examples: Iterable[tuple[str, str | bytes | None]],
    keys: Float[Tensor, "N D"],
    rows: NewRows | None = None,
) -> None:
    """Write a run directory for a trained head and its examples.

    Args:
        method: how to answer: a predictor that adapts the head, or a learner.
        examples: label and text or picture of each example.
        keys: one key per example.
        rows: how to make rows of the head for new labels from keys of unit norm, for a predictor.
            By default these rows are zero.

    Raises:
        ValueError: a learner or `rows` are given and a key does not have unit norm.
    """
    if rows is not None or isinstance(method, Learner):
        require_unit_norm(keys)
    files.make_directory(directory)
    write_model(directory / info.model, Model(head, method, rows))
    written = [
        (label, item, encode_key(key))
        for (label, item), key in zip(examples, keys.cpu(), strict=True)
    ]
    with Journal(directory / JOURNAL_FILE) as journal:
        journal.learn(written)
    info.write(directory)


Method = mbpa.Predictor | Learner
"""How a run answers: a predictor that adapts the head, or a learner."""


class Model(NamedTuple):
    """The contents of `model/`."""

    head: nn.Linear
    """The trained head."""
    method: Method
    rows: NewRows | None = None
    """How to make rows for new labels, on the CPU, for a predictor; `None`: they are zero."""


def write_model(place: Path, model: Model) -> None:
    """Write the model of a run to a directory."""
    tensors, description = {"head": dict(model.head.state_dict())}, {}
    if isinstance(model.method, Learner):
        tensors[LEARNER] = model.method.tensors()
    else:
        description["predictor"] = describe(model.method)
    if model.rows is not None:
        tensors[ROWS] = {name: getattr(model.rows, name).detach() for name in ROW_TENSORS}
        description[ROWS] = {"scale": model.rows.scale, "offset": model.rows.offset}
    save_checkpoint(place, tensors=tensors, description=description)


def read_model(directory: Path, info: RunInfo, device: str | torch.device) -> Model:
    """Read the model of a run and check it against `info`."""
    try:
        saved = load_checkpoint(directory / info.model)
        shape, expected = saved.tensors["head"]["weight"].shape, (len(info.labels), info.key_dim)
        if shape != expected:
            raise ValueError(f"the head must have shape {expected}, got {tuple(shape)}")
        head = nn.Linear(info.key_dim, len(info.labels), device=device)
        head.load_state_dict(saved.tensors["head"])
        method = _read_method(saved, head)
        rows = None
        if ROWS in saved.description:
            direction, weight, bias = (saved.tensors[ROWS][name] for name in ROW_TENSORS)
            rows = NewRows(direction, weight, bias, **saved.description[ROWS])
    except (CheckpointError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RunError(f"the model in {directory} cannot be used: {error}") from error
    return Model(head, method, rows)


def _read_method(saved: Checkpoint, head: nn.Linear) -> Method:
    if LEARNER in saved.tensors:
        return Learner.from_tensors(copy.deepcopy(head).cpu(), saved.tensors[LEARNER])
    predictor = build(saved.description["predictor"])
    if not isinstance(predictor, mbpa.Predictor):
        raise ValueError(f"{predictor!r} is not a predictor")
    return predictor


def read_encoder(
    info: RunInfo, device: str | torch.device, given: OwnEncoder | None = None
) -> Encoder[Any] | None:
    """Load the encoder that a run was made with; `None` if the run takes keys only.

    Args:
        device: where it computes.
        given: the user's own encoder, used in place of the one that the run names.

    Raises:
        ValueError: the encoder is not on this machine, or its keys are not those of the run.
    """
    if info.encoder is None:
        if given is not None:
            raise ValueError("it was made without an encoder and takes embeddings only")
        return None
    if given is not None:
        encoder = wrap_encoder(given, takes=info.takes, normalizes=not info.has_own_head)
    elif ":" in info.encoder and not Path(info.encoder).exists():
        raise ValueError(
            f"its encoder {info.encoder} is code of your own: pass --encoder MODULE:FUNCTION"
        )
    elif info.takes == "images":
        encoder = image.encoder(info.encoder, device=device)
    else:
        encoder = text.encoder(info.encoder, device=device)
    if encoder.key_dim != info.key_dim:
        raise ValueError(
            f"its keys have {info.key_dim} numbers, those of the encoder {encoder.name} have "
            f"{encoder.key_dim}"
        )
    if not encoder.matches(info.fingerprint or ""):
        why = (
            f"and the keys of {encoder.name} differ: create the run again"
            if isinstance(encoder, FunctionEncoder)
            else "whose files have changed since: create the run again with `mbpa teach`"
        )
        raise ValueError(f"it was made with the encoder {info.encoder}, {why}")
    return encoder


def encode_key(key: Float[Tensor, "D"]) -> bytes:
    """Convert a key on the CPU to the bytes that the journal stores."""
    return key.detach().numpy().astype("<f4").tobytes()


def stack_keys(name: str, examples: Iterable[Example], key_dim: int) -> Float[Tensor, "N D"]:
    """Stack the keys of those examples of the journal `name` that have one.

    Raises:
        RunError: a key has a wrong size or invalid numbers; the message names the example.
    """
    with_key = [each for each in examples if each.key is not None]
    keys = np.empty((len(with_key), key_dim), np.float32)
    for row, example in zip(keys, with_key, strict=True):
        key = np.frombuffer(example.key or b"", "<f4")
        if key.shape != row.shape:
            raise _describe_bad_key(name, key_dim, example, f"has {len(key)} numbers")
        row[:] = key
    for place in np.flatnonzero(~(compute_norms(keys) < MAX_KEY_NORM)):
        raise _describe_bad_key(name, key_dim, with_key[place], "has not")
    return torch.from_numpy(keys)


def compute_norms(rows: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B"]:
    """Return the Euclidean norms, in double precision."""
    norms: np.ndarray = np.sqrt(np.einsum("bd,bd->b", rows, rows, dtype=np.float64))
    return norms


def _describe_bad_key(name: str, key_dim: int, example: Example, what: str) -> RunError:
    return RunError(
        f"{name}: keys must have {key_dim} finite numbers and a norm below {MAX_KEY_NORM:.0e}, but "
        f"that of example {example.id} {what}: restore the file from a backup"
    )
