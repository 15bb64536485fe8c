"""Sandbox: code that nobody has read, run in one process without network, with no files but its own, under limits.

One sandbox runs one program at a time; use several for more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tidemill.errors import TidemillError
from tidemill.reward.sandbox.checks import read
from tidemill.reward.sandbox.limits import Result, SandboxLimits
from tidemill.reward.workers.wire import JsonSocket

GRACE_S = 5.0  # beyond the program's own wall limit, before the zygote itself counts as stuck
START_S = 60.0


class SandboxError(TidemillError):
    """Code cannot be run safely on this machine."""


class Sandbox:
    """Starts its process with the first program, and again after anything went wrong with it."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.has_scratch = False  # known once started
        self._wire: JsonSocket | None = None
        self._end: Callable[[], Any] = lambda: None  # ends the process; called by close, or when Python exits

    def run(self, code: str, checks: Sequence[str] = (), input: str = "") -> Result:
        """Run a program, then count which of `checks` (statements, such as asserts) hold in its namespace."""
        wire = self._wire or self._start()
        asked = [read(check) for check in checks]
        try:
            wire.send({"code": code, "checks": [check.plain() for check in asked], "input": input})
            message = wire.receive(self.limits.wall_s + GRACE_S)
        except (EOFError, OSError):
            message = None
        if message is None:
            self.close()
            return Result("killed", "the sandbox's own process was lost")
        answers = message.pop("answers")
        if not message.pop("is_clean"):
            self.close()  # the next program gets a sandbox in which nothing is left of this one
        return Result(**message, passed=sum(check.is_met(answer) for check, answer in zip(asked, answers)))

    def turn(self, code: str) -> tuple[Result, bool]:
        """Run a piece of a program that goes on from the pieces before; and whether it began anew, because there were
        none or a limit had ended it. `status` is ok, failed (it raised), timeout, output or killed."""
        wire = self._wire or self._start()
        try:
            wire.send({"turn": code})
            message = wire.receive(self.limits.wall_s + GRACE_S)
        except (EOFError, OSError):
            message = None
        if message is None:
            self.close()
            return Result("killed", "the sandbox's own process was lost"), True
        is_new = bool(message.pop("is_new"))
        return Result(**message), is_new

    def forget(self) -> None:
        """End the program that is told turn by turn; nothing of it is left for the next one."""
        if self._wire is None:
            return
        try:
            self._wire.send({"forget": True})
            message = self._wire.receive(GRACE_S)
        except (EOFError, OSError):
            message = None
        if message is None or not message["is_clean"]:
            self.close()

    def _start(self) -> JsonSocket:
        if sys.platform != "linux":
            raise SandboxError("code can be run safely only on Linux", "use another reward here")
        folder = tempfile.mkdtemp(prefix="tidemill-sandbox-")
        ours, theirs = socket.socketpair()
        source = str(Path(__file__).resolve().parents[3])
        begin = (
            f"import sys; sys.path.insert(0, {source!r}); from tidemill.reward.sandbox import zygote; "
            f"zygote.main({theirs.fileno()}, {folder!r}, {source!r})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", begin],
                pass_fds=[theirs.fileno()],
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # numpy would start a thread per core
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for the run, which ends its sandboxes itself
            )
        self._wire = JsonSocket(ours)
        self._end = weakref.finalize(self, end, process, self._wire, folder)
        try:
            self._wire.send(asdict(self.limits))
            message = self._wire.receive(START_S)
        except (EOFError, OSError):
            message = None
        if message is None or "failed" in message:
            self.close()
            why = "its process did not start" if message is None else message["failed"]
            raise SandboxError(f"code cannot be run safely on this machine: {why}", "use another reward here")
        self.has_scratch = bool(message["scratch"])
        with contextlib.suppress(OSError):  # its root lies in memory, and is no longer reached by this name
            os.rmdir(folder)
        return self._wire

    def close(self) -> None:
        self._end()
        self._wire = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def end(process: subprocess.Popen[bytes], wire: JsonSocket, folder: str) -> None:
    process.kill()
    process.wait()
    wire.close()
    shutil.rmtree(folder, ignore_errors=True)
