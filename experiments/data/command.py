"""`python -m experiments data`: fetch, list, check or pack data sets."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from experiments.data.download import fetch
from experiments.data.integrity import check, is_present
from experiments.data.sources import SETS, TINY_IMAGENET, DataSetName, data_dir
from experiments.data.tiny_imagenet import ORIGINAL, pack_tiny_imagenet
from experiments.results import PROGRAM
from mbpa.cli.command import Command, parse_command
from mbpa.errors import MissingExtraError

Names = tyro.conf.Positional[tuple[DataSetName, ...]]


@dataclass(frozen=True)
class Fetch(Command):
    """Download data sets, verify their checksums and unpack them; interrupted downloads resume."""

    names: Names
    """Names of the data sets to fetch."""
    data_dir: Path | None = None
    """Directory of the data sets; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""
    force: bool = False
    """Replace damaged files."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def run(self) -> int:
        """Fetch the data sets one after the other; return 1 if any of them failed."""
        if not self.names:
            return _report_failure(f"name at least one data set: {', '.join(SETS)}", 2)
        code = 0
        for name in self.names:
            try:
                got = fetch(SETS[name], self.data_dir, force=self.force, progress=self.progress)
            except KeyboardInterrupt:
                return _report_failure(
                    f"interrupted; `python -m experiments data fetch {name}` continues from here",
                    130,
                )
            except OSError as error:
                code = _report_failure(str(error), 1)
                continue
            how = "already present" if got.was_there else f"fetched in {got.seconds:,.0f} s"
            print(f"{name}: {how}, {got.folder}: {got.detail}")
        return code


@dataclass(frozen=True)
class ListData(Command):
    """List the data sets: which experiments use them, size, terms, and whether they are present."""

    data_dir: Path | None = None
    """Directory of the data sets; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""

    def run(self) -> int:
        """Print the table and return 0."""
        print(f"{'data set':15}{'here':6}{'download':>10}  used by")
        for one in SETS.values():
            here = "yes" if is_present(one, self.data_dir) else "no"
            size = _megabytes(one.size) if one.can_be_fetched else "none"
            users = textwrap.wrap(", ".join(one.used_by), 100 - 33, break_on_hyphens=False)
            print(f"{one.name:15}{here:6}{size:>10}  {users[0]}")
            for more in users[1:]:
                print(f"{'':33}{more}")
            print(f"{'':15}{one.terms}\n{'':15}{one.home}")
        print(f"\nin {data_dir(self.data_dir)}")
        return 0


@dataclass(frozen=True)
class Check(Command):
    """Verify data sets: checksums, sizes, counts, labels."""

    names: Names = ()
    """Names of the data sets to verify; by default all.
    A missing data set is then an error only if all are missing.
    """
    data_dir: Path | None = None
    """Directory of the data sets; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""

    def run(self) -> int:
        """Print one line per data set. Return 1 if a named data set is not good, if any is damaged,
        or if none is present.
        """
        code, is_any_there = 0, False
        for name in self.names or get_args(DataSetName):
            try:
                finding = check(SETS[name], self.data_dir)
            except MissingExtraError as error:
                print(f"{name:14} unchecked   {error}")
                code = 1
                continue
            print(f"{name:14} {finding.status:11} {finding.detail}")
            is_any_there |= finding.status != "missing"
            if finding.status == "damaged" or (self.names and finding.status != "good"):
                code = 1
        return code if is_any_there else 1


@dataclass(frozen=True)
class Pack(Command):
    """Pack Tiny ImageNet into 40 MB: all images at 40x40, recompressed lossily."""

    name: tyro.conf.Positional[Literal["tiny-imagenet"]]
    """Name of the data set."""
    original: Path | None = None
    """The published zip or its unpacked folder; by default the folder that `fetch` creates."""
    data_dir: Path | None = None
    """Directory to write to; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""
    size: int = 40
    """Height and width of an image, in pixels."""
    quality: int = 50
    """Quality of the WebP pictures, 0 to 100."""
    force: bool = False
    """Replace files that were packed before."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def run(self) -> int:
        """Pack the images and list the files written."""
        folder = data_dir(self.data_dir) / TINY_IMAGENET.name
        original = self.original or folder / ORIGINAL
        if not original.exists():
            return _report_failure(str(TINY_IMAGENET.missing(folder.parent, ORIGINAL)), 1)
        try:
            written = pack_tiny_imagenet(
                original,
                folder,
                size=self.size,
                quality=self.quality,
                force=self.force,
                progress=self.progress,
            )
        except OSError as error:
            return _report_failure(str(error), 1)
        for path in written:
            print(f"{_megabytes(path.stat().st_size):>10}  {path}")
        return 0


COMMANDS: dict[str, type[Command]] = {
    "fetch": Fetch,
    "list": ListData,
    "check": Check,
    "pack": Pack,
}


def main(arguments: list[str]) -> int:
    """Run a `data` command and return its exit code; help and wrong usage raise `SystemExit`."""
    return parse_command(
        COMMANDS,
        arguments or ["--help"],
        program=f"{PROGRAM} data",
        description="Fetch, list, check or pack the data sets of the experiments.",
    ).run()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _report_failure(why: str, code: int) -> int:
    print(f"experiments: {why}", file=sys.stderr)
    return code
