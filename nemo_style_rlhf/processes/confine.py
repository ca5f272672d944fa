"""Runs a program so that no other user can open its files and shared memory: ``python confine.py PROGRAM ARGUMENTS``.

Triton's Python backend creates its segments in /dev/shm with the umask applied, then makes them readable for everybody with
``fchmod`` (Boost's ``shared_memory_object``). A seccomp filter makes that call fail with EPERM, and the backend ignores this.

This file imports only the standard library, since it is run by its path.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH constant by machine, from linux/audit.h."""
FCHMOD = {"x86_64": 91, "aarch64": 52}
# From linux/bpf_common.h and linux/seccomp.h.
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16
ALLOW, FAIL_WITH, KILL = 0x7FFF0000, 0x00050000, 0x80000000
X32_CALLS = 0x40000000
"""System call numbers from here on belong to x86_64's second set of calls (x32)."""


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refusing(machine: str, calls: dict[int, int], *, without_flag: tuple[int, int] | None = None) -> bytes:
    """A seccomp filter, as an array of ``struct sock_filter``.

    Args:
        machine: a key of ``ARCHITECTURE``. A 64-bit kernel also offers calls of other architectures; these kill the process.
        calls: errno with which a system call fails, by its number.
        without_flag: number of a system call and a bit. The call fails with EPERM if its first argument lacks this bit.
    """
    instructions = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_IF_EQUAL, 1, 0, ARCHITECTURE[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD_WORD, 0, 0, NUMBER_OFFSET),
        (JUMP_IF_AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, FAIL_WITH | errno.ENOSYS),
    ]
    for number, error in calls.items():
        instructions += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL_WITH | error)]
    if without_flag is not None:
        number, flag = without_flag
        instructions += [(JUMP_IF_EQUAL, 0, 3, number), (LOAD_WORD, 0, 0, FIRST_ARGUMENT_OFFSET)]
        instructions += [(JUMP_IF_ANY_BIT, 1, 0, flag), (RETURN, 0, 0, FAIL_WITH | errno.EPERM)]
    instructions.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def refuse_fchmod() -> bool:
    """Make ``fchmod`` fail with EPERM in this process and its children from now on. Returns False if that is impossible."""
    if platform.machine() not in FCHMOD or sys.maxsize < 2**32:
        return False
    instructions = refusing(platform.machine(), {FCHMOD[platform.machine()]: errno.EPERM})
    program = _Program(len(instructions) // 8, instructions)
    return _prctl(PR_SET_NO_NEW_PRIVS, 1) and _prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.cast(ctypes.pointer(program), ctypes.c_void_p).value or 0
    )


def _prctl(option: int, first: int, second: int = 0) -> bool:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return bool(prctl(option, first, second, 0, 0) == 0)


def main() -> None:
    """Become the program."""
    os.umask(0o077)
    refuse_fchmod()
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
