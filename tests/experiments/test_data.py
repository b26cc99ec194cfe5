"""Data sets: fetched from a server that misbehaves, checked, packed, loaded.

The server is real and local. Loaders are tried on small files in the published layouts, and on
the published data where `MBPA_DATA` or a folder beside the checkout has them.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import http.server
import io
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

from experiments import EXPERIMENTS, data
from experiments.data import command, download, sources
from mbpa.errors import MissingExtraError

CONTENT = np.random.default_rng(0).bytes(300_000)
SOON = data.Patience(timeout=0.5, attempts=3, pause=0.01)
ROOT = Path(__file__).parents[2]


def example(number: int) -> str:
    """A block of Python from the document."""
    text = (ROOT / "docs" / "data.md").read_text("utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]


# A server that can be told to misbehave


@dataclass(frozen=True)
class Answer:
    """How to answer one request; correctly by default."""

    status: int | None = None
    cut: int | None = None
    """Close the connection after so many bytes."""
    stall: int | None = None
    """Send nothing more after so many bytes."""
    altered: bool = False
    ranges: bool = True
    pause: float = 0.0
    """After every 10,000 bytes."""
    told_length: bool = True


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        answer = next(self.server.plans.setdefault(self.path, itertools.repeat(Answer())))
        content = self.server.files.get(self.path)
        if content is None or answer.status:
            self.send_error(answer.status or 404)
            return
        if answer.altered:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = self.headers.get("Range") if answer.ranges else None
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked else 200)
        if asked:
            whole = f"{start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", f"bytes {whole}")
        if answer.told_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self._send(content[start:], answer)

    def _send(self, body: bytes, answer: Answer) -> None:
        end = min(len(body), *(n for n in (answer.cut, answer.stall, len(body)) if n is not None))
        try:
            for at in range(0, end, 10_000):
                self.wfile.write(body[at : min(at + 10_000, end)])
                time.sleep(answer.pause)
            if answer.stall is not None:
                self.server.closing.wait(5)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client was killed, or had enough

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.plans: dict[str, Iterator[Answer]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.closing = threading.Event()

    def put(self, path: str, content: bytes, *answers: Answer) -> str:
        """Offer a file: the answers in turn, then honest ones. Returns its address."""
        self.files[path] = content
        self.plans[path] = itertools.chain(answers, itertools.repeat(Answer()))
        return f"http://127.0.0.1:{self.server_port}{path}"

    def put_bad(self, path: str, content: bytes, answer: Answer) -> str:
        """Offer a file that is always answered in this way."""
        address = self.put(path, content)
        self.plans[path] = itertools.repeat(answer)
        return address


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.closing.set()
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only local servers are reachable, and the user's settings are ignored."""
    look_up = socket.getaddrinfo

    def local(host: str, *rest: object, **more: object) -> object:
        assert host == "127.0.0.1", f"a test wants to reach {host}"
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local)
    for name in ("http_proxy", "https_proxy", "all_proxy", "MBPA_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def file(name: str, content: bytes, *addresses: str, size: bool = True) -> data.File:
    digest = hashlib.sha256(content).hexdigest()
    return data.File(name, digest, addresses, len(content) if size else None)


def numbers(*files: data.File, **more: object) -> data.DataSet:
    """A data set that no loader knows."""
    return data.DataSet("numbers", (), "none", "here", 0, "numbers.bin", files, **more)


def one(*addresses: str, content: bytes = CONTENT, size: bool = True) -> data.DataSet:
    return numbers(file("numbers.bin", content, *addresses, size=size))


def fetched(data_set: data.DataSet, root: Path) -> bytes:
    data.fetch(data_set, root, patience=SOON)
    return (root / "numbers" / "numbers.bin").read_bytes()


def left(root: Path) -> set[str]:
    """Return the files in the data set's folder, except for its lock."""
    return {path.name for path in (root / "numbers").iterdir()} - {".lock"}


# Where data lie


def test_the_directory_is_the_flag_then_the_environment_then_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.data_dir() == tmp_path / ".cache" / "mbpa" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert data.data_dir() == tmp_path / "x" / "mbpa" / "data"
    monkeypatch.setenv("MBPA_DATA", str(tmp_path / "y"))
    assert data.data_dir() == tmp_path / "y"
    assert data.data_dir("~/z") == tmp_path / "z"
    monkeypatch.setenv("MBPA_DATA", "")
    assert data.data_dir() == tmp_path / "x" / "mbpa" / "data"


def test_the_table_is_complete() -> None:
    assert tuple(data.SETS) == get_args(sources.DataSetName)
    users = {user for one in data.SETS.values() for user in one.used_by}
    ours = {name for name, place in EXPERIMENTS.items() if place.startswith("experiments.")}
    assert users == ours - {"illustration"}
    for one in data.SETS.values():
        assert one.used_by, one.name
        assert one.terms, one.name
        assert one.can_be_fetched != bool(one.no_download)
        files = (*one.files, *([one.archive.file] if one.archive else []))
        for each in files:
            assert len(bytes.fromhex(each.sha256)) == 32
            if one.can_be_fetched:
                assert len(set(each.addresses)) >= 2, f"{each.name} has no mirror"
        if one.files:
            assert sum(each.size or 0 for each in one.files) == one.size


@pytest.mark.parametrize("name", data.SETS)
def test_a_missing_data_set_says_in_one_line_what_to_do(name: str, tmp_path: Path) -> None:
    load = getattr(data, name.replace("-", "_"))
    with pytest.raises(FileNotFoundError) as raised:
        load(tmp_path)
    assert isinstance(raised.value, data.MissingDataError)
    said = str(raised.value)
    assert "\n" not in said
    assert f"at a folder that has {name}/" in said
    assert (f"`python -m experiments data fetch {name}`" in said) == data.SETS[name].can_be_fetched
    assert data.check(data.SETS[name], tmp_path).status == "missing"
    assert not data.is_present(data.SETS[name], tmp_path)


# Downloading


def test_what_is_fetched_is_right_and_is_fetched_once(server: Server, tmp_path: Path) -> None:
    data_set = one(server.put("/a", CONTENT))
    assert fetched(data_set, tmp_path) == CONTENT
    assert left(tmp_path) == {"numbers.bin"}
    again = data.fetch(data_set, tmp_path, patience=SOON)
    assert again.was_there
    assert server.requests == [("/a", None)]


@pytest.mark.parametrize("size", [True, False])
def test_a_transfer_cut_short_is_resumed(server: Server, tmp_path: Path, size: bool) -> None:
    address = server.put("/a", CONTENT, Answer(cut=100_000), Answer(cut=50_000))
    assert fetched(one(address, size=size), tmp_path) == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_transfer_of_unknown_length_is_resumed_too(server: Server, tmp_path: Path) -> None:
    address = server.put("/a", CONTENT, Answer(cut=100_000, told_length=False))
    assert fetched(one(address), tmp_path) == CONTENT
    assert server.requests[-1] == ("/a", "bytes=100000-")


def test_a_server_that_never_gets_further_is_given_up(server: Server, tmp_path: Path) -> None:
    address = server.put("/a", CONTENT)
    server.plans["/a"] = itertools.cycle(
        [Answer(ranges=False, cut=cut) for cut in (100_000, 50_000, 100_000, 0)]
    )
    with pytest.raises(data.DataError, match="ended after"):
        data.fetch(one(address), tmp_path, patience=SOON)


def test_a_stalled_transfer_is_resumed(server: Server, tmp_path: Path) -> None:
    address = server.put("/a", CONTENT, Answer(stall=120_000))
    assert fetched(one(address), tmp_path) == CONTENT
    assert server.requests[-1] == ("/a", "bytes=120000-")


def test_a_server_that_ignores_ranges_is_read_from_the_start(
    server: Server, tmp_path: Path
) -> None:
    address = server.put("/a", CONTENT, Answer(cut=100_000), Answer(ranges=False))
    assert fetched(one(address), tmp_path) == CONTENT
    assert len(server.requests) == 2


def test_a_server_in_trouble_is_asked_again(server: Server, tmp_path: Path) -> None:
    address = server.put("/a", CONTENT, Answer(status=503), Answer(status=500))
    assert fetched(one(address), tmp_path) == CONTENT
    assert len(server.requests) == 3


def test_a_server_that_gives_nothing_is_left_for_the_next(server: Server, tmp_path: Path) -> None:
    bad = server.put_bad("/a", CONTENT, Answer(status=500))
    assert fetched(one(bad, server.put("/b", CONTENT)), tmp_path) == CONTENT
    assert [path for path, _ in server.requests] == ["/a"] * 3 + ["/b"]


def test_the_next_address_goes_on_where_the_first_failed(server: Server, tmp_path: Path) -> None:
    first = server.put("/a", CONTENT, Answer(cut=100_000), Answer(status=404))
    assert fetched(one(first, server.put("/b", CONTENT)), tmp_path) == CONTENT
    assert server.requests[-1] == ("/b", "bytes=100000-")


@pytest.mark.parametrize("told_length", [True, False])
def test_altered_bytes_are_refused_and_the_next_address_tried(
    server: Server, tmp_path: Path, told_length: bool
) -> None:
    bad = server.put_bad("/a", CONTENT, Answer(altered=True, told_length=told_length))
    assert fetched(one(bad, server.put("/b", CONTENT)), tmp_path) == CONTENT
    assert left(tmp_path) == {"numbers.bin"}


def test_bytes_altered_everywhere_leave_nothing(server: Server, tmp_path: Path) -> None:
    bad = [server.put_bad(path, CONTENT, Answer(altered=True)) for path in ("/a", "/b")]
    with pytest.raises(data.DataError, match="SHA-256 is") as raised:
        data.fetch(one(*bad), tmp_path, patience=SOON)
    assert all(address in str(raised.value) for address in bad)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("told_length", [True, False])
def test_a_file_of_another_size_is_not_even_read(
    server: Server, tmp_path: Path, told_length: bool
) -> None:
    bad = server.put_bad("/a", CONTENT * 9, Answer(told_length=told_length))
    with pytest.raises(data.DataError, match=r"instead of 300,000|more than 300,000"):
        data.fetch(one(bad), tmp_path, patience=SOON)


def test_a_missing_file_names_the_addresses_tried(server: Server, tmp_path: Path) -> None:
    base = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(data.DataError, match=r"numbers\.bin could not be downloaded") as raised:
        data.fetch(one(f"{base}/x", f"{base}/y"), tmp_path, patience=SOON)
    assert f"{base}/x (HTTP 404 Not Found); {base}/y (HTTP 404" in str(raised.value)
    assert len(server.requests) == 2, "what is not there is not asked for again"


def test_no_server_at_all_is_an_error_of_one_line_after_what_was_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/a"
        with pytest.raises(data.DataError, match="refused"):
            data.fetch(one(address), tmp_path, progress=True, patience=SOON)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "numbers.bin: asking 127.0.0.1"
    assert len(told) == SOON.attempts, "and why it is asked again"
    assert all("refused" in line and "; retrying in " in line for line in told[1:])


@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize(
    "part", [CONTENT + b"more", b"x" * 1000, b"x" * len(CONTENT)], ids=["long", "wrong", "full"]
)
def test_a_part_that_does_not_fit_is_started_over(
    server: Server, tmp_path: Path, part: bytes, size: bool
) -> None:
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "numbers.bin.part").write_bytes(part)
    assert fetched(one(server.put("/a", CONTENT), size=size), tmp_path) == CONTENT
    assert left(tmp_path) == {"numbers.bin"}


