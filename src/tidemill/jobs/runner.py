"""Attempts as processes of this machine: each in a folder, under a keeper that outlives the queue."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

from tidemill.jobs import keeper
from tidemill.jobs.state import Job

Outcome = int | Literal["running", "lost", "not begun"]


class Runner(Protocol):
    def start(self, job: Job) -> None: ...

    def look(self, job: Job) -> Outcome: ...

    def ask(self, job: Job) -> bool:
        """Ask a running attempt to save and end; whether it was there to hear it."""
        ...

    def kill(self, job: Job) -> None: ...


class Processes:
    """`visible` names the environment variable that says which devices a process may see: its slots."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None, visible: str = "TIDEMILL_SLOTS") -> None:
        self._folder, self._env, self._visible = folder, dict(env or {}), visible
        self._keepers: dict[Path, subprocess.Popen[bytes]] = {}

    def attempt(self, job: Job) -> Path:
        return self._folder / f"{job.id}.{job.attempt}"

    def start(self, job: Job) -> None:
        """Start a keeper. If an earlier queue started one too, one of them begins and the other leaves."""
        folder = self.attempt(job)
        folder.mkdir(parents=True, exist_ok=True)
        spec = job.spec
        slots = {self._visible: ",".join(map(str, job.slots))}
        plain = {"command": list(spec.command), "folder": spec.folder, "env": {**self._env, **slots, **spec.env}}
        keeper.write(folder / "spec.json", json.dumps(plain))
        self._keepers[folder] = subprocess.Popen(
            [sys.executable, "-I", keeper.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def look(self, job: Job) -> Outcome:
        folder = self.attempt(job)
        own = self._keepers.get(folder)
        if own is not None and own.poll() is None:
            return "running"
        if _is_locked(folder / "lock"):  # before the files are looked at: they are final once it is free
            return "running"
        if (folder / "exit").exists():
            self._keepers.pop(folder, None)
            return int((folder / "exit").read_text(encoding="utf-8"))
        if (folder / "started").exists():
            self.kill(job)  # what the dead keeper left
            return "lost"
        return "not begun"

    def ask(self, job: Job) -> bool:
        folder = self.attempt(job)
        if not _is_locked(folder / "lock") or not (folder / "started").exists():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "started").read_text(encoding="utf-8")), signal.SIGTERM)
        return True

    def kill(self, job: Job) -> None:
        """Kill the attempt's processes; its keeper, if it lives, writes how it ended."""
        for pid in marked(self.attempt(job)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(folder: Path) -> Iterator[int]:
    """The processes of an attempt, wherever they went: they carry its name in their environment."""
    mark = f"{keeper.ENV_JOB}={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
