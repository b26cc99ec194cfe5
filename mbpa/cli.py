"""The command line: parse, call, print.

Each command is a dataclass: its fields are the options, the docstring under a field is its help,
and `run` calls the library and prints. What takes long to import is imported there. The options of
`run` and `tune` depend on the experiment and the preset, so these two are looked for first.
"""

from __future__ import annotations

import abc
import io
import itertools
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

import tyro

from mbpa.errors import ExperimentError, MissingExtraError, RunError

if TYPE_CHECKING:
    from mbpa.experiments import running
    from mbpa.experiments.results import Result

DESCRIPTION = """Memory-based Parameter Adaptation: an episodic memory that adapts a network, per
query. `mbpa COMMAND --help` describes a command, `mbpa --version` prints the version."""

Config = TypeVar("Config")
General = TypeVar("General", bound="Options")


class Command(abc.ABC):
    """What every command can do once its options are parsed."""

    after_interrupt: ClassVar[str] = ""
    """What to tell somebody who interrupted it."""

    @abc.abstractmethod
    def run(self) -> int:
        """Do it, print what came of it, and return the exit code."""


@dataclass(frozen=True)
class Demo(Command):
    """New digits in half a minute: a network that knows five digits meets all ten.

    Prints a table of accuracies and one prediction explained; writes demo.png and demo.json.
    """

    out: Path = Path("demo")
    """Directory for the files; made if it does not exist."""
    seeds: int = 20
    """Repetitions, each with other old digits and another stream; 1 to 100."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= 100:  # those from 100 on chose the hyper-parameters
            raise ValueError(f"seeds must be between 1 and 100, got {self.seeds}")

    def run(self) -> int:
        from mbpa.experiments import digits, digits_report

        digits_report.prepare(self.out)
        config = digits.DigitsConfig(seeds=tuple(range(self.seeds)))
        result = digits.run(config, progress=self.progress)
        print(digits_report.text(result))
        for what, path in digits_report.write(result, self.out).items():
            print(f"{what:7} {path}")
        return 0


@dataclass(frozen=True)
class List(Command):
    """The experiments: what each reproduces, its presets, and the command that runs it."""

    def run(self) -> int:
        from mbpa.experiments import EXPERIMENTS
        from mbpa.experiments.experiment import find

        for name in EXPERIMENTS:
            experiment = find(name)
            print(f"{name}\n  {experiment.summary}\n  reproduces: {experiment.reproduces}")
            for preset in experiment.presets:
                print(f"    mbpa run {name} --preset {preset}")
            if experiment.tune:
                print(f"    mbpa tune {name}")
        print("\n`mbpa run NAME --help` shows the settings; `mbpa report` draws what came of them.")
        return 0


@dataclass(frozen=True)
class Options:
    """What all experiments take."""

    preset: str = "quick"
    """Whose settings are the defaults of the others: smoke, quick, paper, or another that `mbpa
    list` names."""
    out: Path = Path("results")
    """Directory of the results: <out>/<experiment>/<preset>-seed<k>.json."""
    data_dir: Path | None = None
    """Where the data sets are; by default $MBPA_DATA, or else ~/.cache/mbpa/data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    progress: bool = True
    """Show a progress bar on standard error."""
    again: bool = False
    """Compute and replace results that are there already."""


@dataclass(frozen=True)
class SearchOptions(Options):
    """What all searches take."""

    adopt: bool = False
    """Make what is chosen the settings of the preset: written beside the code of mbpa."""


