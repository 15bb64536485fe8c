"""A program that is told to one turn at a time: names and files stay from turn to turn, until a limit ends it.

The copy waits between turns and is killed with its zygote. Wall time and output are limited by turn, memory and CPU
time over all of them.
"""

from __future__ import annotations

import ast
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CHUNK = 1 << 16
HEAD = struct.Struct("<Q")


class Session:
    """`confine(out)`: called in the copy, takes on limits and makes `out` its output."""

    def __init__(self, limits: SimpleNamespace, confine: Callable[[int], None]) -> None:
        self.limits, self.confine = limits, confine
        self.pid = 0
        self._ask = self._out = self._done = -1

    def turn(self, code: str) -> dict[str, Any]:
        began = time.monotonic()
        is_new = not self.pid
        if is_new:
            self._begin()
        data = code.encode("utf-8", "surrogatepass")
        status = self._ask_for(HEAD.pack(len(data)) + data, began)
        output, status = (b"", self.end(status)) if status else self._watch(began)
        text = output.decode(errors="replace")
        return {"status": status, "output": text, "seconds": time.monotonic() - began, "is_new": is_new}

    def _ask_for(self, data: bytes, began: float) -> str:
        """Send a turn; return what ended the program, if it does not read (it may have forged its last answer)."""
        while data:
            left = self.limits.wall_s - (time.monotonic() - began)
            if left <= 0 or not select.select([], [self._ask], [], left)[1]:
                return "timeout"
            try:
                data = data[os.write(self._ask, data) :]
            except BrokenPipeError:
                return "killed"
        return ""

    def _begin(self) -> None:
        ask, self._ask = os.pipe()
        os.set_blocking(self._ask, False)
        self._out, out = os.pipe()
        self._done, done = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for end in (self._ask, self._out, self._done):
                os.close(end)
            try:
                self.confine(out)
                serve(ask, done)
            finally:
                os._exit(0)
        for end in (ask, out, done):
            os.close(end)

    def _watch(self, began: float) -> tuple[bytes, str]:
        """A turn's output, and how it ended: `ok`, `failed` (it raised), or what ended the whole program."""
        output, is_told = bytearray(), b""
        while True:
            left = self.limits.wall_s - (time.monotonic() - began)
            ready = select.select([self._out, self._done], [], [], max(left, 0.0))[0] if left > 0 else []
            if not ready and not is_told:
                return bytes(output), self.end("timeout")
            if self._done in ready and not is_told:
                is_told = os.read(self._done, 1)
                if not is_told:
                    return bytes(output + self._rest()), self.end("killed")
            if is_told:  # what it printed before is in the pipe
                output += self._rest()
            elif self._out in ready:
                output += os.read(self._out, CHUNK)
            if len(output) > self.limits.output_bytes:
                return bytes(output[: self.limits.output_bytes]), self.end("output")
            if is_told:
                return bytes(output), "ok" if is_told == b"+" else "failed"

    def _rest(self) -> bytes:
        found = bytearray()
        while len(found) <= self.limits.output_bytes and select.select([self._out], [], [], 0)[0]:
            data = os.read(self._out, CHUNK)
            if not data:
                break
            found += data
        return bytes(found)

    def end(self, status: str = "") -> str:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            for end in (self._ask, self._out, self._done):
                os.close(end)
            self.pid = 0
        return status


def serve(ask: int, done: int) -> None:
    """In the copy: run what is asked, one turn after the other, in one scope."""
    write, scope = os.write, dict[str, Any]({"__name__": "__main__"})
    with open(0, closefd=False) as sys.stdin, open(1, "w", closefd=False) as sys.stdout:
        sys.stderr, out = sys.stdout, sys.stdout
        while (code := _asked(ask)) is not None:
            is_fine = ran(code, scope)
            try:
                out.flush()
            except (OSError, ValueError):
                is_fine = False
            write(done, b"+" if is_fine else b"-")


def _asked(ask: int) -> str | None:
    head = _read(ask, HEAD.size)
    return None if head is None else (_read(ask, HEAD.unpack(head)[0]) or b"").decode("utf-8", "surrogatepass")


def _read(end: int, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        data = os.read(end, count - len(found))
        if not data:
            return None
        found += data
    return bytes(found)


def ran(code: str, scope: dict[str, Any]) -> bool:
    """Run a piece of code; the value of a last expression is printed, as an interpreter would."""
    try:
        tree = ast.parse(code, "turn.py")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "turn.py", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "turn.py", "eval"), scope)
            if value is not None:
                print(repr(value))
    except SystemExit:
        return True
    except BaseException as error:
        behind = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function
        traceback.print_exception(type(error), error, behind, limit=4)
        return False
    return True
