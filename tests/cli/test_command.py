"""The command while the package is still being imported."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

STARTED = "import mbpa_command, sys; print('here', flush=True); sys.exit(mbpa_command.main())"


@pytest.mark.parametrize("seconds", [0.0, 0.4])
def test_an_interrupt_prints_one_line_even_while_torch_is_imported(seconds: float) -> None:
    command = [sys.executable, "-c", STARTED, "serve", "nowhere"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(0.05 + seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert (process.returncode, said) == (130, "mbpa: interrupted\n")
