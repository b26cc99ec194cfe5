"""The command `mbpa demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mbpa.cli.command import Command


@dataclass(frozen=True)
class Demo(Command):
    """Learn new digits in half a minute: a network trained on five digits meets all ten.

    Prints a table of accuracies and an explanation of one prediction; writes demo.png and
    demo.json.
    """

    out: Path = Path("demo")
    """Directory for the files; created if it does not exist."""
    seeds: int = 20
    """Number of repetitions, 1 to 100, each with different old digits and a different stream."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= 100:  # seeds from 100 on chose the hyper-parameters
            raise ValueError(f"seeds must be between 1 and 100, got {self.seeds}")

    def run(self) -> int:
        from mbpa.demo import digits, report

        report.prepare(self.out)
        config = digits.DigitsConfig(seeds=tuple(range(self.seeds)))
        result = digits.run(config, progress=self.progress)
        print(report.text(result))
        for what, path in report.write(result, self.out).items():
            print(f"{what:7} {path}")
        return 0