@dataclass(frozen=True)
class Run(Command):
    """Run an experiment: a table, and a JSON file a seed. A run that was interrupted goes on.

    The settings of one are shown by `mbpa run NAME --help`, the names by `mbpa list`.
    """

    after_interrupt: ClassVar[str] = "run the same command again to go on"
    options: ClassVar[type[Options]] = Options

    name: tyro.conf.Positional[str]
    """The experiment."""
    general: tyro.conf.OmitArgPrefixes[Options] = Options()
    settings: tyro.conf.Suppress[Any] = None
    """The experiment's config; by default the preset's."""

    def run(self) -> int:
        from mbpa.experiments.experiment import find

        results = self._results(self._asked("run"))
        for section in find(self.name).sections(results):
            for table in section.tables:
                print(f"\n{table.as_text(_terminal_width())}")
            if not section.tables:
                print("\n" + "\n".join([section.title, *section.text]))
        self._say_if_smoke()
        return 0

    def _say_if_smoke(self) -> None:
        if self.general.preset == "smoke":
            print("\nsmoke is a test of the code: its figures mean nothing")

    def _asked(self, kind: Literal["run", "tune"]) -> running.Run:
        from mbpa.experiments import experiment, running

        found, preset = experiment.find(self.name), self.general.preset
        config = self.settings or experiment.preset(found, preset)
        return running.Run(found, preset, config, self.general.out, kind)

    def _results(self, run: running.Run) -> list[Result]:
        from mbpa.experiments import running

        asked = self.general
        device = running.device_named(asked.device)
        start = time.perf_counter()
        results = running.execute(
            run,
            device=device,
            data_dir=asked.data_dir,
            progress=asked.progress,
            again=asked.again,
        )
        print(f"done in {time.perf_counter() - start:.1f} s, on {device.type}")
        return results


@dataclass(frozen=True)
class Tune(Run):
    """Search for the hyper-parameters of an experiment, on validation data; print the choice, and
    the command that runs with it.

    The search is a result, too: <out>/<experiment>/tune-<preset>.json.
    """

    options: ClassVar[type[Options]] = SearchOptions

    general: tyro.conf.OmitArgPrefixes[Options] = SearchOptions()

    def run(self) -> int:
        from mbpa.experiments import running, tuned
        from mbpa.experiments.report import chosen

        asked = self._asked("tune")
        adopts = isinstance(self.general, SearchOptions) and self.general.adopt
        if adopts:
            tuned.adoptable(self.name, asked.label)  # before a long search, not after it
        (result,) = self._results(asked)
        print(f"\n{chosen([result]).as_text(_terminal_width())}")
        if adopts:
            tuned.adopt(result)
            print(f"adopted in {tuned.FILE}")
        else:
            config = tuned.with_settings(asked.config, tuned.chosen(result))
            given = self.general
            places = Options(out=given.out, data_dir=given.data_dir, device=given.device)
            words = [replace(asked, config=config, kind="run").command]
            words += map(shlex.quote, running.flags(places, Options()))
            print(f"\nto run with these:\n{' '.join(words)}")
        self._say_if_smoke()
        return 0


