"""One writer per run folder. The kernel drops the lock when its holder dies, so a killed run never blocks a resume."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tidemill.errors import TidemillError


class RunLocked(TidemillError):
    """Another process writes this run."""


@dataclass(slots=True)
class Lock:
    path: Path
    handle: int

    @classmethod
    def take(cls, path: Path) -> Lock:
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                holder = _holder(path)
                if _is_alive(holder):
                    raise _locked(path, holder) from None
                # The holder died but a process it forked still has the lock open: leave that one the old file.
                path.unlink(missing_ok=True)
                continue
            if not _is_same_file(handle, path):  # taken over by another in between
                os.close(handle)
                continue
            me = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now().isoformat(timespec="seconds"),
            }
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(me).encode(), 0)
            return cls(path, handle)

    def release(self) -> None:
        if self.handle < 0:
            return
        self.path.unlink(missing_ok=True)
        os.close(self.handle)
        self.handle = -1


def is_held(path: Path) -> bool:
    """Whether a process writes the run, as far as can be seen from here; takes and changes nothing."""
    holder = _holder(path)
    return bool(holder) and _is_alive(holder)


def _holder(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """In doubt (another host, or a holder that has not written its name yet) it is."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return True
    return lives(holder["pid"])


def lives(pid: int) -> bool:
    """Whether there is such a process on this machine, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _locked(path: Path, holder: dict[str, Any]) -> RunLocked:
    who = f"process {holder['pid']} on {holder['host']} since {holder['since']}" if holder else "another process"
    return RunLocked(f"{path.parent} is being written by {who}", "wait for it, stop it, or train under another name")
