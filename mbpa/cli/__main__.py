"""`python -m mbpa.cli` is the command `mbpa`."""

from __future__ import annotations

import sys

from mbpa.cli import main

if __name__ == "__main__":
    sys.exit(main())
