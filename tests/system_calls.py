"""System calls of a child process, watched and made to fail: real failures without a compiler.

Linux hands a call that a seccomp filter names to a supervisor, which lets it pass or answers in
the kernel's place (``SECCOMP_RET_USER_NOTIF``, Linux 5.5; no privileges needed). Whatever writes in
the child, SQLite's C code included, is seen as it would be on a failing disk. Standard library
only, so that it also serves processes started with ``python -I -S``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

_NUMBERS = {
    "x86_64": {
        "write": 1, "open": 2, "pwrite64": 18, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
        "mkdir": 83, "unlink": 87, "openat": 257, "unlinkat": 263, "fallocate": 285,
    },
    "aarch64": {
        "mkdirat": 34, "unlinkat": 35, "ftruncate": 46, "fallocate": 47, "openat": 56,
        "write": 64, "pwrite64": 68, "fsync": 82, "fdatasync": 83,
    },
}.get(platform.machine(), {})  # fmt: skip
_NAMES = {number: name for name, number in _NUMBERS.items()}
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine(), 0)
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1


@dataclass(frozen=True)
class Call:
    """A call that changes files: what it is, of which file, and what it writes there."""

    name: str
    path: str
    offset: int = 0
    data: bytes = b""


Verdict = int | None
"""None lets the call pass, an errno fails it, −1 kills the process before it."""


def supervise(child: Callable[[int], None], verdict: Callable[[Call], Verdict]) -> bytes:
    """Run ``child(report)`` in a forked process; returns what it wrote to ``report``.

    Writes to ``report`` are also shown to ``verdict``, as calls named "report".
    """
    ours, theirs = socket.socketpair()
    read, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            os.close(read)
            listener = _install_filter()
            socket.send_fds(theirs, [b"!"], [listener])
            os.close(listener)
            child(report)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    os.close(report)
    with open(read, "rb", buffering=0) as output, ours:
        try:
            _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
            with open(listener, "rb", buffering=0):
                return _answer(pid, listener, output.fileno(), report, verdict)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def available() -> bool:
    """Whether this machine can: not where containers forbid filters, nor outside Linux."""
    if sys.platform != "linux" or not _NUMBERS:
        return False
    try:
        return supervise(lambda report: os.write(report, b"yes") and None, lambda _: None) == b"yes"
    except (OSError, ValueError):
        return False


def _answer(
    pid: int, listener: int, read: int, report: int, verdict: Callable[[Call], Verdict]
) -> bytes:
    poll, output = select.poll(), b""
    poll.register(listener, select.POLLIN)
    poll.register(read, select.POLLIN)
    while True:
        for descriptor, events in poll.poll():
            if descriptor == read:
                chunk = os.read(read, 1 << 16)
                if not chunk:
                    return output
                output += chunk
                continue
            if not events & select.POLLIN:
                poll.unregister(listener)  # the process is gone; what it wrote may still be read
                continue
            notice = bytearray(80)
            try:
                fcntl.ioctl(listener, _RECEIVE, notice)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EINTR):
                    raise
                continue  # the process died meanwhile
            (identity,) = struct.unpack_from("Q", notice)
            number, *arguments = struct.unpack_from("i12x6Q", notice, 16)
            call = _described(pid, _NAMES[number], arguments, report)
            answer = None if call is None else verdict(call)
            if answer == -1:
                os.kill(pid, signal.SIGKILL)
                continue
            response = struct.pack("Qqii", identity, 0, -(answer or 0), 0 if answer else _CONTINUE)
            fcntl.ioctl(listener, _SEND, response)


def _described(pid: int, name: str, arguments: list[int], report: int) -> Call | None:
    """None for calls that change nothing."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        if name in ("open", "openat", "unlink", "unlinkat", "mkdir", "mkdirat"):
            at = 1 if name.endswith("at") else 0
            if name.startswith("open") and not arguments[at + 1] & os.O_CREAT:
                return None
            memory.seek(arguments[at])
            text = memory.read(256).split(b"\0")[0]
            return Call(name.removesuffix("at"), os.fsdecode(text))
        path = os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
        if name in ("write", "pwrite64"):
            memory.seek(arguments[1])
            data = memory.read(arguments[2])
            if arguments[0] == report:
                return Call("report", "", data=data)
            return Call("write", path, arguments[3] if name == "pwrite64" else 0, data)
        if name == "ftruncate":
            return Call("truncate", path, arguments[1])
        return Call("sync" if "sync" in name else name, path)


def _install_filter() -> int:
    """For this process from now on; returns the descriptor that its supervisor listens at."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the number of the call
    for i, number in enumerate(_NUMBERS.values()):
        steps.append(struct.pack("HBBI", 0x15, len(_NUMBERS) - i, 0, number))  # equal: to the last
    steps.append(struct.pack("HBBI", 0x06, 0, 0, _ALLOW))
    steps.append(struct.pack("HBBI", 0x06, 0, 0, _NOTIFY))
    code = ctypes.create_string_buffer(b"".join(steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    listener = libc.syscall(_SECCOMP, 1, 8, program)  # SET_MODE_FILTER, FLAG_NEW_LISTENER
    if listener < 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter")
    return int(listener)
