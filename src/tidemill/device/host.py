"""The machine itself: cores and memory this process may use, containers' limits counted. Needs no torch."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path

from tidemill.device.api import DeviceMemory

CGROUP = Path("/sys/fs/cgroup")
KEPT_PRODUCTS = 64
# Read once, when torch loads OpenMP: a thread that waits for its partners looks for some 10 microseconds, then sleeps.
# Spinning for long, a thread on a busy machine holds the core its partner needs (81 tokens/s, against 1,615 sleeping);
# sleeping at once, every small product of a free machine pays for being woken (a fifth of a small step). With 3000,
# a free machine gains 3 % and one with a busy core loses 17 % (docs/results/hardening.md).
OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def cores() -> int:
    """Cores this process may keep busy: its affinity, and a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
        allowed = min(allowed, max(1, round(int(quota[0]) / int(quota[1]))))
    return allowed


def bound_product_caches() -> None:
    """Keep few of the products that oneDNN has made code for, about 0.7 MB each. It keeps one for every number of rows,
    up to 1,024, and packed batches hardly ever have the same number twice: a learner of 124 k parameters grew from 0.4
    to 1.1 GB. Each layer of a pass finds the same shapes again, so a few dozen serve. Read when the first product is
    computed; what the environment says already stands."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and that of torch's caller
        os.environ.setdefault(name, str(KEPT_PRODUCTS))


def memory() -> DeviceMemory:
    total, free = _system_memory()
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit))
        free = min(free, max(0, int(limit) - int(used)))
    return DeviceMemory(free=free, total=total, reserved=_resident())


def processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 by itself (AVX-512 BF16, AMX, or Arm's)."""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return flags is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())


def _system_memory() -> tuple[int, int]:
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE))
    if "MemTotal" in lines and "MemAvailable" in lines:
        return int(lines["MemTotal"]) * 1024, int(lines["MemAvailable"]) * 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total  # no system call tells what is free where there is no /proc


def _resident() -> int:
    pages = _read(Path("/proc/self/statm")).split()
    if len(pages) > 1:
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_peak() -> int:
    """Return the most memory this process has held since the last call, in bytes, where the kernel lets it set its own
    mark back; otherwise since it began."""
    try:  # without Path's and decoding's costs: this is called within a step
        status = _raw(b"/proc/self/status", os.O_RDONLY, b"")
        _raw(b"/proc/self/clear_refs", os.O_WRONLY, b"5")
        return int(status.partition(b"VmHWM:")[2].split(None, 1)[0]) * 1024
    except (OSError, IndexError, ValueError):
        return _resident()


def _raw(path: bytes, flags: int, data: bytes) -> bytes:
    handle = os.open(path, flags)
    try:
        if data:
            os.write(handle, data)
            return b""
        return os.read(handle, 4096)
    finally:
        os.close(handle)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
