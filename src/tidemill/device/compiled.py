"""C sources compiled once per machine by whatever compiler is there, loaded through ctypes; rows shared by threads."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from tidemill.device.compiling import compiling
from tidemill.owned import OwnedFolder

HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")
# Splitting fewer rows than this over threads costs more than it saves; where a row is an easy thing, fewer elements.
ROWS_PER_THREAD, ELEMENTS_PER_THREAD = 32, 1 << 15


def _compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _machine() -> str:
    """What -march=native depends on, so that a shared home folder serves different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def library(source: Path) -> ctypes.CDLL | None:
    """The source compiled if need be (about a second, once) and loaded; None where that is not possible or not wanted
    (TIDEMILL_KERNELS=0)."""
    compiler = _compiler()
    if os.environ.get("TIDEMILL_KERNELS") == "0" or compiler is None:
        return None
    stamp = hashlib.sha256(
        "\n".join([source.read_text(), HEADER.read_text(), *FLAGS, compiler, _machine()]).encode()
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & 0o022:
            folder.chmod(0o755)  # the umask of many systems lets the group write
        if not is_unchanged_by_others(folder):
            folder = _private_folder()
        made = folder / f"{source.stem}-{stamp}.so"
        if not made.exists() or not is_unchanged_by_others(made):
            with compiling("kernels"):
                _compile(compiler, source, folder, made)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        return None


def is_unchanged_by_others(path: Path) -> bool:
    """Whether nobody but this user and root can have written it: what lies there runs as this user."""
    seen = path.lstat()
    is_plain = stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)
    return is_plain and seen.st_uid in (os.geteuid(), 0) and not seen.st_mode & 0o022


@cache
def _private_folder() -> Path:
    """A folder for compiled code where the usual one can be written by others."""
    made = OwnedFolder()
    atexit.register(made.close)
    return made.path


def _compile(compiler: str, source: Path, folder: Path, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        aside_made = Path(aside) / "made.so"
        words = [*FLAGS, f"-I{HEADER.parent}", "-o", str(aside_made), str(source), "-lm"]
        # Not every compiler has it; a Mac's torch brings a library of its own, and two of them end the process.
        for threads in [[]] if sys.platform == "darwin" else [["-fopenmp"], []]:
            done = subprocess.run([compiler, *threads, *words], capture_output=True, timeout=120)
            if done.returncode == 0:
                break
        done.check_returncode()
        aside_made.chmod(0o755)  # whatever the user's umask is
        aside_made.replace(made)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


def threads_for(count: int, least: int = ELEMENTS_PER_THREAD) -> int:
    """How many of torch's threads are to share so many elements, or whatever `least` counts."""
    return max(1, min(torch.get_num_threads(), count // least))


def over_rows(run: Callable[[int, int], None], rows: int, least: int = ROWS_PER_THREAD) -> None:
    """run(first, last) on all rows, shared by as many threads as torch uses, each with `least` rows or more; foreign
    code lets go of Python's lock."""
    threads, parts = torch.get_num_threads(), threads_for(rows, least)
    if parts < 2:
        run(0, rows)
        return
    edges = [rows * i // parts for i in range(parts + 1)]
    waiting = [_threads(threads - 1).submit(run, a, b) for a, b in pairwise(edges[1:])]
    run(edges[0], edges[1])
    for future in waiting:
        future.result()
