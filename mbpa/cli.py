"""The command line: parse, call, print.

Each command is a dataclass: its fields are the options, the docstring under a field is its help,
and `run` calls the library and prints. What takes long to import is imported there.
"""

from __future__ import annotations

import abc
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from mbpa.errors import MissingExtraError

DESCRIPTION = """Memory-based Parameter Adaptation: an episodic memory that adapts a network, per
query. `mbpa COMMAND --help` describes a command, `mbpa --version` prints the version."""


class Command(abc.ABC):
    """What every command can do once its options are parsed."""

    @abc.abstractmethod
    def run(self) -> None:
        """Do it, and print what came of it."""


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

    def run(self) -> None:
        from mbpa.experiments import digits, digits_report

        digits_report.prepare(self.out)
        config = digits.DigitsConfig(seeds=tuple(range(self.seeds)))
        result = digits.run(config, progress=self.progress)
        print(digits_report.text(result))
        for what, path in digits_report.write(result, self.out).items():
            print(f"{what:7} {path}")


COMMANDS: dict[str, type[Command]] = {"demo": Demo}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for errors of usage, 130 if interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        from mbpa import __version__

        print(f"mbpa {__version__}")
        return 0
    try:
        _parsed(arguments or ["--help"]).run()
    except SystemExit as done:  # tyro has printed help, or what is wrong
        return done.code if isinstance(done.code, int) else 2
    except MissingExtraError as error:
        return _failed(str(error), 1)
    except OSError as error:
        return _failed(str(error), 2)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    return 0


def _parsed(arguments: list[str]) -> Command:
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), prog="mbpa", description=DESCRIPTION, args=arguments
    )
    return command


def _failed(why: str, code: int) -> int:
    print(f"mbpa: {why}", file=sys.stderr)
    return code
