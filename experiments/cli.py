"""The command line of the experiments: list, run, tune, reproduce, report, data.

The options of `run` and `tune` depend on the experiment and its preset, so both are looked up
before the options are parsed.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import tyro

from experiments import EXPERIMENTS, running, tuned_settings
from experiments.data import command as data_command
from experiments.documents import refresh_document
from experiments.errors import ExperimentError
from experiments.experiment import Experiment, find, preset
from experiments.report import tabulate_chosen, write_report
from experiments.results import PROGRAM, Result
from mbpa.cli.command import Command, parse_command, run_command

DESCRIPTION = f"""The experiments of the paper, and our own. `{PROGRAM} COMMAND --help` describes a
command."""

Config = TypeVar("Config")
General = TypeVar("General", bound="Options")


@dataclass(frozen=True)
class List(Command):
    """List the experiments: what each reproduces, its presets, and the commands that run it."""

    def run(self) -> int:
        for name in EXPERIMENTS:
            experiment = find(name)
            print(f"{name}\n  {experiment.summary}\n  reproduces: {experiment.reproduces}")
            for each in experiment.presets:
                print(f"    {PROGRAM} run {name} --preset {each}")
            if experiment.tune:
                print(f"    {PROGRAM} tune {name}")
        print(f"\n`{PROGRAM} run NAME --help` shows the settings of an experiment;")
        print(f"`{PROGRAM} report` draws the results.")
        return 0


@dataclass(frozen=True)
class Options:
    """Options shared by all experiments."""

    preset: str = "quick"
    """Named settings: smoke, quick, paper, or another that `list` shows.
    They are the defaults of the options below."""
    out: Path = Path("results")
    """Directory of the results: <out>/<experiment>/<preset>-seed<k>.json."""
    data_dir: Path | None = None
    """Directory of the data sets; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses a GPU if there is one."""
    progress: bool = True
    """Show a progress bar on standard error."""
    again: bool = False
    """Recompute and replace results that already exist."""


@dataclass(frozen=True)
class SearchOptions(Options):
    """Options shared by all searches."""

    adopt: bool = False
    """Adopt the chosen settings for the preset by writing them to experiments/tuned.json."""


@dataclass(frozen=True)
class Run(Command):
    """Run an experiment: prints tables and writes one JSON file per seed.

    An interrupted run is resumed by the same command. `run NAME --help` shows the settings of an
    experiment, `list` their names.
    """

    after_interrupt: ClassVar[str] = "run the same command again to continue"
    options: ClassVar[type[Options]] = Options

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of the experiment."""
    general: tyro.conf.OmitArgPrefixes[Options] = Options()
    settings: tyro.conf.Suppress[Any] = None
    """The experiment's config; by default the preset's."""

    def run(self) -> int:
        results = self._compute(self._describe_run("run"))
        print_tables(find(self.name), results)
        self._warn_of_smoke()
        return 0

    def _warn_of_smoke(self) -> None:
        if self.general.preset == "smoke":
            print("\nsmoke only tests the code: its numbers mean nothing")

    def _describe_run(self, kind: Literal["run", "tune"]) -> running.Run:
        experiment, name = find(self.name), self.general.preset
        config = self.settings or preset(experiment, name)
        return running.Run(experiment, name, config, self.general.out, kind)

    def _compute(self, run: running.Run) -> list[Result]:
        options = self.general
        device = running.device_named(options.device)
        start = time.perf_counter()
        results = running.execute(
            run,
            device=device,
            data_dir=options.data_dir,
            progress=options.progress,
            again=options.again,
        )
        print(f"done in {time.perf_counter() - start:.1f} s, on {device.type}")
        return results


@dataclass(frozen=True)
class Tune(Run):
    """Search for the hyper-parameters of an experiment on validation data.

    Prints the chosen settings and the command that runs with them, and writes all trials to the
    file tune-<preset>.json in <out>/<experiment>.
    """

    options: ClassVar[type[Options]] = SearchOptions

    general: tyro.conf.OmitArgPrefixes[Options] = SearchOptions()

    def run(self) -> int:
        search = self._describe_run("tune")
        adopts = isinstance(self.general, SearchOptions) and self.general.adopt
        if adopts:
            tuned_settings.check_adoptable(self.name, search.label)  # before the long search
        (result,) = self._compute(search)
        print(f"\n{tabulate_chosen([result]).as_text(_terminal_width())}")
        if adopts:
            tuned_settings.adopt(result)
            print(f"adopted in {tuned_settings.FILE}")
        else:
            self._print_next(search, result)
        self._warn_of_smoke()
        return 0

    def _print_next(self, search: running.Run, result: Result) -> None:
        """Print the command that runs with the chosen settings."""
        config = tuned_settings.apply_settings(
            search.config, tuned_settings.collect_choices(result)
        )
        given = self.general
        places = Options(out=given.out, data_dir=given.data_dir, device=given.device)
        words = [replace(search, config=config, kind="run").command]
        words += map(shlex.quote, running.flags(places, Options()))
        print(f"\nto run with these:\n{' '.join(words)}")


