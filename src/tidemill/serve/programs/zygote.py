"""The process that every program is a copy of: the agent's module is imported once, then each sample has a process of
its own, which may crash, hang or write without end and harm no other.

It is started by `processes.Programs` and speaks with it over a socket: `{"start": …}` and `{"kill": …}` in,
`{"done": …}` out. A program is `module:function` or `file.py:function`, or else a command. The function's value, or the
last line that the command prints, is the outcome. Where the function has an attribute `prepare`, that is called with
the recipe's arguments before the first sample: what it loads all copies share.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.reward.workers.wire import JsonSocket

PR_SET_PDEATHSIG = 1
MOST_RESULT = 1 << 20  # bytes of an outcome
MOST_TAIL = 4000  # of what a program wrote, for people
LOOK_S = 0.02
WATCHED = 4  # copies in a row that must import nothing new before they are no longer watched
MOST_NAMES = 4000


@dataclass(slots=True)
class Child:
    pid: int
    result: int
    written: int
    said: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    is_watched: bool = False  # it tells what it imported


class Zygote:
    def __init__(self, wire: JsonSocket, program: str, evaluator: str | None, args: Mapping[str, Any]) -> None:
        self.wire, self.program, self.args = wire, program, args
        self.children: dict[str, Child] = {}
        self.watches = WATCHED  # copies that are still to tell what they imported
        self.function: Callable[..., Any] | None = None
        self.evaluator: Callable[..., Any] | None = None
        from tidemill.errors import ConfigError
        from tidemill.imports import is_import_path, load

        if is_import_path(program):
            self.function = load(program, ConfigError, "environment.program")
            prepare = getattr(self.function, "prepare", None)
            if prepare is not None:
                prepare(**args)
        if evaluator is not None:
            self.evaluator = load(evaluator, ConfigError, "environment.evaluator")

    def serve(self) -> None:
        self.wire.send({"ready": True})
        gc.freeze()  # copies do not touch what is here already, so its pages stay shared
        while True:
            self._look()
            self._reap()

    def _look(self) -> None:
        watched = select.poll()
        watched.register(self.wire.end, select.POLLIN)
        pipes: dict[int, tuple[Child, bytearray, int]] = {}
        for child in self.children.values():
            pipes[child.result] = (child, child.said, MOST_RESULT)
            pipes[child.written] = (child, child.tail, -MOST_TAIL)
        for pipe in pipes:
            watched.register(pipe, select.POLLIN)
        for handle, _ in watched.poll(LOOK_S * 1000 if self.children else None):
            if handle == self.wire.end.fileno():
                self._told(self.wire.receive())
            elif handle in pipes:
                _drain(handle, *pipes[handle][1:])

    def _told(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._start(message["start"], message)
        elif "kill" in message and message["kill"] in self.children:
            _kill(self.children[message["kill"]].pid)

    def _start(self, name: str, message: dict[str, Any]) -> None:
        result, result_end = os.pipe()
        written, written_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._in_copy(message, result_end, written_end)
        os.close(result_end)
        os.close(written_end)
        for pipe in (result, written):
            os.set_blocking(pipe, False)
        self.children[name] = Child(pid, result, written, is_watched=self.watches > 0)

    def _reap(self) -> None:
        for name, child in list(self.children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0:
                continue
            _kill(child.pid)  # what it started and left
            _drain(child.result, child.said, MOST_RESULT)
            _drain(child.written, child.tail, -MOST_TAIL)
            os.close(child.result)
            os.close(child.written)
            del self.children[name]
            tail = child.tail.decode(errors="replace")
            outcome = self._outcome(child.said)
            imported = outcome.pop("imported", [])
            self.wire.send({"done": name, "status": _in_words(status), **outcome, "tail": tail})
            if child.is_watched and self.watches > 0:
                self._import(imported)

    def _import(self, names: list[str]) -> None:
        """Import once, for later copies, what a copy had to import: frameworks load half of themselves on first use.
        Only the rest of packages that are here already, and Python's own: other modules may want a sample's key."""
        found = [name for name in names if name not in sys.modules and _is_rest(name)]
        self.watches = WATCHED if found else self.watches - 1
        for name in found:
            with contextlib.suppress(Exception):  # it may exist under this name in the copy alone
                importlib.import_module(name)
        if found:
            gc.freeze()

    def _outcome(self, said: bytearray) -> dict[str, Any]:
        if len(said) >= MOST_RESULT:
            return {"error": f"its outcome has more than {MOST_RESULT} bytes"}
        text = said.decode(errors="replace").strip()
        if self.function is None:  # a command: the last line that it printed
            text = json.dumps({"value": _read(text.splitlines()[-1])}) if text else ""
        try:
            found = json.loads(text) if text else {}
        except ValueError:
            found = {"error": "its outcome is no JSON"}
        return found if isinstance(found, dict) else {"error": "its outcome is no object"}

    # In the copy

    def _in_copy(self, message: dict[str, Any], result: int, written: int) -> None:
        with contextlib.suppress(BaseException):
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.wire.close()
            os.dup2(written, 2)
            for name, value in message["variables"].items():
                os.environ[name] = value
            if self.function is None:
                os.dup2(result, 1)
                self._become(message)
            os.dup2(written, 1)
            os.set_inheritable(result, False)
            _write(result, self._outcome_of(message))
        os._exit(0)

    def _become(self, message: dict[str, Any]) -> None:
        words = shlex.split(self.program)
        task, task_end = os.pipe()
        if os.fork() == 0:  # a task may be larger than a pipe
            os.close(task)
            with contextlib.suppress(OSError):
                _write(task_end, json.dumps(message["task"]).encode())
            os._exit(0)
        os.close(task_end)
        os.dup2(task, 0)
        try:
            os.execvp(words[0], words)
        except OSError as error:
            print(f"{words[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)

    def _outcome_of(self, message: dict[str, Any]) -> bytes:
        before = set(sys.modules)
        outcome = self._tried(message)
        if self.watches > 0:
            outcome["imported"] = sorted(set(sys.modules) - before)[:MOST_NAMES]
        try:
            return json.dumps(outcome).encode()
        except (TypeError, ValueError) as error:
            return json.dumps({"error": f"gave an outcome that is no JSON: {error}"[:2000]}).encode()

    def _tried(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            value = _called(self.function, message["base_url"], message["api_key"], message["task"], **self.args)
            if self.evaluator is not None:
                value = _called(self.evaluator, message["task"], value)
            return {"value": value}
        except BaseException as error:
            import traceback

            traceback.print_exc()
            return {"error": f"raised {type(error).__name__}: {error}"[:2000]}


def _is_rest(name: str) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names if top == name else top in sys.modules


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    value = function(*args, **kwargs)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def _drain(pipe: int, kept: bytearray, most: int) -> None:
    """Read what is there. `most`: how much is kept, from the beginning, or from the end where it is negative."""
    for _ in range(64):  # others write too
        try:
            part = os.read(pipe, 1 << 16)
        except OSError:  # nothing there by now
            return
        if not part:
            return
        kept += part if most < 0 or len(kept) < most else b""
        if most < 0:
            del kept[:most]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _in_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    return "" if code == 0 else f"exit status {code}"


def main(handle: int, program: str, evaluator: str | None, args: Mapping[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the run, which ends this itself
    wire = JsonSocket.at(handle)
    zygote = None
    try:
        zygote = Zygote(wire, program, evaluator, args)
        zygote.serve()
    except (EOFError, ConnectionError):  # the process that asks is gone
        for child in zygote.children.values() if zygote is not None else ():
            _kill(child.pid)
    except Exception as error:
        with contextlib.suppress(OSError):
            wire.send({"failed": getattr(error, "message", None) or f"{type(error).__name__}: {error}"})
    time.sleep(0)