@pytest.mark.parametrize("size", [True, False])
def test_a_part_that_is_whole_is_used(server: Server, tmp_path: Path, size: bool) -> None:
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "numbers.bin.part").write_bytes(CONTENT)
    assert fetched(one(server.put("/a", CONTENT), size=size), tmp_path) == CONTENT
    assert len(server.requests) == (0 if size else 1)


def test_an_interrupted_download_keeps_its_part(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, blocks = download._receive, itertools.count()

    def interrupted(response: object) -> bytes:
        if next(blocks) == 3:
            raise KeyboardInterrupt
        return read(response)

    data_set = one(server.put("/a", CONTENT))
    with monkeypatch.context() as patch:
        patch.setattr(download, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            data.fetch(data_set, tmp_path, patience=SOON)
    size = (tmp_path / "numbers" / "numbers.bin.part").stat().st_size
    assert 0 < size < len(CONTENT)
    assert fetched(data_set, tmp_path) == CONTENT
    assert server.requests[-1] == ("/a", f"bytes={size}-")


def test_a_full_disk_is_noticed_before_the_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(data.DataError, match=r"needs 17 MB more in .*, which has 1 MB left"):
        data.fetch(one(server.put("/a", CONTENT)), tmp_path, patience=SOON)
    assert server.requests == []


def test_progress_tells_the_file_and_how_much(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.fetch(one(server.put("/a", CONTENT)), tmp_path, progress=True, patience=SOON)
    assert "numbers.bin: 100%" in capsys.readouterr().err


# What is there already


def test_a_damaged_file_is_refused_and_replaced_only_by_force(
    server: Server, tmp_path: Path
) -> None:
    data_set = one(server.put("/a", CONTENT))
    fetched(data_set, tmp_path)
    path = tmp_path / "numbers" / "numbers.bin"
    damaged = CONTENT[:-1] + b"?"
    path.write_bytes(damaged)
    finding = data.check(data_set, tmp_path)
    assert (finding.status, finding.wrong) == ("damaged", (path,))
    assert str(path) in finding.detail
    with pytest.raises(data.DataError, match=r"numbers\.bin: its SHA-256 is .* pass --force"):
        data.fetch(data_set, tmp_path, patience=SOON)
    assert path.read_bytes() == damaged
    assert len(server.requests) == 1
    data.fetch(data_set, tmp_path, force=True, patience=SOON)
    assert path.read_bytes() == CONTENT


def test_force_with_no_server_leaves_the_damaged_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "numbers.bin").write_bytes(b"?")
    bad = server.put_bad("/a", CONTENT, Answer(altered=True))
    with pytest.raises(data.DataError, match="could not be downloaded"):
        data.fetch(one(bad), tmp_path, force=True, patience=SOON)
    assert (tmp_path / "numbers" / "numbers.bin").read_bytes() == b"?"


@pytest.mark.parametrize(
    "broken", [b"not xz", lzma.compress(b"other"), lzma.compress(CONTENT)[:-9]]
)
def test_a_compressed_file_is_judged_by_its_content(
    server: Server, tmp_path: Path, broken: bytes
) -> None:
    data_set = one(server.put("/a", CONTENT))
    path = tmp_path / "numbers" / "numbers.bin.xz"
    path.parent.mkdir()
    path.write_bytes(lzma.compress(CONTENT))
    assert data.check(data_set, tmp_path).status == "good"
    assert data.fetch(data_set, tmp_path, patience=SOON).was_there
    path.write_bytes(broken)
    assert data.check(data_set, tmp_path).wrong == (path,)
    data.fetch(data_set, tmp_path, force=True, patience=SOON)
    assert left(tmp_path) == {"numbers.bin"}


def test_only_what_is_lacking_is_fetched(server: Server, tmp_path: Path) -> None:
    files = (
        file("a", b"1" * 100, server.put("/a", b"1" * 100)),
        file("b", b"2" * 100, server.put("/b", b"2" * 100)),
    )
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "a").write_bytes(b"1" * 100)
    finding = data.check(numbers(*files), tmp_path)
    assert (finding.status, finding.lacking) == ("incomplete", ("b",))
    data.fetch(numbers(*files), tmp_path, patience=SOON)
    assert [path for path, _ in server.requests] == ["/b"]
    assert data.check(numbers(*files), tmp_path).status == "good"


def test_a_directory_that_cannot_be_written_to_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        data.fetch(one(server.put("/a", CONTENT)), tmp_path / "file", patience=SOON)


# Archives


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def from_archive(content: bytes, *addresses: str) -> data.DataSet:
    """A data set whose only file is in the folder `folder` of a zip."""
    archive = data.Archive(file("all.zip", content, *addresses), inside="folder")
    return numbers(file("numbers.bin", CONTENT), archive=archive)


def test_an_archive_is_unpacked_and_goes(server: Server, tmp_path: Path) -> None:
    content = zipped({"folder/numbers.bin": CONTENT, "other/x": b"x"})
    assert fetched(from_archive(content, server.put("/all.zip", content)), tmp_path) == CONTENT
    assert left(tmp_path) == {"numbers.bin", "SHA256SUMS"}


def test_files_that_no_address_has_come_from_the_archive(server: Server, tmp_path: Path) -> None:
    content = zipped({"folder/numbers.bin": CONTENT})
    data_set = from_archive(content, server.put("/all.zip", content))
    gone = file("numbers.bin", CONTENT, f"http://127.0.0.1:{server.server_port}/gone")
    data_set = replace(data_set, files=(gone,))
    assert fetched(data_set, tmp_path) == CONTENT
    server.files.clear()
    with pytest.raises(data.DataError, match=r"/gone .*/all\.zip"):
        data.fetch(data_set, tmp_path / "elsewhere", patience=SOON)


@pytest.mark.parametrize(
    "name", ["../evil", "folder/../../evil", "/evil", "folder/..\\..\\evil", "C:/evil"]
)
def test_an_archive_that_reaches_out_is_refused(server: Server, tmp_path: Path, name: str) -> None:
    content = zipped({"folder/numbers.bin": CONTENT, name: b"evil"})
    data_set = from_archive(content, server.put("/all.zip", content))
    with pytest.raises(data.DataError, match="would leave the folder"):
        data.fetch(data_set, tmp_path / "root", patience=SOON)
    assert [p for p in tmp_path.rglob("*") if p.name in ("evil", "numbers.bin")] == []


def test_an_archive_with_a_link_is_refused(server: Server, tmp_path: Path) -> None:
    link = zipfile.ZipInfo("folder/link")
    link.external_attr = 0o120777 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    content = buffer.getvalue()
    data_set = from_archive(content, server.put("/all.zip", content))
    with pytest.raises(data.DataError, match="would leave the folder"):
        data.fetch(data_set, tmp_path, patience=SOON)


# Killed, and two at once


CHILD = """
import json, sys, time
from experiments import data
from experiments.data import download
files, archive, slow, root = json.loads(sys.argv[1])
extract = download._extract
def slowly(*arguments):
    time.sleep(slow)
    return extract(*arguments)
download._extract = slowly
made = data.DataSet(
    "numbers", (), "none", "here", 0, "numbers.bin",
    tuple(data.File(**each) for each in files),
    data.Archive(data.File(**archive), "folder") if archive else None,
)
print(data.fetch(made, root).was_there)
"""


def child(data_set: data.DataSet, root: Path, slow: float = 0.0) -> subprocess.Popen[str]:
    """Start a process that fetches this; `slow` is a pause before every unpacked file."""
    archive = asdict(data_set.archive.file) if data_set.archive else None
    told = json.dumps([[asdict(each) for each in data_set.files], archive, slow, str(root)])
    command = [sys.executable, "-c", CHILD, told]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.heavy
def test_a_download_that_was_killed_is_resumed(server: Server, tmp_path: Path) -> None:
    data_set = one(server.put("/a", CONTENT, Answer(pause=0.3)))
    part = tmp_path / "numbers" / "numbers.bin.part"
    process = child(data_set, tmp_path)
    wait_for(lambda: part.exists() and part.stat().st_size > 0)
    kill(process)
    size = part.stat().st_size
    assert 0 < size < len(CONTENT)
    assert fetched(data_set, tmp_path) == CONTENT
    assert server.requests[-1] == ("/a", f"bytes={size}-")
    assert left(tmp_path) == {"numbers.bin"}


@pytest.mark.heavy
def test_an_unpacking_that_was_killed_is_done_again(server: Server, tmp_path: Path) -> None:
    members = {f"folder/{number}": b"x" * number for number in range(200)}
    content = zipped(members | {"folder/numbers.bin": CONTENT})
    data_set = from_archive(content, server.put("/all.zip", content))
    folder = tmp_path / "numbers"
    process = child(data_set, tmp_path, slow=0.02)
    wait_for(lambda: (folder / ".unpacking" / "folder" / "20").exists())
    kill(process)
    assert left(tmp_path) == {".unpacking", "all.zip"}
    assert data.check(data_set, tmp_path).status == "missing"
    (folder / ".unpacking" / "folder" / "stale").write_bytes(b"of another archive")
    assert fetched(data_set, tmp_path) == CONTENT
    assert left(tmp_path) == {*map(str, range(200)), "numbers.bin", "SHA256SUMS"}
    assert len(server.requests) == 1, "the archive was there"


@pytest.mark.heavy
def test_two_fetches_at_once_make_one_download(server: Server, tmp_path: Path) -> None:
    data_set = one(server.put_bad("/a", CONTENT, Answer(pause=0.05)))
    both = [child(data_set, tmp_path) for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert (tmp_path / "numbers" / "numbers.bin").read_bytes() == CONTENT
    assert len(server.requests) == 1


# Loading


def put(root: Path, name: str, content: bytes, packed: bool = False) -> None:
    path = root / (f"{name}.xz" if packed else name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(content) if packed else content)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(struct.pack(">I", size) for size in array.shape)
    return gzip.compress(bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes())


def put_mnist(root: Path) -> tuple[np.ndarray, np.ndarray]:
    images = np.arange(5 * 28 * 28).reshape(5, 28, 28).astype(np.uint8)
    labels = np.array([3, 1, 4, 1, 5], np.uint8)
    for part in ("train", "t10k"):
        put(root, f"mnist/{part}-images-idx3-ubyte.gz", idx(images))
        put(root, f"mnist/{part}-labels-idx1-ubyte.gz", idx(labels))
    return images, labels


def test_digits_are_read(tmp_path: Path) -> None:
    images, labels = put_mnist(tmp_path)
    read = data.mnist(tmp_path)
    for part in (read.train, read.test):
        assert part.images.dtype == torch.uint8
        np.testing.assert_array_equal(part.images.numpy(), images)
        assert part.labels.tolist() == labels.tolist()
        assert part.labels.dtype == torch.int64


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"\0\0\x08\x03short"), idx(np.zeros((2, 2), np.uint8))],
    ids=["empty", "no gzip", "too short", "of two dimensions"],
)
def test_broken_digits_are_named(tmp_path: Path, content: bytes) -> None:
    put_mnist(tmp_path)
    put(tmp_path, "mnist/t10k-images-idx3-ubyte.gz", content)
    with pytest.raises(data.DamagedDataError, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
        data.mnist(tmp_path)


def test_images_without_labels_are_damage(tmp_path: Path) -> None:
    put_mnist(tmp_path)
    put(tmp_path, "mnist/t10k-labels-idx1-ubyte.gz", idx(np.zeros(4, np.uint8)))
    with pytest.raises(data.DamagedDataError, match="5 test images, 4 labels"):
        data.mnist(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("load", "pattern"),
    [(data.ptb, "ptb/ptb.{}.txt"), (data.wikitext_2, "wikitext-2/wiki.{}.tokens")],
)
def test_words_are_numbered_as_the_training_text_has_them(
    tmp_path: Path, load: Callable[[Path], data.Corpus], pattern: str, packed: bool
) -> None:
    texts = {"train": " the cat sat \n \n the <unk> \n", "valid": "sat\n", "test": "cat cat\n"}
    for part, text in texts.items():
        put(tmp_path, pattern.format(part), text.encode(), packed)
    corpus = load(tmp_path)
    assert corpus.words == ("the", "cat", "sat", "<eos>", "<unk>")
    assert corpus.train.tolist() == [0, 1, 2, 3, 3, 0, 4, 3]
    assert corpus.valid.tolist() == [2, 3]
    assert corpus.test.tolist() == [1, 1, 3]
    put(tmp_path, pattern.format("test"), b"dog\n", packed)
    with pytest.raises(data.DamagedDataError, match="dog"):
        load(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_intents_with_domains_and_sentences_out_of_scope_are_read(
    tmp_path: Path, packed: bool
) -> None:
    pairs = {
        "train": [["how hot is it", "weather"], ["book a table", "restaurant"]],
        "val": [["is it cold", "weather"]],
        "test": [["a table for two", "restaurant"]],
        "oos_train": [["who am i", "oos"]],
        "oos_val": [],
        "oos_test": [["why", "oos"], ["so what", "oos"]],
    }
    put(tmp_path, "clinc150/data_full.json", json.dumps(pairs).encode(), packed)
    put(tmp_path, "clinc150/domains.json", b'{"out": ["weather", "restaurant"]}')
    intents = data.clinc150(tmp_path)
    assert intents.names == ("restaurant", "weather")
    assert intents.train.texts == ("how hot is it", "book a table")
    assert intents.train.labels.tolist() == [1, 0]
    assert intents.valid.labels.tolist() == [1]
    assert intents.test.labels.tolist() == [0]
    assert intents.out_of_scope == {"train": ("who am i",), "valid": (), "test": ("why", "so what")}
    assert intents.domains == {"out": ("weather", "restaurant")}


def test_intents_of_a_table_are_numbered_as_published(tmp_path: Path) -> None:
    rows = {"train": [('a "b",\nc', "z"), ("d", "a")], "test": [("e", "z")]}
    for part, sentences in rows.items():
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("text", "category"), *sentences])
        put(tmp_path, f"banking77/{part}.csv", text.getvalue().encode())
    put(tmp_path, "banking77/categories.json", b'["z", "a"]')
    intents = data.banking77(tmp_path)
    assert intents.names == ("z", "a")
    assert intents.train.texts == ('a "b",\nc', "d")
    assert intents.train.labels.tolist() == [0, 1]
    assert intents.test.labels.tolist() == [0]
    assert intents.valid.texts == ()


