"""The command line, with one module per group of commands: parse options, call, print."""

from __future__ import annotations

import sys

from mbpa.cli import journal, lm
from mbpa.cli.command import Command, parse_command, run_command
from mbpa.cli.demo import Demo
from mbpa.cli.runs import Audit, Backup, Export, Merge, Rename, Restore, Retrain
from mbpa.cli.serve import Check, Explore, Serve
from mbpa.cli.teach import Teach

DESCRIPTION = """Memory-based Parameter Adaptation: an episodic memory that adapts a network to each
query. `mbpa COMMAND --help` describes a command, `mbpa --version` prints the version."""

COMMANDS: dict[str, type[Command]] = {
    "teach": Teach,
    "serve": Serve,
    "explore": Explore,
    "check": Check,
    "export": Export,
    "audit": Audit,
    "rename": Rename,
    "merge": Merge,
    "retrain": Retrain,
    "backup": Backup,
    "restore": Restore,
    "journal": journal.JournalCommands,
    "lm": lm.LanguageModel,
    "demo": Demo,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for usage errors, 130 if interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        from mbpa import __version__

        print(f"mbpa {__version__}")
        return 0

    def parse() -> Command:
        if arguments[:1] == ["lm"]:
            return parse_command(
                lm.COMMANDS,
                arguments[1:] or ["--help"],
                program="mbpa lm",
                description=lm.DESCRIPTION,
            )
        if arguments[:1] == ["journal"]:
            return parse_command(
                journal.COMMANDS,
                arguments[1:] or ["--help"],
                program="mbpa journal",
                description=journal.DESCRIPTION,
            )
        return parse_command(
            COMMANDS, arguments or ["--help"], program="mbpa", description=DESCRIPTION
        )

    return run_command(parse, program="mbpa")
