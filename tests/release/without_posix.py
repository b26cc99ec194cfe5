"""Run as on Windows, as far as Linux can pretend: python without_posix.py [SCRIPT].

First everything is imported as usual, so that other packages are loaded for the system that there
is. Then modules and functions that Windows lacks are hidden, `msvcrt` is imitated with locks on
ranges of bytes, the package is imported again, and the script runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import pkgutil
import signal
import sys
import types
from importlib.abc import MetaPathFinder

HIDDEN_MODULES = {"fcntl", "grp", "pwd", "resource", "termios"}
HIDDEN_NAMES = {
    os: ("fork", "getuid", "geteuid", "nice", "pread", "pwrite", "register_at_fork", "sysconf"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2"),
}
MODULES_WITH_OTHER_DEMANDS = {"mbpa.adaptation.fused", "mbpa.memory.search_kernels"}  # Triton


class Hiding(MetaPathFinder):
    """Makes imports of hidden modules fail."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in HIDDEN_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def make_msvcrt() -> types.ModuleType:
    """Return a module with the function `locking` of Windows, whose locks exclude each other."""
    module = types.ModuleType("msvcrt")
    take, release = 2, 0

    def locking(descriptor: int, mode: int, count: int) -> None:
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        kind = fcntl.LOCK_UN if mode == release else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(descriptor, kind, count, place)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    vars(module).update(locking=locking, LK_NBLCK=take, LK_UNLCK=release)
    return module


def refuse_no_name(self: ctypes.CDLL, name: str | None, *rest: object, **named: object) -> None:
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    load(self, name, *rest, **named)  # type: ignore[arg-type]


load = ctypes.CDLL.__init__


def import_everything() -> int:
    """Import all modules of mbpa; return their number."""
    import mbpa

    names = [info.name for info in pkgutil.walk_packages(mbpa.__path__, "mbpa.")]
    wanted = [name for name in names if not name.startswith(tuple(MODULES_WITH_OTHER_DEMANDS))]
    for name in wanted:
        if not name.endswith("__main__"):
            with contextlib.suppress(mbpa.errors.MissingExtraError):  # avalanche, for one
                importlib.import_module(name)
    return len(wanted)


def main(script: str = "") -> None:
    count = import_everything()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mbpa"]:
        del sys.modules[name]
    for name in HIDDEN_MODULES:
        sys.modules.pop(name, None)
    for module, names in HIDDEN_NAMES.items():
        for name in names:
            delattr(module, name)
    sys.meta_path.insert(0, Hiding())
    sys.modules["msvcrt"] = make_msvcrt()
    ctypes.CDLL.__init__ = refuse_no_name  # type: ignore[assignment, method-assign]
    sys.platform = "win32"  # type: ignore[misc]
    assert import_everything() == count
    print(f"{count} modules", flush=True)
    exec(script, {"__name__": "__main__"})


if __name__ == "__main__":
    main(*sys.argv[1:])
