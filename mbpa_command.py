"""Entry point of the command `mbpa`, which reports an interrupt in one line, even during imports.

It lies outside the package, whose import takes seconds and must not begin before the signal handler
is set.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Import the command line, then run it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:  # not ignored, as it is under nohup
        signal.signal(signal.SIGINT, _end)
    from mbpa.cli import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _end(number: int, frame: FrameType | None) -> None:
    """End the process at once: there is nothing to lose yet, and imports may swallow exceptions."""
    os.write(2, b"mbpa: interrupted\n")
    os._exit(130)
