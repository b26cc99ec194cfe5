"""The small runs of the tests; the tests are not a package, so the module is loaded by path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_path = Path(__file__).parents[2] / "tests" / "runs.py"
_spec = importlib.util.spec_from_file_location("mbpa_test_runs", _path)
assert _spec is not None
assert _spec.loader is not None
_runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_runs)

BrightnessEncoder: Any = _runs.BrightnessEncoder
WordEncoder: Any = _runs.WordEncoder
plain_picture: Any = _runs.plain_picture
random_keys: Any = _runs.random_keys
write_picture_run: Any = _runs.write_picture_run
write_random_run: Any = _runs.write_random_run
write_word_run: Any = _runs.write_word_run