@dataclass(frozen=True)
class Report(Command):
    """Draw all results on one HTML page that needs nothing else, and each figure as PNG and SVG."""

    results: tyro.conf.Positional[Path] = Path("results")
    """Directory that `mbpa run` wrote to."""
    out: Path = Path("report")
    """Directory for index.html and the figures; made if it does not exist."""
    presets: tuple[str, ...] = ()
    """Show the results of these alone."""
    documents: tuple[Path, ...] = ()
    """Instead of a page: bring the tables and figures in these Markdown files up to date."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def run(self) -> int:
        from mbpa.experiments.documents import refresh
        from mbpa.experiments.report import write_report

        for document in self.documents:
            news = refresh(document, self.results)
            print(f"{document} {'brought up to date' if news else 'is up to date'}")
        if not self.documents:
            page = write_report(self.results, self.out, self.presets, progress=self.progress)
            print(f"wrote {page}")
        return 0


@dataclass(frozen=True)
class Data(Command):
    """The data sets of the experiments: fetch, list, check, pack."""

    arguments: tuple[str, ...] = ()

    def run(self) -> int:
        from mbpa.experiments.data import command

        return command.main(list(self.arguments))


@dataclass(frozen=True)
class Teach(Command):
    """Make a classifier from a spreadsheet of texts and labels, or from a folder of pictures.

    Embeds them, trains a head, fills the memory, and tunes; `mbpa serve` starts what it wrote.
    """

    after_interrupt: ClassVar[str] = "run the same command again: what was embedded is kept"

    data: tyro.conf.Positional[Path]
    """The file: JSONL if its name ends in .jsonl, else CSV with a header. Or a folder, with a
    sub-folder of pictures for each label."""
    out: Path = Path("run")
    """Directory of the run."""
    text: str = "text"
    """Name of the column of texts."""
    label: str = "label"
    """Name of the column of labels; if there is one other column, that."""
    image: str | None = None
    """Name of a column of paths to pictures, which are then taught in place of texts."""
    encoding: str | None = None
    """Of the file, such as cp1252; by default UTF-8."""
    encoder: str | None = None
    """A directory or a name of Hugging Face; by default a packaged MiniLM for texts, and for
    pictures "edges", a plain one that needs no weights."""
    cache: Path = Path("~/.cache/mbpa/embeddings")
    """Where embeddings are kept for the next time."""
    again: bool = False
    """Replace the run in the directory, with all that it was taught."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to embed; auto: on a GPU if there is one."""
    progress: bool = True
    """Show progress bars on standard error."""

    def run(self) -> int:
        from mbpa.serve import placing, teaching

        start = time.perf_counter()
        if not self.data.exists():
            raise RunError(f"{self.data} cannot be read: No such file or directory")
        placing.require_free(self.out, replace=self.again)
        try:
            data, encoder = self._given()
        except ValueError as error:
            raise RunError(str(error)) from error
        cache = self.cache.expanduser()
        taught = teaching.teach(data, encoder, cache=cache, progress=self.progress)
        teaching.write_taught(taught, data, self.out, replace=self.again)
        print(teaching.report(taught, data))
        print(f"wrote {self.out} in {time.perf_counter() - start:.1f} s\n")
        print(f"next: mbpa serve {self.out}, or with a page to it: mbpa explore {self.out}")
        return 0

    def _given(self) -> tuple[Any, Any]:
        """The examples, and the encoder for them."""
        from mbpa import image, text
        from mbpa.device import choose_device
        from mbpa.serve import album, spreadsheet

        device = choose_device(self.device)
        columns: dict[str, Any] = {"label": self.label, "encoding": self.encoding}
        if self.data.is_dir() or self.image is not None:
            encoder = image.encoder(self.encoder or image.DEFAULT, device=device)
            pictures = album.read_album(
                self.data, column=self.image or "image", progress=self.progress, **columns
            )
            return pictures, encoder
        if self.data.is_file() and self.data.suffix.lower() in image.SUFFIXES:
            raise RunError(
                f"{self.data} is a picture: name a folder, with a sub-folder of pictures a label"
            )
        data = spreadsheet.read_spreadsheet(self.data, text=self.text, **columns)
        return data, text.encoder(self.encoder or text.DEFAULT, device=device)


@dataclass(frozen=True)
class Serve(Command):
    """Serve a run over HTTP: predict, learn, explain, forget; documented at /docs."""

    directory: tyro.conf.Positional[Path]
    """What `mbpa teach` wrote."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all, and then with a token."""
    port: int = 8000
    """Port to listen on; 0: any free one, which is printed."""
    token: str | None = None
    """A password of your choice: requests must then carry the header `Authorization: Bearer
    TOKEN`, all but those for /health and /docs, and the page asks for it. By default the value of
    the environment variable MBPA_TOKEN, which lists of processes do not show; without either,
    nobody is asked for one."""
    threshold: float | None = None
    """Confidence below which it abstains; by default the one that was fitted."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU if there is one."""

    def run(self) -> int:
        from mbpa.serve import http
        from mbpa.serve.gate import Settings

        http.serve(
            self.directory,
            host=self.host,
            port=self.port,
            settings=Settings(token=self._asked_for()),
            threshold=self.threshold,
            device=self.device,
        )
        return 0

    def _asked_for(self) -> str | None:
        """The token. An empty option is a variable that was not set, and would let everybody in."""
        if self.token == "":
            raise RunError("--token must not be empty; leave it out to ask nobody for one")
        return self.token or os.environ.get("MBPA_TOKEN") or None


@dataclass(frozen=True)
class Check(Command):
    """Verify a run: every check sum of its files, and that they fit each other.

    Changes nothing. A run is also verified whenever it is served.
    """

    directory: tyro.conf.Positional[Path]
    """What `mbpa teach` wrote."""

    def run(self) -> int:
        from mbpa.serve.checking import check_run

        for name, what in check_run(self.directory):
            print(f"{name:10} {what}")
        print(f"{self.directory} is whole")
        return 0


