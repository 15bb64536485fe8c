"""What `npu-smi` and the installed files tell of Ascend NPUs: cards and chips, power, driver, firmware, CANN."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

TIMEOUT_S = 10.0
LATEST = "/usr/local/Ascend/ascend-toolkit/latest"
VERSION_FILES = {
    "driver": ("/usr/local/Ascend/driver/version.info",),
    "firmware": ("/usr/local/Ascend/firmware/version.info",),
    "CANN": (
        "{toolkit}/version.cfg", "{toolkit}/compiler/version.info", f"{LATEST}/version.cfg",
        f"{LATEST}/compiler/version.info",
    ),
    "HCCL": ("{toolkit}/hccl/version.info", f"{LATEST}/hccl/version.info"),
}  # fmt: skip


def power_w(logic_id: int) -> float | None:
    """Drawn now by one chip. `npu-smi` wants its card and its place there; `logic_id` is how the runtime counts it."""
    place = places().get(logic_id)
    if place is None:
        return None
    card, chip = place
    found = re.search(r"(?i)power[^:\n]*:\s*([\d.]+)", _asked("-t", "power", "-i", str(card), "-c", str(chip)))
    return float(found[1]) if found else None


@functools.cache
def places() -> dict[int, tuple[int, int]]:
    """Card and chip of each device, by the number that the runtime gives it: the columns of `npu-smi info -m`. A card
    of an A2 has one chip, of an A3 two; other rows are of chips that compute nothing."""
    rows = re.findall(r"^\s*(\d+)\s+(\d+)\s+(\d+)\b", _asked("-m"), re.MULTILINE)
    return {int(logic): (int(card), int(chip)) for card, chip, logic in rows}


def versions(toolkit: str | None = None) -> dict[str, str]:
    """Of what is installed, from the driver up; what cannot be found is left out."""
    home = toolkit or os.environ.get("ASCEND_HOME_PATH", LATEST)
    found = {}
    for name, files in VERSION_FILES.items():
        for file in files:
            text = _read(Path(file.format(toolkit=home)))
            version = re.search(r"(?im)^(?:package_)?(?:running_)?version\s*=\s*\[?([^\]\s:]+(?::[^\]\s]+)?)\]?", text)
            if version:
                found[name] = version[1].rpartition(":")[2]
                break
    return found


def _asked(*words: str) -> str:
    if shutil.which("npu-smi") is None:
        return ""
    try:
        command = ["npu-smi", "info", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
