"""Programs in processes of their own: started, watched, ended, from any thread."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.environment.interpreter import command
from tidemill.errors import PlayError
from tidemill.recipe.config import EnvironmentSettings
from tidemill.reward.workers.wire import JsonSocket

START_S = 120.0  # an agent framework's import can take long on a crowded machine


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: its value, or what went wrong."""

    name: str
    value: Any = None
    error: str | None = None


class Programs:
    """Copies of one zygote. `on_done` is called in a thread of ours when a program has ended."""

    def __init__(
        self, settings: EnvironmentSettings, on_done: Callable[[], None], variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables`: of the environment that every program finds."""
        self.settings, self.on_done, self.variables = settings, on_done, dict(variables or {})
        self.program, self.evaluator = str(settings.program), settings.evaluator
        self.done: deque[Outcome] = deque()
        self._under_way: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: JsonSocket | None = None
        self._lock = threading.Lock()

    def start(self, name: str, base_url: str, api_key: str, task: Mapping[str, Any]) -> None:
        wire = self._wire or self._begin()
        variables = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": "policy",
            "TIDEMILL_TASK": str(task.get("prompt", ""))[:4096],
        }
        self._under_way.add(name)
        told = {"start": name, "base_url": base_url, "api_key": api_key, "task": task}
        self._send(wire, {**told, "variables": variables})

    def kill(self, name: str) -> None:
        if self._wire is not None:
            self._send(self._wire, {"kill": name})

    def _send(self, wire: JsonSocket, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                wire.send(message)
        except OSError:
            self._lost(wire)

    def _begin(self) -> JsonSocket:
        ours, theirs = socket.socketpair()
        call = f"main({theirs.fileno()}, {self.program!r}, {self.evaluator!r}, {dict(self.settings.args)!r})"
        with theirs:
            self._process = subprocess.Popen(
                command(self.settings.python, "tidemill.serve.programs.zygote", call),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )
        wire = JsonSocket(ours)
        try:
            message = wire.receive(START_S)
        except (EOFError, OSError):
            message = None
        if message is None or "failed" in message:
            self.close()
            why = f"did not start within {START_S:g} s" if message is None else message["failed"]
            raise PlayError(f"environment.program={self.program}: {why}", "mend the program")
        self._wire = wire
        threading.Thread(target=self._read, args=(wire,), name="programs", daemon=True).start()
        return wire

    def _read(self, wire: JsonSocket) -> None:
        try:
            while True:
                message = wire.receive()
                self._under_way.discard(message["done"])
                self.done.append(_outcome(message))
                self.on_done()
        except (EOFError, OSError):
            self._lost(wire)

    def _lost(self, wire: JsonSocket) -> None:
        """The zygote is gone, and with it what it ran; the next program starts another."""
        if self._wire is not wire:
            return
        self._wire = None
        lost, self._under_way = self._under_way, set()
        self.done.extend(Outcome(name, error="its process was lost") for name in lost)
        self.on_done()

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _outcome(message: Mapping[str, Any]) -> Outcome:
    error = message.get("error")
    if error is None and message["status"]:
        error = message["status"]
    if error is not None and message.get("tail"):
        error += "\n" + str(message["tail"]).strip()[-1500:]
    return Outcome(message["done"], message.get("value"), error)
