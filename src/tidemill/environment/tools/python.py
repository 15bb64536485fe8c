"""The tool `python`: code that the model writes runs in the sandbox, and its names stay from call to call.

A conversation has a program of its own, which begins with its first call and is forgotten at its end. Sandboxes are
used again by later conversations: starting one takes longer than most code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from tidemill.environment.tools.api import Tool
from tidemill.reward.sandbox.limits import SandboxLimits
from tidemill.reward.sandbox.run import Sandbox

MOST_FREE = 32  # sandboxes that wait for another conversation
ENDED = {
    "timeout": "it ran longer than {wall_s:g} s",
    "output": "it printed more than {output_bytes} bytes",
    "killed": "it used more memory or time than it may",
}


class SandboxPool:
    """Sandboxes of this process that no conversation uses."""

    def __init__(self) -> None:
        self._free: dict[SandboxLimits, list[Sandbox]] = {}
        self._lock, self._owner = threading.Lock(), os.getpid()

    def take(self, limits: SandboxLimits) -> Sandbox:
        with self._lock:
            if self._owner != os.getpid():  # this is a fork: they belong to another process
                self._free, self._owner = {}, os.getpid()
            free = self._free.get(limits)
            return free.pop() if free else Sandbox(limits)

    def give_back(self, sandbox: Sandbox) -> None:
        sandbox.forget()
        with self._lock:
            free = self._free.setdefault(sandbox.limits, [])
            if len(free) < MOST_FREE:
                free.append(sandbox)
                return
        sandbox.close()

    def close(self) -> None:
        with self._lock:
            free, self._free = [box for boxes in self._free.values() for box in boxes], {}
        for box in free:
            box.close()


POOL = SandboxPool()


class Python:
    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._sandbox: Sandbox | None = None
        about = (
            "Run Python code. Names stay for the next call. Gives back what it prints and a last expression's value."
        )
        code = {"type": "string", "description": "the code"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {"name": "python", "description": about, "parameters": parameters}
        self.schema: Mapping[str, Any] = {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ValueError("code is a text: the program to run")
        has_begun = self._sandbox is not None
        self._sandbox = self._sandbox or POOL.take(self.limits)
        result, is_new = self._sandbox.turn(code)
        output = result.output.rstrip("\n")
        if result.status in ENDED:
            why = ENDED[result.status].format(wall_s=self.limits.wall_s, output_bytes=self.limits.output_bytes)
            raise ValueError(f"{why}, and was ended; the next call begins anew.\n{output}".rstrip())
        if result.status == "failed":
            raise ValueError(output)
        return f"(earlier names are gone)\n{output}" if is_new and has_begun else output

    def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            POOL.give_back(sandbox)


def tools(wall_s: float = 5.0, cpu_s: int = 30, memory_mb: int = 256, output_bytes: int = 16 * 1024) -> list[Tool]:
    """`wall_s` and `output_bytes` are of one call, `cpu_s` and `memory_mb` of a whole conversation."""
    return [Python(SandboxLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb, output_bytes=output_bytes))]
