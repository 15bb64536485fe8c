"""What a program may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# ok: ran to its end. failed: an exception or a non-zero exit. The others: ended by a limit, or by a signal.
Status = Literal["ok", "failed", "timeout", "output", "killed"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mb: int = 256
    output_bytes: int = 64 * 1024
    scratch_mb: int = 8  # all files together; 0: none can be written
    files: int = 64  # that exist at once in the scratch folder
    open_files: int = 32
    threads: int = 32  # beside the first; bounded by memory alone where the sandbox cannot have namespaces


@dataclass(frozen=True, slots=True)
class Result:
    """`passed`: how many of the given checks held."""

    status: Status
    output: str = ""
    passed: int = 0
    seconds: float = 0.0
