"""The common part of all trials: description, running and recording."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path("results/reliability")


class BrokenPromiseError(AssertionError):
    """A documented guarantee did not hold; the message says which and where."""


@dataclass(frozen=True)
class Trial:
    """One kind of trial.

    Args:
        name: name on the command line and of the report.
        summary: one line of help.
        add_arguments: declares the options.
        run: runs the trial and returns the figures of the report; raises `BrokenPromiseError`.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]

    def record(self, arguments: argparse.Namespace, command: str) -> Path:
        """Run the trial, write its report, and return the path."""
        start = time.perf_counter()
        figures = self.run(arguments)
        report = {
            "command": command,
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
            "seconds": round(time.perf_counter() - start, 1),
            **figures,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        path: Path = arguments.out / f"{self.name}.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report, indent=1))
        return path
