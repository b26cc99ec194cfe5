"""Systems that are not Linux: what they lack is not needed, and what differs is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mbpa import files

ROOT = Path(__file__).parents[2]

TRIAL = """
import os, subprocess, sys, tempfile
from pathlib import Path

import torch

import mbpa
from mbpa import files
from mbpa.serve.journal import InUseError, Journal

place = Path(tempfile.mkdtemp())

# A model is saved over itself and loaded.
head = torch.nn.Linear(4, 2)
model = mbpa.MbPA(head=head, memory=mbpa.ExactMemory(10, 4), predictor=mbpa.Adapted(k=2))
model.write(torch.eye(4), [0, 1, 0, 1])
for _ in range(2):
    model.save(place / "model")
assert len(mbpa.MbPA.load(place / "model", head=head).memory) == 4

# A journal belongs to one process, and what is in it stays.
OTHER = '''
import hashlib, importlib.util, json, os, random, sys, uuid
sys.path.insert(0, %r)
from without_posix import make_msvcrt
sys.modules["msvcrt"] = make_msvcrt()
sys.platform = "win32"
spec = importlib.util.spec_from_file_location("files", %r)
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
try:
    files.lock(descriptor, exclusive=sys.argv[2] == "writer")
except BlockingIOError:
    sys.exit(3)
''' % (os.environ["TRIALS"], files.__file__)


def try_lock(path, kind):
    return subprocess.run([sys.executable, "-c", OTHER, path, kind]).returncode


with Journal(place / "journal") as journal:
    beside = str(journal.path) + ".lock"
    assert try_lock(beside, "writer") == try_lock(beside, "reader") == 3
assert try_lock(beside, "writer") == 0
Journal(place / "journal").close()

# Readers share a lock, and no writer gets it meanwhile.
descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT)
assert files.lock(descriptor, exclusive=False)
assert try_lock(place / "lock", "reader") == 0
assert try_lock(place / "lock", "writer") == 3
files.unlock(descriptor)
assert try_lock(place / "lock", "writer") == 0

# Directories take the place of others in two steps.
assert not files.exchange(place / "model", place)
files.write_durably(place / "file", b"content")
files.flush_file(place / "file")
print("done")
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform == "win32", reason="here it is the real thing")
def test_nothing_that_windows_lacks_is_needed() -> None:
    trials = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("without_posix.py"), TRIAL],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRIALS": trials, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"


def test_bytes_are_read_and_written_anywhere_in_a_file(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | files.BINARY)
    assert files.write_at(descriptor, b"one\r\ntwo\x1a", 3) == 9
    assert files.read_at(descriptor, 100, 0) == b"\0\0\0one\r\ntwo\x1a"
    os.close(descriptor)
