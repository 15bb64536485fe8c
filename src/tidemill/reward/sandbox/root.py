"""A root folder for sandboxed programs that holds Python, the system's libraries and a scratch folder in memory.

Landlock does not guard `stat`, `readlink` and `chdir`; in this root they find nothing else to look at. Where the kernel
allows no namespaces there is neither this root nor a scratch folder, and Landlock alone guards files.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable

from tidemill.reward.sandbox.files import DEVICES, READABLE, checked

SCRATCH = "/scratch"

FIRST_ID = 2_000_000_000  # users nobody has: a sandbox of root's runs as this plus its process's number
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC = 0x20000, 0x10000000, 0x40000000, 0x08000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
PYTHON = (sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), os.path.dirname(os.__file__), os.__file__)
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def make_root(libc: ctypes.CDLL, folder: str, size_mb: int, files: int) -> bool:
    """Move this process into namespaces of its own, with a new root made in `folder`. False where that is refused."""
    can_change = os.getuid() == 0 and are_open_to_all(PYTHON)
    user = own_namespaces(libc, FIRST_ID + os.getpid() if can_change else 0)
    if user is None:
        return False
    try:
        mount(libc, "none", "/", MS_REC | MS_PRIVATE)
        fill(libc, folder, size_mb, files, user)
        enter(libc, folder)
    except (OSError, KeyError):
        return False
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    return True


def are_open_to_all(paths: Iterable[str]) -> bool:
    """Whether any user may read them: root's own Python may be closed to the user that programs run as."""
    modes = [os.stat(path).st_mode for path in paths]
    return all(mode & 0o005 == 0o005 if stat.S_ISDIR(mode) else mode & 0o004 for mode in modes)


def own_namespaces(libc: ctypes.CDLL, user: int) -> int | None:
    """The user to become: `user` where root may do without a user namespace, 0 (this one) inside of one."""
    kinds = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC
    uid, gid = os.getuid(), os.getgid()
    if user and libc.unshare(kinds) == 0:
        return user
    if libc.unshare(kinds | CLONE_NEWUSER) != 0:
        return None
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return None
    return 0


def fill(libc: ctypes.CDLL, folder: str, size_mb: int, files: int, user: int) -> None:
    mount(libc, "tmpfs", folder, MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    shown: list[str] = []
    for path in sorted({p for name in (*READABLE, *DEVICES) for p in (name, os.path.realpath(name))}, key=len):
        if os.path.exists(path) and not any(path == s or path.startswith(f"{s}/") for s in shown):
            show(libc, path, folder + path)
            shown.append(path)
    if size_mb > 0:
        os.mkdir(folder + SCRATCH)
        options = f"size={size_mb}m,nr_inodes={files + 1},mode=700,uid={user},gid={user}"
        mount(libc, "tmpfs", folder + SCRATCH, MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def show(libc: ctypes.CDLL, path: str, at: str) -> None:
    """Bind a folder or a file of the machine into the new root."""
    if os.path.isdir(path):
        os.makedirs(at, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(at), exist_ok=True)
        os.close(os.open(at, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    mount(libc, path, at, MS_BIND | MS_REC)


def enter(libc: ctypes.CDLL, folder: str) -> None:
    """Make `folder` the root, take the machine's own root away, and let nobody write in the new one."""
    os.mkdir(f"{folder}/old")
    number = PIVOT_ROOT[os.uname().machine]
    checked(libc, libc.syscall(number, folder.encode(), f"{folder}/old".encode()), "pivot_root")
    os.chdir("/")
    checked(libc, libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    mount(libc, "none", "/", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def mount(libc: ctypes.CDLL, what: str, at: str, flags: int, options: str = "") -> None:
    kind = b"tmpfs" if what == "tmpfs" else None
    result = libc.mount(what.encode(), at.encode(), kind, ctypes.c_ulong(flags), options.encode() or None)
    checked(libc, result, f"mount {at}")


def clear(folder: int) -> None:
    """Delete everything in an open folder, by descriptors: a path longer than the kernel takes is no hiding place."""
    for name in os.listdir(folder):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            continue
        os.chmod(name, 0o700, dir_fd=folder)  # made without rights, it could not be opened
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            clear(inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)
