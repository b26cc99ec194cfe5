"""What every trial has in common: how it is described, run and recorded."""

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
    """Something that the documentation promises did not hold; the message says what and where."""


@dataclass(frozen=True)
class Trial:
    """One kind of trial.

    Args:
        name: the word on the command line, and the name of the report.
        summary: one line of help.
        add_arguments: declares the options.
        run: does it and returns the figures of the report; raises `BrokenPromiseError`.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]

    def record(self, arguments: argparse.Namespace, command: str) -> Path:
        """Run the trial and write its report; returns where."""
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
