"""Sandbox: code that nobody has read, run in one process without network, with no files but its own, under limits.

One sandbox runs one program at a time; use several for more.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from tidemill.errors import TidemillError
from tidemill.reward.sandbox.checks import read
from tidemill.reward.sandbox.limits import Result, SandboxLimits
from tidemill.reward.wire import JsonSocket

GRACE_S = 5.0  # beyond the program's own wall limit, before the zygote itself counts as stuck
START_S = 60.0


class SandboxError(TidemillError):
    """Code cannot be run safely on this machine."""


class Sandbox:
    """Starts its process with the first program, and again after anything went wrong with it."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.has_scratch = False  # known once started
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: JsonSocket | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

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
        return Result(**message, passed=sum(check.is_met(answer) for check, answer in zip(asked, answers)))

    def _start(self) -> JsonSocket:
        if sys.platform != "linux":
            raise SandboxError("code can be run safely only on Linux", "use another reward here")
        self._folder = tempfile.TemporaryDirectory(prefix="tidemill-sandbox-", ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair()
        source = str(Path(__file__).resolve().parents[3])
        begin = (
            f"import sys; sys.path.insert(0, {source!r}); from tidemill.reward.sandbox import zygote; "
            f"zygote.main({theirs.fileno()}, {self._folder.name!r}, {source!r})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", begin],
                pass_fds=[theirs.fileno()],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._wire = JsonSocket(ours)
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
        return self._wire

    def close(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
