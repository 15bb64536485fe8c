"""Print the folder that brings a device `npu` to tests: nothing where torch_npu is installed, else the stand-in's."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

STAND_IN = Path(__file__).resolve().parents[1] / "device" / "fake_npu"


def main() -> None:
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        print("NPU tests: on the stand-in (tests/device/fake_npu), because torch_npu is not installed", file=sys.stderr)
        print(STAND_IN)
        return
    print(f"NPU tests: on this machine's devices, torch_npu {version}", file=sys.stderr)


if __name__ == "__main__":
    main()