# Pictures


def jpeg(seed: int, mode: str = "RGB") -> bytes:
    generator = np.random.default_rng(seed)
    rough = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(rough).resize((64, 64), Image.Resampling.BICUBIC).convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


WNIDS = ("n02", "n01", "n03")


def tiny_members() -> dict[str, bytes]:
    """The published layout with three classes of 12 and 2 images; one image is grey."""
    annotations = [f"val_{i}.JPEG\t{WNIDS[i % 3]}\t0\t0\t9\t9\n" for i in range(6)]
    members = {
        "wnids.txt": "".join(f"{wnid}\n" for wnid in WNIDS).encode(),
        "words.txt": b"n01\tcat\nn02\tdog, hound\nn99\tunused\n",
        "val/val_annotations.txt": "".join(annotations).encode(),
        "test/images/test_0.JPEG": jpeg(0),
    }
    for c, wnid in enumerate(WNIDS):
        for k in range(12):
            content = jpeg(100 * c + k, "L" if (c, k) == (1, 10) else "RGB")
            members[f"train/{wnid}/images/{wnid}_{k}.JPEG"] = content
    for i in range(6):
        members[f"val/images/val_{i}.JPEG"] = jpeg(1000 + i)
    return {f"tiny-imagenet-200/{name}": content for name, content in members.items()}


