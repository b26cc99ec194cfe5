"""Watch the system calls of a child process and make them fail, without a compiler.

Linux passes a call named by a seccomp filter to a supervisor, which lets it pass or answers in the
kernel's place (``SECCOMP_RET_USER_NOTIF``, Linux 5.5; no privileges needed). All code that writes
in the child, including SQLite's C code, sees real failures as on a failing disk. Standard library
only, so that it also works in processes started with ``python -I -S``.
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
from typing import BinaryIO

_NUMBERS = {
    "x86_64": {
        "write": 1, "open": 2, "pwrite64": 18, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
        "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87, "openat": 257, "mkdirat": 258,
        "unlinkat": 263, "renameat": 264, "fallocate": 285, "renameat2": 316,
    },
    "aarch64": {
        "mkdirat": 34, "unlinkat": 35, "renameat": 38, "ftruncate": 46, "fallocate": 47,
        "openat": 56, "write": 64, "pwrite64": 68, "fsync": 82, "fdatasync": 83, "renameat2": 276,
    },
}.get(platform.machine(), {})  # fmt: skip
_NAMES = {number: name for name, number in _NUMBERS.items()}
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine(), 0)
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # the same on every machine
_WORKING_DIRECTORY = 0xFFFFFF9C  # AT_FDCWD in 32 bits
KILL, SHORT = -1, -2  # verdicts


@dataclass(frozen=True)
class Call:
    """A call that changes files: its name, the path, and the data that it writes."""

    name: str
    path: str
    offset: int = 0
    """Offset of a write, or the new size of a truncated file."""
    data: bytes = b""
    other: str = ""
    """Second path of a rename or an exchange."""
    cuts: bool = False
    """Whether opening truncates the file."""


Verdict = int | None
"""`None` lets the call pass, an errno fails it; `KILL` kills the process before the call, `SHORT`
performs only half of a write."""


def supervise(child: Callable[[int], None], verdict: Callable[[Call], Verdict]) -> bytes:
    """Run ``child(report)`` in a forked process; return what it wrote to ``report``.

    Writes to ``report`` are also passed to ``verdict``, as calls named "report".
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
    """Return whether this works here; it needs Linux, and some containers forbid filters."""
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
                poll.unregister(listener)  # the process is gone; its output may still be read
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
            try:
                call = _describe(pid, _NAMES[number], arguments, report)
            except OSError:
                continue  # the process died meanwhile
            answer = None if call is None else verdict(call)
            if answer == KILL:
                os.kill(pid, signal.SIGKILL)
                continue
            value = 0
            if answer == SHORT:
                assert call is not None
                value, answer = _write_half(pid, _NAMES[number], arguments, call), None
            flags = _CONTINUE if not answer and not value else 0
            response = struct.pack("Qqii", identity, value, -(answer or 0), flags)
            try:
                fcntl.ioctl(listener, _SEND, response)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise


def _write_half(pid: int, name: str, arguments: list[int], call: Call) -> int:
    """Perform half of a write in place of the process; return its size, 0 if there is no half."""
    half = call.data[: len(call.data) // 2]
    if call.name != "write" or not half:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    process = libc.syscall(_PIDFD_OPEN, pid, 0)
    file = libc.syscall(_PIDFD_GETFD, process, int(arguments[0]), 0)
    os.close(process)
    if file < 0:
        raise OSError(ctypes.get_errno(), "no descriptor of another process")
    try:
        return os.pwrite(file, half, call.offset) if name == "pwrite64" else os.write(file, half)
    finally:
        os.close(file)


def _describe(pid: int, name: str, arguments: list[int], report: int) -> Call | None:
    """Return the call as a `Call`; `None` if it changes nothing."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        if name.startswith("rename"):
            first, second = (0, 1) if name == "rename" else (1, 3)
            one, other = (_path(pid, memory, name, arguments, at) for at in (first, second))
            is_exchange = name == "renameat2" and arguments[4] & 2
            return Call("exchange" if is_exchange else "rename", one, other=other)
        if name in ("open", "openat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"):
            at = 1 if name.endswith("at") else 0
            flags = arguments[at + 1]
            if name.startswith("open") and not flags & (os.O_CREAT | os.O_TRUNC):
                return None
            path = _path(pid, memory, name, arguments, at)
            cuts = name.startswith("open") and bool(flags & os.O_TRUNC)
            return Call("unlink" if name == "rmdir" else name.removesuffix("at"), path, cuts=cuts)
        path = os.readlink(f"/proc/{pid}/fd/{arguments[0]}")
        if name in ("write", "pwrite64"):
            memory.seek(arguments[1])
            data = memory.read(arguments[2])
            if arguments[0] == report:
                return Call("report", "", data=data)
            offset = arguments[3] if name == "pwrite64" else _position(pid, arguments[0])
            return Call("write", path, offset, data)
        if name == "ftruncate":
            return Call("truncate", path, arguments[1])
        return Call("sync" if "sync" in name else name, path)


def _path(pid: int, memory: BinaryIO, name: str, arguments: list[int], at: int) -> str:
    """Return the absolute path that an argument points to."""
    memory.seek(arguments[at])
    text = os.fsdecode(memory.read(1024).split(b"\0")[0])
    if os.path.isabs(text):
        return text
    base = arguments[at - 1] & 0xFFFFFFFF if at and "at" in name else _WORKING_DIRECTORY
    where = "cwd" if base == _WORKING_DIRECTORY else f"fd/{base}"
    return os.path.join(os.readlink(f"/proc/{pid}/{where}"), text)


def _position(pid: int, descriptor: int) -> int:
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}") as info:
            return int(info.readline().split()[1])
    except (OSError, IndexError, ValueError):  # a pipe
        return 0


def _install_filter() -> int:
    """Install the filter in this process; return the descriptor for its supervisor."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the system call number
    for i, number in enumerate(_NUMBERS.values()):
        steps.append(struct.pack("HBBI", 0x15, len(_NUMBERS) - i, 0, number))  # equal: last step
    steps.append(struct.pack("HBBI", 0x06, 0, 0, _ALLOW))
    steps.append(struct.pack("HBBI", 0x06, 0, 0, _NOTIFY))
    code = ctypes.create_string_buffer(b"".join(steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    listener = libc.syscall(_SECCOMP, 1, 8, program)  # SET_MODE_FILTER, FLAG_NEW_LISTENER
    if listener < 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter")
    return int(listener)
