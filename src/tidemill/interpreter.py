"""A part of a run in another Python interpreter: packages whose versions do not fit together live in environments of
their own, and talk over a socket pair. Only numpy is needed on both sides.

A message is a kind, plain fields (JSON) and arrays (raw bytes). The other side is told apart from its code: it finds
Tidemill through a link of its own, so that nothing else of this interpreter's packages is in its way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.errors import ConfigError, InterpreterError, TidemillError
from tidemill.owned import OwnedFolder

Array = npt.NDArray[Any]
HEAD = struct.Struct("<Q")
STOP_S = 10.0
TAIL = 2000  # characters of the log that an error shows


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


def send(line: socket.socket, message: Message) -> None:
    forms = [(name, a.dtype.str, list(a.shape)) for name, a in message.arrays.items()]
    head = json.dumps({"kind": message.kind, "fields": message.fields, "arrays": forms}).encode()
    line.sendall(HEAD.pack(len(head)) + head)
    for array in message.arrays.values():
        if array.size:
            line.sendall(np.ascontiguousarray(array).data.cast("B"))


def receive(line: socket.socket) -> Message:
    """The next message; EOFError where the other side has closed the line."""
    (size,) = HEAD.unpack(_exactly(line, HEAD.size))
    head = json.loads(_exactly(line, size))
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        array = np.empty(shape, np.dtype(dtype))
        if array.size:
            _fill(line, array.data.cast("B"))
        arrays[name] = array
    return Message(head["kind"], head["fields"], arrays)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    _fill(line, memoryview(found))
    return bytes(found)


def _fill(line: socket.socket, into: memoryview) -> None:
    while into:
        count = line.recv_into(into)
        if not count:
            raise EOFError
        into = into[count:]


class Interpreter:
    """A module of Tidemill's run by another Python. `call` sends a request and waits for its answer."""

    def __init__(self, python: Path, module: str, what: str, log: Path | None, environment: Mapping[str, str]) -> None:
        """`what`: how messages call it. `log`: what it prints; without one, that joins what this process prints.
        `environment`: added to this process's own."""
        self.what, self.log = what, None if log is None else log.absolute()
        self._folder = OwnedFolder()
        self.home = self._folder.path
        (self.home / "tidemill").symlink_to(Path(__file__).resolve().parent)
        self.line, theirs = socket.socketpair()
        own = {**os.environ, **environment, "PYTHONPATH": str(self.home)}
        try:
            with self._written() as written, theirs:
                self.process = subprocess.Popen(
                    [str(python), "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=own,
                    stdin=subprocess.DEVNULL, stdout=written, stderr=written, cwd=self.home,
                )  # fmt: skip
        except OSError as error:
            self._folder.close()
            raise ConfigError(f"{what} cannot be started with {python}: {error}") from error

    def call(self, kind: str, fields: Mapping[str, Any] | None = None, **arrays: Array) -> Message:
        try:
            send(self.line, Message(kind, dict(fields or {}), arrays))
            answer = receive(self.line)
        except (EOFError, OSError) as error:
            raise InterpreterError(self._obituary(), self._where()) from error
        if answer.kind == "failed":
            raise TidemillError(f"{self.what} failed: {answer.fields['error']}", self._where())
        return answer

    def _written(self) -> AbstractContextManager[Any]:
        """Where the process prints; nothing stands for this process's own."""
        if self.log is None:
            return nullcontext()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self.log.open("ab")

    def _where(self) -> str:
        return "see what it printed before" if self.log is None else f"its log is {self.log}"

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        code = self.process.poll()
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended (exit code {code})"
        said = ""
        if self.log is not None and self.log.exists():
            said = self.log.read_text(errors="replace").strip()[-TAIL:]
        return f"{self.what} {how}" + (f": {said.splitlines()[-1]}" if said else "")

    def close(self) -> None:
        """Let it end by itself, which it does when its line closes."""
        self.line.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.close()


Answer = tuple[Mapping[str, Any], Mapping[str, Array]]


def serve(line: socket.socket, handlers: Mapping[str, Callable[[Message], Answer]]) -> None:
    """Answer requests until the line closes: the other side of `Interpreter.call`."""
    while True:
        try:
            request = receive(line)
        except EOFError:
            return
        try:
            fields, arrays = handlers[request.kind](request)
            send(line, Message("done", dict(fields), dict(arrays)))
        except Exception as error:  # whatever went wrong is the caller's to know
            import traceback

            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            send(line, Message("failed", {"error": f"{type(error).__name__}: {first}"}))


def find_python(key: str, given: str, usual: str, remedy: str) -> Path:
    """The interpreter that a recipe names, or the usual one of this checkout."""
    path = Path(given or usual).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    found = path if path.is_absolute() else Path.cwd() / path
    if not found.exists():
        raise ConfigError(f"{key}: there is no Python at {path}", remedy)
    return found
