"""The seccomp filter: a small program the kernel runs at every system call of the sandboxed process."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from tidemill.reward.sandbox import syscalls

# Of the classic BPF machine: load a word of the call's record; jump if equal or if a bit is set; return.
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes, low word first

CLONE_THREAD = 0x10000
HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes waiting, flags
HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 1030)  # duplicate, flags
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def program(pid: int) -> list[Instruction]:
    """The filter for a process that may signal only itself."""
    column, arch = syscalls.ARCHITECTURES[os.uname().machine]
    steps: list[Instruction] = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for numbers in syscalls.PLAIN.values():
        if numbers[column] is not None:
            steps += [(EQUAL, 0, 1, numbers[column] or 0), (RETURN, 0, 0, ALLOW)]
    for numbers in syscalls.NOT_IMPLEMENTED.values():
        steps += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    steps += only_if(syscalls.CLONE[column], argument=0, code=ANY_BIT, values=(CLONE_THREAD,))
    steps += only_if(syscalls.IOCTL[column], argument=1, code=EQUAL, values=HARMLESS_IOCTLS)
    steps += only_if(syscalls.FCNTL[column], argument=1, code=EQUAL, values=HARMLESS_FCNTLS)
    steps += only_if(syscalls.PRLIMIT64[column], argument=0, code=EQUAL, values=(0, pid))
    steps += only_if(syscalls.TGKILL[column], argument=0, code=EQUAL, values=(pid,))
    return [*steps, (RETURN, 0, 0, ERRNO | errno.EPERM)]


def only_if(number: int, argument: int, code: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow the call when one of the tests on an argument holds."""
    tests: list[Instruction] = [(LOAD, 0, 0, FIRST_ARGUMENT + 8 * argument)]
    for value in values:
        tests += [(code, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    tests.append((RETURN, 0, 0, ERRNO | errno.EPERM))
    return [(EQUAL, 0, len(tests), number), *tests]


def install(libc: ctypes.CDLL, pid: int) -> None:
    """From here on, for this process and without return."""
    steps = program(pid)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
