"""Check a release: build it, look into it, install it with each extra, try it, check its types.

`make release-check` runs everything. The files are left in build/release/dist. Each extra gets an
empty environment of its own, to which only torch is lent, since it takes half a gigabyte.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIALS = ROOT / "tests" / "release"
TOOLS = ("build", "hatchling", "mypy", "pyright[nodejs]", "twine")
MAX_IMPORT_MS = 150.0  # of `import mbpa`, after torch
IMPORT_REPETITIONS = 15
# Most of the rest are attributes of the service whose types pyright infers but wants declared.
MIN_COMPLETENESS = 89.0
TYPED_EXTRAS = "explore,graph,images,language,milvus,qdrant,replicas"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--extras", nargs="*", default=list_extras(), help="default: all of them")
    parser.add_argument("--no-types", action="store_true", help="leave out mypy and pyright")
    given = parser.parse_args()
    check = ReleaseCheck(given.out.resolve())
    failed = []
    steps = [("build", check.build), ("contents", check.check_contents)]
    steps += [(f"extra {name}", lambda name=name: check.try_extra(name)) for name in given.extras]
    steps += [("bare wheel", check.try_bare)]
    if not given.no_types:
        steps += [("types", check.check_types)]
    for name, step in steps:
        start = time.monotonic()
        try:
            said = step()
        except (subprocess.CalledProcessError, AssertionError) as error:
            failed.append(name)
            said = f"FAILED: {error}"
            if name == "build":
                break
        finally:
            took = time.monotonic() - start
        print(f"{name:<18}{took:5.0f} s  {said}", flush=True)
    print("failed: " + ", ".join(failed) if failed else "the release is in order")
    return 1 if failed else 0


def list_extras() -> list[str]:
    """Return the names of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return list(project["optional-dependencies"])


