"""What the processes of a run listen on, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

LISTENS = "0A"  # the state of a TCP socket
ACCEPTS = 0x10000  # the flag of a Unix one


@dataclass(frozen=True, order=True)
class Listener:
    process: str
    kind: str  # tcp or unix
    place: str  # address and port, or path; an abstract name begins with @


@dataclass(frozen=True)
class Row:
    """One line of the table in docs/security.md."""

    process: str
    kind: str
    place: str  # a pattern
    opened_with: str

    def covers(self, found: Listener) -> bool:
        return (self.process, self.kind) == (found.process, found.kind) and fnmatch(found.place, self.place)


def table(page: Path) -> list[Row]:
    lines = re.findall(r"^\| (\w[\w ]*) \| (tcp|unix) \| `([^`]+)` \| ([^|]+) \|", page.read_text(), re.MULTILINE)
    return [Row(process, kind, place, opened_with.strip()) for process, kind, place, opened_with in lines]


def files(page: Path) -> dict[str, int]:
    """Pattern → mode, of the page's other table."""
    found = re.findall(r"^\| `([^`]+)` \| (0[0-7]{3}) \|", page.read_text(), re.MULTILINE)
    return {path: int(mode, 8) for path, mode in found}


def opened_by_descendants(root: int, under: Sequence[Path]) -> set[Path]:
    """First entries in these folders that hold a file which a process that comes from `root` has open or mapped."""
    found: set[str] = set()
    for pid in _descendants(root, ""):
        with contextlib.suppress(OSError):
            found |= set(
                re.findall(r"^\S+ \S+ \S+ \S+ \d+ +(/.*)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
            )
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(file))
    paths = [Path(name) for name in found if name.startswith("/") and not name.endswith("(deleted)")]
    return {folder / path.relative_to(folder).parts[0] for folder in under for path in paths if folder in path.parents}


def of_descendants(root: int, name: str = "driver") -> set[Listener]:
    """Of all processes that come from `root`, and of itself, which is called `name`."""
    opened = dict(_tcp()) | dict(_unix())
    return {
        Listener(name, *opened[inode])
        for pid, name in _descendants(root, name).items()
        for inode in _sockets(pid)
        if inode in opened
    }


def _descendants(root: int, name: str) -> dict[int, str]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, news = {root: name}, [root]
    while news:
        parent = news.pop()
        for pid in [p for p, its in parents.items() if its == parent]:
            found[pid] = _name(pid, found[parent])
            news.append(pid)
    return found


def _name(pid: int, parent: str) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "forkserver import listen" in " ".join(words):
            return "worker" if parent in ("fork server", "worker") else "fork server"
        if "multiprocessing.forkserver" in " ".join(words):
            return "ranks"
        for kind in ("ledger", "warehouse"):
            if kind in words and "tidemill" in " ".join(words):
                return kind
        for sign, name in (("gcs_server", "ray"), ("raylet", "ray"), ("ray/", "ray"), ("ray::", "ray")):
            if sign in " ".join(words):
                return name
    return parent


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                    yield found[1]


def _tcp() -> Iterator[tuple[str, tuple[str, str]]]:
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS:
                host, _, port = words[1].partition(":")
                packed = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
                yield words[9], ("tcp", f"{socket.inet_ntop(family, packed)}:{int(port, 16)}")


def _unix() -> Iterator[tuple[str, tuple[str, str]]]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & ACCEPTS:
            yield words[6], ("unix", words[7] if len(words) > 7 else "")
