"""A run made from an `MbPA` model: the user's own network, head and memory as a service.

The service answers as the model does, and learns new labels as the model does after `grow`. The
memory's entries become the first examples of the run, and lessons are added to them; the model
itself is not changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import nn

import mbpa
from mbpa import files
from mbpa.encoders.own import OwnEncoder, wrap_encoder
from mbpa.errors import CheckpointError, RunError
from mbpa.serialization import custom_parts, describe
from mbpa.serve.input_checks import check_label
from mbpa.serve.journal import InputError
from mbpa.serve.run_directory import replace_directory, reporting_errors
from mbpa.serve.run_info import RUN_FILE, RunInfo, write_run

SAVED_RUN = "run"  # name of the run within the directory of a saved model
DIGEST = "model"  # in the summary of the run


def serve_model(
    model: mbpa.MbPA,
    directory: str | PathLike[str],
    *,
    encoder: OwnEncoder | None = None,
    takes: Literal["texts", "images"] | None = None,
    labels: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP until stopped; what it is taught is kept in a run directory.

    The first call makes the run with `make_run`. Later calls with the same model go on with it.

    Args:
        model: a model with a linear head and a memory of labels.
        directory: the run.
        encoder: turns texts or pictures into the keys that the head takes; see `make_run`.
        takes: kind of items; see `make_run`.
        labels: names of the classes; see `make_run`.
        options: `host`, `port`, `settings`, `threshold`, `device` and others of
            `mbpa.serve.server.serve`.

    Raises:
        RunError: the run was made from another model, or cannot be served.
        ValueError: the model cannot be served, or an argument does not fit it.
    """
    from mbpa.serve import server  # needs the extra `serve`

    make_run(model, directory, encoder=encoder, takes=takes, labels=labels)
    server.serve(Path(directory), encoder=encoder, **options)


def make_run(
    model: mbpa.MbPA,
    directory: str | PathLike[str],
    *,
    encoder: OwnEncoder | None = None,
    takes: Literal["texts", "images"] | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Make a run directory from a model, for `mbpa serve`; do nothing if it is there already.

    Args:
        model: a model with a linear head and a memory of labels. It is not changed.
        directory: the run. If it exists, it must have been made from the same model, and keeps
            what it was taught since.
        encoder: an `Encoder`, or a function or module that takes a list of texts, or of RGB images
            of Pillow, and returns the keys that the head takes, in shape (B, D). By default the
            service takes keys only, as `embeddings`.
        takes: kind of items that a function takes, "texts" by default.
        labels: names of the classes, in the order of the head's outputs; "0", "1" and so on by
            default.

    Raises:
        RunError: there is a run of another model, or the directory cannot be written.
        ValueError: the model cannot be served, or an argument does not fit it.
    """
    out = Path(directory)
    head = _require_linear(model)
    names = _require_names(labels, model.classes)
    predictor = describe(model.predictor)
    if custom := custom_parts(predictor):
        raise ValueError(f"predictor must have parts of mbpa only, got {', '.join(custom)}")
    source = None
    if encoder is not None:
        source = wrap_encoder(encoder, takes=takes, normalizes=False)
        if source.key_dim != head.in_features:
            raise ValueError(
                f"encoder must return keys of {head.in_features} numbers, which the head takes, "
                f"got {source.key_dim}"
            )
    entries = model.memory.entries()
    keys, values = entries.keys.detach().float().cpu(), entries.values.cpu()
    digest = hashlib.sha256(files.digest_json({"labels": names, "predictor": predictor}).encode())
    for tensor in (head.weight, head.bias, keys, values.long()):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    if (out / RUN_FILE).exists():
        if (RunInfo.read(out).summary or {}).get(DIGEST) != digest.hexdigest():
            raise RunError(
                f"{out} was made from another model or with other labels: to go on with it, use "
                f"`mbpa serve {out}`; to start from this model, move it away"
            )
        return
    info = RunInfo(
        key_dim=head.in_features,
        labels=tuple(names),
        trained_examples=0,
        threshold=0.0,
        encoder=None if source is None else source.name,
        fingerprint=None if source is None else source.fingerprint,
        summary={DIGEST: digest.hexdigest()},
        takes="texts" if source is None else source.takes,
        has_own_head=True,
        memory="graph" if isinstance(model.memory, mbpa.GraphMemory) else "exact",
    )
    examples = [(names[value], None) for value in values.tolist()]
    with reporting_errors(out), replace_directory(out, replace=False) as place:
        write_run(place, info, head, model.predictor, examples, keys)


def is_saved_model(directory: Path) -> bool:
    """Return whether a directory holds a model that `MbPA.save` wrote, and is not a run."""
    return (directory / "manifest.json").is_file() and not (directory / RUN_FILE).exists()


def make_run_of_saved(
    saved: Path,
    *,
    encoder: OwnEncoder | None = None,
    takes: Literal["texts", "images"] | None = None,
    labels: Sequence[str] | None = None,
) -> Path:
    """Make a run from a model that `MbPA.save` wrote, in its directory; return the run.

    The run is `run` within the directory. A second call returns the same run, with everything that
    it was taught since.

    Args:
        encoder, takes, labels: see `make_run`.

    Raises:
        RunError: the model cannot be loaded or served, or another one was saved there since.
    """
    out = saved / SAVED_RUN
    try:
        make_run(mbpa.MbPA.load(saved), out, encoder=encoder, takes=takes, labels=labels)
    except (CheckpointError, ValueError) as error:
        raise RunError(f"{saved} cannot be served: {error}") from error
    return out


def _require_linear(model: mbpa.MbPA) -> nn.Linear:
    """Return a copy of the head in float32, on the CPU."""
    head = model.head
    if not model.memory.holds_labels or len(model.memory.key_shape) != 1:
        raise ValueError(
            f"model must have a memory of labels with keys of one dimension, got {model.memory}"
        )
    if type(head) is not nn.Linear or head.bias is None:
        raise ValueError(
            f"the head must be a torch.nn.Linear with a bias, got {head}: split the network at its "
            "last layer"
        )
    copied = nn.Linear(head.in_features, head.out_features)
    copied.load_state_dict(head.state_dict())
    return copied


def _require_names(labels: Sequence[str] | None, classes: int) -> list[str]:
    names = [str(number) for number in range(classes)] if labels is None else list(labels)
    if len(names) != classes or len({name.strip() for name in names}) != classes:
        raise ValueError(
            f"labels must be {classes} different names, one for each output of the head, got "
            f"{len(set(names))}"
        )
    for name in names:
        try:
            check_label(name)
        except InputError as error:
            raise ValueError(f"labels must be names: {error}") from error
    return [name.strip() for name in names]
