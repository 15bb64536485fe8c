"""Landlock: a sandboxed program reads Python's own files, writes in its scratch folder, and opens nothing else."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
PATH_BENEATH, VERSION_FLAG = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_SOCK, MAKE_CHAR, MAKE_FIFO, MAKE_BLOCK = 1 << 9, 1 << 6, 1 << 10, 1 << 11
READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many access bits that version knows

PR_SET_NO_NEW_PRIVS = 38

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
READABLE = (sys.prefix, sys.base_prefix, sys.exec_prefix, *LIBRARIES)


def landlock_version(libc: ctypes.CDLL) -> int:
    return int(libc.syscall(LANDLOCK_CREATE, None, 0, VERSION_FLAG))


def restrict(libc: ctypes.CDLL, scratch: str | None) -> None:
    """Landlock: read Python and the system's libraries, write in the scratch folder, nothing else. Cannot be undone."""
    version = landlock_version(libc)
    known = (1 << RIGHTS_OF_VERSION.get(version, 16)) - 1
    attributes = [known]
    if version >= 4:
        attributes.append(0b11)  # binding and connecting TCP sockets
    if version >= 6:
        attributes.append(0b11)  # abstract sockets of, and signals to, processes outside
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = checked(libc, libc.syscall(LANDLOCK_CREATE, packed, len(packed), 0), "landlock")
    for path in set(READABLE):
        allow(libc, ruleset, path, READ)
    for path in DEVICES:
        allow(libc, ruleset, path, READ_FILE | WRITE_FILE)
    if scratch is not None:
        allow(libc, ruleset, scratch, known & ~(EXECUTE | MAKE_SOCK | MAKE_CHAR | MAKE_FIFO | MAKE_BLOCK))
    checked(libc, libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    checked(libc, libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        rights &= READ_FILE | WRITE_FILE | EXECUTE
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, handle)
    checked(libc, libc.syscall(LANDLOCK_ADD, ruleset, PATH_BENEATH, rule, 0), f"landlock {path}")
    os.close(handle)


def checked(libc: ctypes.CDLL, result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return int(result)
