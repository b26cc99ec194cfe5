"""The command `mbpa`: an interrupt is one line, even while torch is still being imported.

Outside the package, whose own import takes seconds and must not begin before this.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Import the command line, then run it."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, _end)
    from mbpa.cli import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _end(number: int, frame: FrameType | None) -> None:
    """At once: there is nothing to lose yet, and imports catch what they should not."""
    os.write(2, b"mbpa: interrupted\n")
    os._exit(130)
