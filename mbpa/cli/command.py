"""The base of all commands: how they are described, parsed and run, and how errors are printed.

A command is a dataclass. Its fields are the options, the docstring under a field is the option's
help text, and `run` calls the library and prints. Slow imports belong in `run`.

A help text of several lines is printed with its line breaks, so each line holds whole sentences.
"""

from __future__ import annotations

import abc
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import ClassVar

import tyro

from mbpa.errors import MissingExtraError, RunError


class Command(abc.ABC):
    """A command whose options have been parsed."""

    after_interrupt: ClassVar[str] = ""
    """Hint printed when the command is interrupted."""

    @abc.abstractmethod
    def run(self) -> int:
        """Run the command, print its result and return the exit code."""


def parse_command(
    commands: Mapping[str, type[Command]], arguments: list[str], *, program: str, description: str
) -> Command:
    """Parse the name of a command and its options."""
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(commands), prog=program, description=description, args=arguments
    )
    return command


def run_command(
    parse: Callable[[], Command], *, program: str, errors: tuple[type[Exception], ...] = ()
) -> int:
    """Parse and run a command, and return its exit code: 2 for usage errors, 130 if interrupted.

    Args:
        parse: returns the command; may print help and exit.
        program: name printed before error messages.
        errors: further exceptions to report by their message alone, without a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths may contain bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")

    def fail(message: str, code: int) -> int:
        print(f"{program}: {message}", file=sys.stderr)
        return code

    hint = ""
    usual: tuple[type[Exception], ...] = (RunError, OSError, *errors)
    try:
        command = parse()
        hint = command.after_interrupt
        code = command.run()
        sys.stdout.flush()  # here, where a failure is still handled
        return code
    except SystemExit as done:  # tyro has printed help or an error
        return done.code if isinstance(done.code, int) else 2
    except MissingExtraError as error:
        return fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output flushed at exit
        return 1
    except usual as error:
        return fail(str(error), 2)
    except KeyboardInterrupt:
        return fail(f"interrupted; {hint}" if hint else "interrupted", 130)
