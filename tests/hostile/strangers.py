"""Another user's processes: code that runs as nobody beside what is tested."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest

NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}


def _python() -> str | None:
    """A Python that another user can start; what it runs needs nothing but the standard library."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([path, "-c", ""], check=True, capture_output=True, **AS_NOBODY)
            return path
    return None


PYTHON = _python() if os.geteuid() == 0 else None
needs_root = pytest.mark.skipif(
    PYTHON is None, reason="only root can become another user" if os.geteuid() else "no Python that nobody can start"
)


def start(code: str, *args: object) -> subprocess.Popen[str]:
    """A process of another user. It sees what any local user sees: open folders, sockets, /proc."""
    return subprocess.Popen(
        [str(PYTHON), "-c", code, *map(str, args)],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **AS_NOBODY,
    )


def told(process: subprocess.Popen[str], within_s: float = 60.0) -> str:
    """End its input, and give all it printed; fails when it failed."""
    out, errors = process.communicate(timeout=within_s)
    assert process.returncode == 0, errors
    return out
