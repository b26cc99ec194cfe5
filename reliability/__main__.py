"""`python -m reliability NAME`: run one trial and write its report."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys

from reliability.trial import RESULTS, BrokenPromiseError, Trial

NAMES = ("kills", "power", "damage", "operations", "histories", "load", "soak", "fuzz", "replicas")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reliability", description=__doc__)
    trials = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for trial in map(find_trial, NAMES):
        options = trials.add_parser(trial.name, help=trial.summary, description=trial.summary)
        options.add_argument(
            "--out", type=type(RESULTS), default=RESULTS, help="directory of the report"
        )
        trial.add_arguments(options)
    arguments = parser.parse_args()
    command = shlex.join(["python", "-m", "reliability", *sys.argv[1:]])
    try:
        path = find_trial(arguments.name).record(arguments, command)
    except BrokenPromiseError as error:
        print(f"broken promise: {error}", file=sys.stderr)
        return 1
    print(f"written to {path}")
    return 0


def find_trial(name: str) -> Trial:
    """Return the trial of this name; each module has one, called `TRIAL`."""
    trial: Trial = importlib.import_module(f"reliability.{name}").TRIAL
    return trial


if __name__ == "__main__":
    sys.exit(main())