@pytest.fixture
def tiny(server: Server, tmp_path: Path) -> data.DataSet:
    """A small Tiny ImageNet, fetched into `tmp_path`."""
    content = zipped(tiny_members())
    archive = data.Archive(file("t.zip", content, server.put("/t.zip", content)))
    counts = {"training images": 36, "validation images": 6, "classes": 3}
    data_set = replace(data.SETS["tiny-imagenet"], archive=archive, counts=counts)
    assert data.check(data_set, tmp_path).status == "missing"
    assert not data.fetch(data_set, tmp_path, patience=SOON).was_there
    return data_set


def test_pictures_are_in_the_order_of_classes_and_numbers(
    tiny: data.DataSet, tmp_path: Path
) -> None:
    assert data.check(tiny, tmp_path).status == "good"
    assert data.fetch(tiny, tmp_path, patience=SOON).was_there
    images = data.tiny_imagenet(tmp_path, size=64)
    assert images.names == ("dog, hound", "cat", "n03")
    assert images.title == "Tiny ImageNet, 64x64"
    assert images.train.images.shape == (36, 3, 64, 64)
    assert images.train.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert images.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    for at, content in ((2, jpeg(2)), (10, jpeg(10)), (22, jpeg(110, "L")), (35, jpeg(211))):
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(images.train.images[at].permute(1, 2, 0), expected)
    expected = np.asarray(Image.open(io.BytesIO(jpeg(1004))))
    np.testing.assert_array_equal(images.test.images[3].permute(1, 2, 0), expected)