@dataclass(frozen=True)
class Explore(Serve):
    """Serve a run with a page on top: ask, see why, teach, undo, review what it was taught."""

    def run(self) -> int:
        try:
            from mbpa.explorer import page
            from mbpa.serve import http
            from mbpa.serve.gate import Settings
        except MissingExtraError as error:
            raise MissingExtraError("what the page needs", extra="explore") from error

        http.serve(
            self.directory,
            host=self.host,
            port=self.port,
            settings=Settings(token=self._asked_for(), open_paths=(page.PATH,)),
            threshold=self.threshold,
            device=self.device,
            page=page.mount,
            path=page.PATH,
        )
        return 0


COMMANDS: dict[str, type[Command]] = {
    "teach": Teach,
    "serve": Serve,
    "explore": Explore,
    "check": Check,
    "list": List,
    "run": Run,
    "tune": Tune,
    "report": Report,
    "data": Data,
    "demo": Demo,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for errors of usage, 130 if interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths may hold what is no text
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments == ["--version"]:
        from mbpa import __version__

        print(f"mbpa {__version__}")
        return 0
    hint = ""
    try:
        command = _parsed(arguments or ["--help"])
        hint = command.after_interrupt
        code = command.run()
        sys.stdout.flush()  # here, where it may fail
        return code
    except SystemExit as done:  # tyro has printed help, or what is wrong
        return done.code if isinstance(done.code, int) else 2
    except MissingExtraError as error:
        return _failed(str(error), 1)
    except BrokenPipeError:  # whoever read has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left at exit
        return 1
    except (ExperimentError, RunError, OSError) as error:
        return _failed(str(error), 2)
    except KeyboardInterrupt:
        return _failed(f"interrupted; {hint}" if hint else "interrupted", 130)


def _parsed(arguments: list[str]) -> Command:
    word, rest = arguments[0], arguments[1:]
    if word == "data":
        return Data(tuple(rest))
    if word in ("run", "tune") and not (rest and rest[0].startswith("-")):
        return _with_settings(Run if word == "run" else Tune, word, rest)
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), prog="mbpa", description=DESCRIPTION, args=arguments
    )
    return command


@dataclass(frozen=True)
class _Asked(Generic[General, Config]):
    """What somebody typed after the name of an experiment."""

    general: Annotated[General, tyro.conf.arg(name="")]  # flags of both without a prefix
    experiment: Annotated[Config, tyro.conf.arg(name="")]


def _with_settings(command: type[Run], word: str, arguments: list[str]) -> Command:
    """Flags come from the fields of the experiment's config, their defaults from the preset."""
    from mbpa.experiments import EXPERIMENTS
    from mbpa.experiments.experiment import find, preset

    if not arguments:
        raise ExperimentError(f"name an experiment: {', '.join(EXPERIMENTS)}; see `mbpa list`")
    name, flags = arguments[0], arguments[1:]
    experiment, asked = find(name), _preset_in(flags)
    config = preset(experiment, asked)
    kind: Any = _Asked[command.options, type(config)]  # type: ignore[misc,name-defined]  # known only now
    try:
        got = tyro.cli(
            kind,
            prog=f"mbpa {word} {name}",
            description=f"{experiment.summary} ({experiment.reproduces})",
            default=_Asked(command.options(preset=asked), config),
            args=flags,
        )
    except ValueError as error:  # the config's own, for settings that cannot be
        raise ExperimentError(f"{error}; see `mbpa {word} {name} --help`") from error
    return command(name, got.general, got.experiment)


def _preset_in(flags: list[str]) -> str:
    found = Options.preset
    for flag, value in itertools.pairwise([*flags, ""]):
        if flag == "--preset":
            found = value
        elif flag.startswith("--preset="):
            found = flag.removeprefix("--preset=")
    return found


def _terminal_width() -> int | None:
    """Of what tables are printed to; `None` for a file, which has room."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _failed(why: str, code: int) -> int:
    print(f"mbpa: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
