"""Entry point of `python -m mbpa.cli`, which is the same as the command `mbpa`."""

from __future__ import annotations

import sys

from mbpa.cli import main

if __name__ == "__main__":
    sys.exit(main())