@dataclass(frozen=True)
class Reproduce(Command):
    """Run all experiments with one preset, and draw the report.

    Variants of the preset, such as paper-wikitext-2 of paper, are run as well. An experiment that
    fails does not keep the others from running.
    """

    after_interrupt: ClassVar[str] = "run the same command again to continue"

    preset: str = "quick"
    """Preset to run; experiments that do not have it are left out."""
    out: Path = Path("reproduced")
    """Directory of the results and, in its folder report/, of the report."""
    data_dir: Path | None = None
    """Directory of the data sets; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses a GPU if there is one."""
    progress: bool = True
    """Show progress bars on standard error."""

    def run(self) -> int:
        pairs = [
            (name, each)
            for name in EXPERIMENTS
            for each in find(name).presets
            if each == self.preset or each.startswith(f"{self.preset}-")
        ]
        if all(each != self.preset for _, each in pairs):
            raise ExperimentError(f"no experiment has the preset {self.preset!r}: see `list`")
        failures = sum(not self._run_one(name, each) for name, each in pairs)
        print(f"wrote {write_report(self.out, self.out / 'report', (), progress=self.progress)}")
        return 1 if failures else 0

    def _run_one(self, name: str, preset: str) -> bool:
        options = Options(preset, self.out, self.data_dir, self.device, self.progress)
        print(f"== {name}, {preset}")
        try:
            Run(name, options).run()
        except (ExperimentError, OSError, ImportError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return False
        return True


@dataclass(frozen=True)
class Report(Command):
    """Draw all results on one self-contained HTML page, and each figure as PNG and SVG."""

    results: tyro.conf.Positional[Path] = Path("results")
    """Directory of the results."""
    out: Path = Path("report")
    """Directory for index.html and the figures; created if it does not exist."""
    presets: tuple[str, ...] = ()
    """Show the results of these presets only."""
    documents: tuple[Path, ...] = ()
    """Update the tables and figures in these Markdown files instead of writing an HTML page."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def run(self) -> int:
        for document in self.documents:
            is_new = refresh_document(document, self.results)
            print(f"{document} {'updated' if is_new else 'is up to date'}")
        if not self.documents:
            page = write_report(self.results, self.out, self.presets, progress=self.progress)
            print(f"wrote {page}")
        return 0


@dataclass(frozen=True)
class Data(Command):
    """Fetch, list, check or pack the data sets of the experiments."""

    arguments: tuple[str, ...] = ()

    def run(self) -> int:
        return data_command.main(list(self.arguments))


COMMANDS: dict[str, type[Command]] = {
    "list": List,
    "run": Run,
    "tune": Tune,
    "reproduce": Reproduce,
    "report": Report,
    "data": Data,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for usage errors, 130 if interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_command(
        lambda: parse(arguments or ["--help"]), program="experiments", errors=(ExperimentError,)
    )


def print_tables(experiment: Experiment[Any], results: Sequence[Result]) -> None:
    """Print the tables of an experiment's report, or its text where a section has no tables."""
    for section in experiment.sections(results):
        for table in section.tables:
            print(f"\n{table.as_text(_terminal_width())}")
        if not section.tables:
            print("\n" + "\n".join([section.title, *section.text]))


def parse(arguments: list[str]) -> Command:
    """Parse the words after `python -m experiments`."""
    word, rest = arguments[0], arguments[1:]
    if word == "data":
        return Data(tuple(rest))
    if word in ("run", "tune") and not (rest and rest[0].startswith("-")):
        return _parse_experiment(Run if word == "run" else Tune, word, rest)
    return parse_command(COMMANDS, arguments, program=PROGRAM, description=DESCRIPTION)


@dataclass(frozen=True)
class _Parsed(Generic[General, Config]):
    """Everything that follows the name of an experiment."""

    general: Annotated[General, tyro.conf.arg(name="")]  # no prefix on the flags of either part
    experiment: Annotated[Config, tyro.conf.arg(name="")]


def _parse_experiment(command: type[Run], word: str, arguments: list[str]) -> Command:
    """Parse flags made from the fields of the experiment's config, with the preset's defaults."""
    if not arguments:
        raise ExperimentError(f"name an experiment: {', '.join(EXPERIMENTS)}; see `list`")
    name, flags = arguments[0], arguments[1:]
    experiment, wanted = find(name), _find_preset(flags)
    config = preset(experiment, wanted)
    kind: Any = _Parsed[command.options, type(config)]  # type: ignore[misc,name-defined]  # known only now
    try:
        parsed = tyro.cli(
            kind,
            prog=f"{PROGRAM} {word} {name}",
            description=f"{experiment.summary} ({experiment.reproduces})",
            default=_Parsed(command.options(preset=wanted), config),
            args=flags,
        )
    except ValueError as error:  # raised by the config for impossible settings
        raise ExperimentError(f"{error}; see `{PROGRAM} {word} {name} --help`") from error
    return command(name, parsed.general, parsed.experiment)


def _find_preset(flags: list[str]) -> str:
    found = Options.preset
    for flag, value in itertools.pairwise([*flags, ""]):
        if flag == "--preset":
            found = value
        elif flag.startswith("--preset="):
            found = flag.removeprefix("--preset=")
    return found


def _terminal_width() -> int | None:
    """Return the width of the terminal; `None` if the output goes to a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
