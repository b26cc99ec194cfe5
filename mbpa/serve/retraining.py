"""`mbpa retrain`: train a head with everything that a run holds, and change over to it.

The journal stays as it is, with all ids. The new model is written beside the present one, and
`run.json`, which names the model, is then replaced in one step: at every moment there is a complete
run. A running service trains in a process of its own and answers from the present model meanwhile.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mbpa.errors import RunError
from mbpa.serve import teaching
from mbpa.serve.classifier import Classifier
from mbpa.serve.journaled_model import Snapshot
from mbpa.serve.run_directory import remove_unused_models
from mbpa.serve.run_info import MODEL_DIRECTORY, RunInfo, read_model, write_model

NICENESS = 10  # of the process that trains beside a service
MAX_ERROR_CHARACTERS = 500


def retrain(classifier: Classifier, directory: Path, *, progress: bool = False) -> RunInfo:
    """Train with everything that a run holds, in this process, and change over.

    Raises:
        RunError: the run cannot be trained with what it holds.
    """
    snapshot = classifier.take_snapshot()
    made = train(directory, classifier.info, snapshot, progress=progress)
    return change_over(classifier, directory, made)


def train(directory: Path, info: RunInfo, snapshot: Snapshot, *, progress: bool = False) -> RunInfo:
    """Train a model and write it to the run directory; return the description of the new run.

    As `mbpa teach` does, this leaves out examples that repeat another one.
    """
    if info.has_own_head:
        raise RunError(
            "the head of this run is your own, trained with examples that are not in the run: "
            "train it where it was trained, and make a new run of it"
        )
    places, named = _find_distinct(snapshot)
    if len(set(named)) < 2:
        raise RunError("at least two labels are needed to train")
    try:
        found = teaching.fit(
            snapshot.keys[places],
            named,
            max_lost_points=info.max_lost_points,
            max_answered_out_of_scope=info.max_answered_out_of_scope,
            progress=progress,
        )
    except ValueError as error:
        raise RunError(f"this run cannot be trained again: {error}") from error
    name = f"{MODEL_DIRECTORY}-{uuid.uuid4().hex}"
    write_model(directory / name, found.model)
    counts = {
        "rows": len(snapshot.named),
        "duplicates": len(snapshot.named) - len(named),
        "labels": len(found.labels),
    }
    return replace(
        info,
        labels=found.labels,
        trained_examples=snapshot.last,
        threshold=found.threshold,
        summary=found.summary | counts,
        model=name,
        change=snapshot.change,
    )


def change_over(classifier: Classifier, directory: Path, info: RunInfo) -> RunInfo:
    """Make the model that `info` describes that of the run, durably, and answer from it."""
    if classifier.replica is not None:
        classifier.publish_model(info, directory)
        return info
    model = read_model(directory, info, "cpu")
    try:
        classifier.replace_model(info, model, before=lambda: info.write(directory))
    except OSError as error:
        raise RunError(f"{directory} cannot be written: {error.strerror}") from error
    remove_unused_models(directory, info)
    return info


def _find_distinct(snapshot: Snapshot) -> tuple[list[int], list[str]]:
    """Return the places and labels of the examples that do not repeat an earlier one."""
    places: dict[tuple[str, str | bytes], int] = {}
    for place, (label, text) in enumerate(snapshot.named):
        item = snapshot.keys[place].numpy().tobytes() if text is None else text
        places.setdefault((label, item), place)
    return list(places.values()), [label for label, _ in places]


# In a process of its own


class Trainer:
    """Trains in a process of its own, so that the service goes on answering."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def train(self, directory: Path, info: RunInfo, snapshot: Snapshot) -> RunInfo:
        """Do what `train` does, in another process; call this from a thread.

        Raises:
            RunError: the run cannot be trained with what it holds, or the process was ended.
        """
        command = [sys.executable, "-m", "mbpa.serve.retraining", str(os.getpid())]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes) as process:
            self._process = process
            output, errors = process.communicate(_pack(directory, info, snapshot))
        self._process = None
        if process.returncode:
            why = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it was ended"]
            raise RunError(f"training failed: {why[0][:MAX_ERROR_CHARACTERS]}")
        return _load_info(output)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()


def _pack(directory: Path, info: RunInfo, snapshot: Snapshot) -> bytes:
    described = {
        "directory": os.fsencode(directory).hex(),
        "info": vars(info),
        "named": snapshot.named,
        "last": snapshot.last,
        "change": snapshot.change,
    }
    packed = io.BytesIO()
    text = np.frombuffer(json.dumps(described).encode(), np.uint8)
    np.savez(packed, text=text, keys=snapshot.keys.numpy())
    return packed.getvalue()


def _load_info(content: bytes) -> RunInfo:
    described = json.loads(content)
    return RunInfo(**{**described, "labels": tuple(described["labels"])})


def _train_for_parent(parent: int) -> int:
    """Train with what the parent sends to standard input; print the description of the run."""
    if sys.platform != "win32":
        os.nice(NICENESS)
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    with np.load(io.BytesIO(sys.stdin.buffer.read())) as packed:
        described = json.loads(packed["text"].tobytes())
        keys = torch.from_numpy(packed["keys"].copy())
    named = tuple((label, text) for label, text in described["named"])
    snapshot = Snapshot(named, keys, described["last"], described["change"])
    info = described["info"]
    info = RunInfo(**{**info, "labels": tuple(info["labels"])})
    directory = Path(os.fsdecode(bytes.fromhex(described["directory"])))
    try:
        made = train(directory, info, snapshot)
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    if os.getppid() != parent:  # nobody waits for it any more
        shutil.rmtree(directory / made.model, ignore_errors=True)
        return 1
    sys.stdout.write(json.dumps(vars(made)))
    return 0


if __name__ == "__main__":
    sys.exit(_train_for_parent(int(sys.argv[1])))