class ReleaseCheck:
    """The steps, which share a directory."""

    def __init__(self, out: Path) -> None:
        self.out, self.dist = out, out / "dist"
        out.mkdir(parents=True, exist_ok=True)
        self._lent = out / "torch"

    @property
    def wheel(self) -> Path:
        (found,) = self.dist.glob("*.whl")
        return found

    @property
    def sdist(self) -> Path:
        (found,) = self.dist.glob("*.tar.gz")
        return found

    def build(self) -> str:
        """Build the source distribution and the wheel; twine checks their description."""
        tools = self._make_tools()
        shutil.rmtree(self.dist, ignore_errors=True)
        run(tools, "-m", "build", "--no-isolation", "--outdir", self.dist, ROOT)
        run(tools, "-m", "twine", "check", "--strict", self.wheel, self.sdist)
        return f"{self.wheel.name}, {self.sdist.name}; twine finds no fault"

    def check_contents(self) -> str:
        """Compare the wheel with the checkout, and with one that is built from the sdist."""
        check_wheel(self.wheel)
        check_sdist(self.sdist)
        unpacked = self.out / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(self.sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = unpacked.iterdir()
        options = "--no-isolation", "--wheel", "--outdir", unpacked
        run(self._make_tools(), "-m", "build", *options, source)
        (again,) = unpacked.glob("*.whl")
        assert digest(again) == digest(self.wheel), f"{again} is not the wheel of the checkout"
        return f"{self.wheel.stat().st_size / 1e3:.0f} kB; the sdist builds the same bytes"

    def try_extra(self, extra: str) -> str:
        """Install the wheel with one extra in an empty environment, and use it."""
        with self._install_extra(extra) as python:
            printed = run(python, TRIALS / "smoke.py", extra)
            notes = [f"; {line}" for line in printed.splitlines() if line.startswith("note: ")]
            return f"works, {count_packages(python)} packages" + "".join(notes)

    def try_bare(self) -> str:
        """Install the wheel without extras, use it, and time its import."""
        with self._install_extra("none") as python:
            run(python, TRIALS / "smoke.py", "none")
            return f"works, {count_packages(python)} packages; {time_import(python)}"

    def check_types(self) -> str:
        """Check a user's program, and the completeness of the types, against the wheel."""
        tools = self._make_tools()
        with self._install_extra(TYPED_EXTRAS) as python:
            program = self.out / "typed_program.py"  # outside the checkout
            shutil.copy(TRIALS / "typed_program.py", program)
            options = "--strict", "--python-executable", python, "--cache-dir", self.out / "mypy"
            run(tools, "-m", "mypy", *options, program)
            settings = self.out / "pyrightconfig.json"
            settings.write_text('{"typeCheckingMode": "strict"}\n')
            run(tools, "-m", "pyright", "--pythonpath", python, "--project", settings, program)
            options = "--verifytypes", "mbpa", "--ignoreexternal"  # this ignores --pythonpath
            place = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
            said = run(tools, "-m", "pyright", *options, environment=place, allowed=(0, 1))
        found = re.search(r"completeness score: ([\d.]+)%", said)
        assert found is not None, said
        score = float(found[1])
        assert score >= MIN_COMPLETENESS, f"{score}% of the types are known: {said}"
        return f"mypy and pyright accept a user's program; {score}% of all types are declared"

    # Environments

    def _make_tools(self) -> Path:
        return self._make_environment("tools", *TOOLS)

    def _make_environment(self, name: str, *packages: str) -> Path:
        """Return the interpreter of an environment that is kept between calls."""
        folder = self.out / name
        python = find_python(folder)
        if not (folder / "ready").exists():
            venv.create(folder, with_pip=True, clear=True)
            install(python, *packages)
            (folder / "ready").touch()
        return python

    @contextlib.contextmanager
    def _install_extra(self, extra: str) -> Iterator[Path]:
        """Yield the interpreter of a new environment with torch and the wheel; remove it after."""
        lent = find_site_packages(self._make_environment("torch", "torch"))
        folder = self.out / f"extra-{extra}"
        venv.create(folder, with_pip=True, clear=True)
        python = find_python(folder)
        (find_site_packages(python) / "lent_torch.pth").write_text(f"{lent}\n")
        try:
            install(python, str(self.wheel) if extra == "none" else f"{self.wheel}[{extra}]")
            run(python, "-m", "pip", "check")
            yield python
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# What the files must hold


def check_wheel(wheel: Path) -> None:
    """Raise `AssertionError` unless a wheel holds the package of this checkout and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        described = {name.split("/", 1)[1] for name in set(archive.namelist()) - names}
    expected = list_package_files()
    assert names == expected, f"missing {expected - names}, not expected {names - expected}"
    assert described >= {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def check_sdist(sdist: Path) -> None:
    """Raise `AssertionError` unless an sdist holds the package and what builds it."""
    beside = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
    beside |= {"scripts/package_description.py"}
    added = {"PKG-INFO", ".gitignore"}  # by hatchling
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    expected = list_package_files() | beside | added
    assert names == expected, f"missing {expected - names}, not expected {names - expected}"


def list_package_files() -> set[str]:
    """Return the files of the package in this checkout, as they are named in a wheel."""
    kept = {".py", ".html", ".css", ".js"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mbpa").rglob("*")
        if path.suffix in kept or path.name == "py.typed"
    }
    return found | {"mbpa_command.py"}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Processes


def run(
    *command: object, environment: Mapping[str, str] | None = None, allowed: Sequence[int] = (0,)
) -> str:
    """Run a command outside the checkout; print what it says only if it fails."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=Path(ROOT.anchor),
        env={**inherited, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in allowed:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, done.args)
    return done.stdout


def install(python: Path, *packages: str) -> None:
    """Install packages in the tested versions; what is never imported is never compiled."""
    options = "--quiet", "--no-compile", "--disable-pip-version-check"
    run(python, "-m", "pip", "install", *options, "-c", ROOT / "constraints.txt", *packages)


def find_python(environment: Path) -> Path:
    windows = environment / "Scripts" / "python.exe"
    return windows if sys.platform == "win32" else environment / "bin" / "python"


def find_site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run(python, "-c", code).strip())


def count_packages(python: Path) -> int:
    return len(run(python, "-m", "pip", "list", "--format=freeze").splitlines())


def time_import(python: Path, repetitions: int = IMPORT_REPETITIONS) -> str:
    """Time `import mbpa` after torch, in fresh processes; the median must be within the limit."""
    code = (
        "import time, torch; start = time.perf_counter(), time.process_time(); import mbpa; "
        "print(time.perf_counter() - start[0], time.process_time() - start[1])"
    )
    run(python, "-c", code)  # compiles what it imports
    times = [[float(each) for each in run(python, "-c", code).split()] for _ in range(repetitions)]
    wall, processor = (sorted(1e3 * each for each in column) for column in zip(*times, strict=True))
    said = (
        f"import mbpa takes {statistics.median(processor):.0f} ms of processor time after torch "
        f"(wall {wall[0]:.0f} to {wall[-1]:.0f} ms, median {statistics.median(wall):.0f})"
    )
    # Not the wall time, which depends on what else the machine does.
    assert statistics.median(processor) <= MAX_IMPORT_MS, f"{said}, at most {MAX_IMPORT_MS:.0f}"
    return said


if __name__ == "__main__":
    sys.exit(main())
