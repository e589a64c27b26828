"""Starts a program under a kernel that refuses some system calls, as the filters of container runtimes do.

As a script: ``python tests/seccomp.py memfd_create=EPERM pidfd_open=ENOSYS -- PROGRAM ...``. ``prctl.36=EINVAL``
refuses only calls whose first argument is 36.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16
_CALLS = {  # by machine, AUDIT_ARCH and the numbers of asm/unistd.h
    "x86_64": (
        0xC000003E,
        {
            "memfd_create": 319,
            "pidfd_open": 434,
            "pidfd_send_signal": 424,
            "prctl": 157,
            "sched_getaffinity": 204,
            "setpgid": 109,
            "waitid": 247,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "memfd_create": 279,
            "pidfd_open": 434,
            "pidfd_send_signal": 424,
            "prctl": 167,
            "sched_getaffinity": 123,
            "setpgid": 154,
            "waitid": 95,
        },
    ),
}


def refusing(*calls: str) -> list[str]:
    """Return the words to put before a command: it and its children run where these calls fail.

    Args:
        calls: Such as ``memfd_create=EPERM`` or ``prctl.36=EINVAL``.
    """
    return [sys.executable, __file__, *calls, "--"]


def refuse(calls: Sequence[str]) -> None:
    """Have the kernel refuse these calls of this process and its children from now on."""
    architecture, numbers = _CALLS[platform.machine()]
    program = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for call in calls:
        name, _, error = call.partition("=")
        name, _, argument = name.partition(".")
        program += [(_LOAD, 0, 0, _AT_NUMBER), (_IF_EQUAL, 0, 3 if argument else 1, numbers[name])]
        if argument:
            program += [(_LOAD, 0, 0, _AT_FIRST_ARGUMENT), (_IF_EQUAL, 0, 1, int(argument))]
        program.append((_RETURN, 0, 0, _ERRNO | getattr(errno, error)))
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    about = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), None),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), about),
    ):
        if libc.prctl(option, *arguments, None, None):
            raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    end = sys.argv.index("--")
    refuse(sys.argv[1:end])
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
