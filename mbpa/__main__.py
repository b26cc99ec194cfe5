"""`python -m mbpa`: the command line."""

import sys

from mbpa.cli import main

sys.exit(main())