def test_some_classes_can_be_loaded(tiny: data.DataSet, tmp_path: Path) -> None:
    everything = data.tiny_imagenet(tmp_path)
    some = data.tiny_imagenet(tmp_path, classes=(2, 0))
    assert some.train.labels.tolist() == [2] * 12 + [0] * 12
    assert torch.equal(some.train.images[12:], everything.train.images[:12])
    with pytest.raises(ValueError, match="classes must be from 0 to 2, got 3"):
        data.tiny_imagenet(tmp_path, classes=(3,))


def test_packed_without_loss_pictures_are_the_same(tiny: data.DataSet, tmp_path: Path) -> None:
    original = data.tiny_imagenet(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    source = tmp_path / "tiny-imagenet" / "tiny-imagenet-200"
    written = data.pack_tiny_imagenet(source, elsewhere / "tiny-imagenet", quality=None)
    assert [path.name for path in written] == [
        "val_annotations.txt.xz",
        "classes.tsv",
        "val.zip",
        "train.zip",
    ]
    assert data.check(tiny, elsewhere).status == "good"
    packed = data.tiny_imagenet(elsewhere)
    assert original.title == "Tiny ImageNet, 40x40"
    assert packed.title == "Tiny ImageNet, 40x40, packed without loss"
    assert packed.names == original.names
    for mine, theirs in ((packed.train, original.train), (packed.test, original.test)):
        assert torch.equal(mine.images, theirs.images)
        assert torch.equal(mine.labels, theirs.labels)
    with pytest.raises(data.DataError, match="40x40, not of 64x64"):
        data.tiny_imagenet(elsewhere, size=64)


def test_packing_is_the_same_from_the_zip_and_loses_little(
    tiny: data.DataSet, tmp_path: Path
) -> None:
    (tmp_path / "t.zip").write_bytes(zipped(tiny_members()))
    folder = tmp_path / "tiny-imagenet"
    original = data.tiny_imagenet(tmp_path)
    from_zip = data.pack_tiny_imagenet(tmp_path / "t.zip", tmp_path / "a" / "tiny-imagenet")
    beside = data.pack_tiny_imagenet(folder / "tiny-imagenet-200", folder)
    for one, other in zip(from_zip, beside, strict=True):
        assert one.read_bytes() == other.read_bytes()
    with pytest.raises(data.DataError, match=r"train\.zip already exists: pass --force"):
        data.pack_tiny_imagenet(folder / "tiny-imagenet-200", folder)
    packed = data.tiny_imagenet(tmp_path)
    assert packed.title == "Tiny ImageNet, 40x40, recompressed"
    assert torch.equal(packed.train.labels, original.train.labels)
    error = packed.train.images.float() - original.train.images.float()
    assert error.abs().mean() < 8
    assert data.tiny_imagenet(tmp_path, size=64).title == "Tiny ImageNet, 64x64"


def test_a_damaged_picture_is_found_and_fetched_again_by_force(
    tiny: data.DataSet, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny-imagenet" / "tiny-imagenet-200"
    path = folder / "train" / "n01" / "images" / "n01_3.JPEG"
    path.write_bytes(path.read_bytes()[:-20])
    assert "n01_3.JPEG is not what was unpacked" in data.check(tiny, tmp_path).detail
    with pytest.raises(data.DataError, match="pass --force"):
        data.fetch(tiny, tmp_path, patience=SOON)
    (folder / "SHA256SUMS").unlink()
    assert "n01_3.JPEG is not a complete JPEG picture" in data.check(tiny, tmp_path).detail
    data.fetch(tiny, tmp_path, force=True, patience=SOON)
    assert data.check(tiny, tmp_path).status == "good"
    path.unlink()
    (folder / "SHA256SUMS").unlink()
    assert "too few images of n01" in data.check(tiny, tmp_path).detail


def test_a_packing_that_fails_leaves_the_one_before(tiny: data.DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet"
    original = folder / "tiny-imagenet-200"
    written = data.pack_tiny_imagenet(original, folder)
    before = [path.read_bytes() for path in written]
    (original / "train" / "n03" / "images" / "n03_11.JPEG").write_bytes(b"no picture")
    with pytest.raises(data.DamagedDataError, match=r"n03_11\.JPEG is damaged"):
        data.pack_tiny_imagenet(original, folder, force=True)
    assert [path.read_bytes() for path in written] == before
    assert not list(folder.glob("*.part"))


def test_a_damaged_packing_is_found(tiny: data.DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet"
    data.pack_tiny_imagenet(folder / "tiny-imagenet-200", folder)
    path = folder / "train.zip"
    sound = path.read_bytes()
    path.write_bytes(sound[:200] + bytes([sound[200] ^ 1]) + sound[201:])
    finding = data.check(tiny, tmp_path)
    assert finding.status == "damaged"
    assert "in train.zip has a wrong checksum" in finding.detail
    path.write_bytes(sound[:1000])
    assert data.check(tiny, tmp_path).status == "damaged"
    data.fetch(tiny, tmp_path, force=True, patience=SOON)
    assert data.check(tiny, tmp_path).status == "good"
    assert not path.exists()


def test_too_few_classes_are_damage(tiny: data.DataSet, tmp_path: Path) -> None:
    finding = data.check(replace(tiny, counts={"classes": 4}), tmp_path)
    assert finding.status == "damaged"
    assert "3 classes instead of 4" in finding.detail


def test_a_folder_of_imagenet_is_listed_and_read_in_parts(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 1)):
        for wnid in ("n02", "n01"):
            for k in range(count):
                put(tmp_path, f"imagenet/{part}/{wnid}/{k}.JPEG", jpeg(k + 10 * (wnid == "n02")))
    folder = data.imagenet(tmp_path)
    assert folder.wnids == ("n01", "n02")
    assert folder.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert folder.test.labels.tolist() == [0, 1]
    images = folder.train.read([4, 0], size=64)
    for at, seed in enumerate((11, 0)):
        expected = np.asarray(Image.open(io.BytesIO(jpeg(seed))))
        np.testing.assert_array_equal(images[at].permute(1, 2, 0), expected)
    assert folder.train.read([], size=32).shape == (0, 3, 32, 32)
    finding = data.check(data.SETS["imagenet"], tmp_path)
    assert finding.detail == "6 training images, 2 validation images, 2 classes"
    assert data.fetch(data.SETS["imagenet"], tmp_path).was_there
    put(tmp_path, "imagenet/val/n01/0.JPEG", b"")
    assert "0.JPEG is empty" in data.check(data.SETS["imagenet"], tmp_path).detail
    shutil.rmtree(tmp_path / "imagenet" / "val" / "n01")
    with pytest.raises(data.DamagedDataError, match="n01 is in only one of train/ and val/"):
        data.imagenet(tmp_path)


def test_the_example_of_the_document_reads_a_folder_of_imagenet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "val"):
        for k in range(6):
            put(tmp_path, f"imagenet/{part}/n01/{k}.JPEG", jpeg(k))
    monkeypatch.setenv("MBPA_DATA", str(tmp_path))
    exec(example(1), {})
    assert capsys.readouterr().out == "torch.Size([6, 224, 224, 3])\n"


def test_the_recipe_of_the_document_makes_pythons_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(21):
        put(tmp_path, f"sources/library/{k:02}.rst.txt", f"Page {k}\u2028ß".encode())
    monkeypatch.chdir(tmp_path)
    exec(example(2).replace("/usr/share/doc/python3.11/html/_sources", "sources"), {})
    documents = data.python_docs(tmp_path / "data")
    assert list(documents.test) == [f"library/{k:02}.rst" for k in (0, 10, 20)]
    assert list(documents.valid) == ["library/05.rst", "library/15.rst"]
    assert len(documents.train) == 16
    assert documents.train["library/01.rst"] == "Page 1\u2028ß"


def test_the_middle_of_a_picture_is_cut_out(tmp_path: Path) -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    buffer = io.BytesIO()
    Image.fromarray(wide).save(buffer, "PNG")
    put(tmp_path, "imagenet/train/n01/wide.png", buffer.getvalue())
    put(tmp_path, "imagenet/val/n01/wide.png", buffer.getvalue())
    files = data.imagenet(tmp_path).train
    assert (files.read([0], size=20) == 255).all()
    assert files.read([0], size=10).shape == (1, 3, 10, 10)
    put(tmp_path, "imagenet/train/n01/wide.png", buffer.getvalue()[:50])
    with pytest.raises(data.DamagedDataError, match=r"wide\.png is damaged"):
        files.read([0], size=20)


def test_pictures_without_pillow_name_the_extra(
    tiny: data.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"mbpa\[images\]"):
        data.tiny_imagenet(tmp_path)


# Commands


def run(*arguments: str) -> int:
    return command.main(list(arguments))


def test_list_tells_what_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_mnist(tmp_path)
    assert run("list", "--data-dir", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mnist          yes      11.6 MB  permuted-mnist, permuted-mnist-der, teaching" in lines
    assert any(line.startswith("imagenet       no          none") for line in lines)
    told = [line.strip(" ,") for line in lines]
    assert sum(line.startswith("image-neighbourhoods") for line in told) == 2, (
        "what does not fit is on a line of its own"
    )
    assert max(map(len, lines)) <= 100


def test_check_fails_on_what_is_damaged_or_asked_for_and_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", "--data-dir", str(tmp_path)) == 1  # nothing at all
    assert len(capsys.readouterr().out.splitlines()) == len(data.SETS)
    assert run("check", "ptb", "--data-dir", str(tmp_path)) == 1
    assert capsys.readouterr().out.startswith("ptb            missing")
    put_mnist(tmp_path)
    assert run("check", "--data-dir", str(tmp_path)) == 1
    assert "mnist          damaged" in capsys.readouterr().out


def test_fetch_prints_one_line_per_data_set_and_continues_after_a_failure(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = {"mnist": data.SETS["imagenet"], "ptb": one(server.put("/a", CONTENT))}
    monkeypatch.setattr(command, "SETS", known)
    arguments = ("fetch", "mnist", "ptb", "--no-progress", "--data-dir", str(tmp_path))
    assert run(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("experiments: imagenet is not in")
    assert printed.out == f"ptb: fetched in 0 s, {tmp_path / 'numbers'}: 1 files\n"
    assert run(*arguments[:1], *arguments[2:]) == 0
    assert "ptb: already present" in capsys.readouterr().out
    assert run("fetch") == 2
    assert "name at least one data set" in capsys.readouterr().err


def test_check_without_pillow_tells_what_is_unchecked(
    tiny: data.DataSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "tiny-imagenet"
    data.pack_tiny_imagenet(folder / "tiny-imagenet-200", folder)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert run("check", "--data-dir", str(tmp_path)) == 1
    assert "tiny-imagenet  unchecked   Pillow is not installed" in capsys.readouterr().out


def test_pack_writes_the_packed_form(
    tiny: data.DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--data-dir", str(tmp_path), "--no-progress")
    assert run("pack", "tiny-imagenet", *here) == 0
    assert str(tmp_path / "tiny-imagenet" / "train.zip") in capsys.readouterr().out
    assert run("pack", "tiny-imagenet", *here) == 1
    assert "pass --force" in capsys.readouterr().err
    assert run("pack", "tiny-imagenet", "--data-dir", str(tmp_path / "nowhere")) == 1
    assert "python -m experiments data fetch tiny-imagenet" in capsys.readouterr().err


# The published data, where they are


@pytest.fixture(scope="module")
def published() -> Path:
    root = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not root.is_dir():
        pytest.skip("no data directory: set MBPA_DATA")
    return root


def the(name: str, root: Path) -> data.DataSet:
    if not data.is_present(data.SETS[name], root):
        pytest.skip(f"{root} has no {name}")
    return data.SETS[name]


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in data.SETS if name != "imagenet"])
def test_the_published_data_pass_their_check(name: str, published: Path) -> None:
    finding = data.check(the(name, published), published)
    assert finding.status == "good", finding.detail


@pytest.mark.heavy
def test_the_example_of_the_document_reads_the_published_data(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mnist", "ptb", "clinc150", "tiny-imagenet"):
        the(name, published)
    monkeypatch.setenv("MBPA_DATA", str(published))
    found: dict[str, Any] = {}
    exec(example(0), found)
    assert found["digits"].train.images.shape == (60000, 28, 28)
    assert found["pictures"].train.images.shape == (10000, 3, 40, 40)


def test_the_published_digits_are_those_of_the_field(published: Path) -> None:
    the("mnist", published)
    images = data.mnist(published)
    pixels = images.train.images.double() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert pixels.std().item() == pytest.approx(0.3081, abs=5e-5)
    assert images.train.labels.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert images.test.labels.bincount().tolist()[:3] == [980, 1135, 1032]


@pytest.mark.heavy
def test_the_published_corpus_has_a_rare_word_as_often_as_told(published: Path) -> None:
    the("ptb", published)
    corpus = data.ptb(published)
    unknown, end = corpus.words.index("<unk>"), corpus.words.index(data.END_OF_LINE)
    parts = (corpus.train, corpus.valid, corpus.test)
    assert [(part == unknown).sum().item() for part in parts] == [45_020, 3_485, 4_794]
    assert [(part == end).sum().item() for part in parts] == [42_068, 3_370, 3_761]


def test_the_published_intents_are_balanced_as_told(published: Path) -> None:
    the("clinc150", published)
    the("banking77", published)
    clinc, banking = data.clinc150(published), data.banking77(published)
    for part, count in ((clinc.train, 100), (clinc.valid, 20), (clinc.test, 30)):
        assert part.labels.bincount().tolist() == [count] * 150
    assert {len(intents) for intents in clinc.domains.values()} == {15}
    assert {name for intents in clinc.domains.values() for name in intents} == set(clinc.names)
    assert banking.test.labels.bincount().tolist() == [40] * 77
    counts = banking.train.labels.bincount()
    assert (counts.min().item(), counts.max().item()) == (35, 187)


def test_the_published_pictures_have_tiles_that_are_pictures(published: Path) -> None:
    the("tiny-imagenet", published)
    images = data.tiny_imagenet(published, classes=range(0, 200, 40))
    assert images.names[0] == "Egyptian cat"
    assert images.title.startswith("Tiny ImageNet, 40x40")
    assert images.train.images.shape == (2500, 3, 40, 40)
    assert images.test.images.shape == (250, 3, 40, 40)
    pixels = images.train.images.double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx([0.480, 0.449, 0.398], abs=0.06)
    inside = (pixels[..., 1:] - pixels[..., :-1]).abs().mean((0, 1, 2))
    across = (pixels[1:, ..., 0] - pixels[:-1, ..., -1]).abs().mean()
    assert across > 2 * inside.max(), "tiles are cut at their edges"
