"""Ascend NPUs, through torch_npu. Imported only here and only when asked for: without its driver it cannot load."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tidemill.device.accelerator import Accelerator
from tidemill.device.api import Peak
from tidemill.device.ascend import settings as npu_settings
from tidemill.device.ascend import smi as npu_smi
from tidemill.errors import ConfigError

T = 1e12
# Dense float16 and bfloat16: cube cores × 8192 operations a cycle × clock. An Atlas A3's device is one of the two dies
# of a 910C: 376 T by Huawei's paper on CloudMatrix384, with the 24 cores of the 938x and 939x; 20 cores in proportion.
PEAKS = (
    ("910B1", Peak(378.9 * T, 1.6 * T)),
    ("910B2", Peak(353.9 * T, 1.6 * T)),
    ("910B3", Peak(294.9 * T, 1.6 * T)),
    ("910B4", Peak(270.3 * T, 0.8 * T)),
    ("910_939", Peak(376.0 * T, 1.6 * T)),
    ("910_938", Peak(376.0 * T, 1.6 * T)),
    ("910_937", Peak(313.3 * T, 1.6 * T)),
    ("910_936", Peak(313.3 * T, 1.6 * T)),
)


def open(index: int) -> Accelerator:
    npu_settings.apply()
    backend = _backend(index)
    count = backend.device_count()
    if not backend.is_available() or not count:
        raise ConfigError(
            f"device=npu:{index}: torch_npu sees no NPU", "check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"
        )
    if index >= count:
        raise ConfigError(
            f"device=npu:{index}: there are {count} NPUs, counted from 0", f"use npu:0 to npu:{count - 1}"
        )
    return Accelerator(
        kind="npu",
        index=index,
        backend=backend,
        peaks=PEAKS,
        power=npu_smi.power_w,
    )


def _backend(index: int) -> Any:
    if not hasattr(torch, "npu"):  # torch ≥ 2.5 loads the package by itself where it can
        try:
            importlib.import_module("torch_npu")
        except ModuleNotFoundError as error:
            if error.name != "torch_npu":
                raise _cannot_load(index, error) from error
            raise ConfigError(
                f"device=npu:{index} needs the package torch_npu, which is not installed",
                "pip install torch_npu, in the version that goes with this torch, on a machine with the Ascend driver",
            ) from None
        except (ImportError, OSError, RuntimeError) as error:
            raise _cannot_load(index, error) from error
    return getattr(torch, "npu")  # noqa: B009  (only there once torch_npu is)


def _cannot_load(index: int, error: Exception) -> ConfigError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"device=npu:{index}: torch_npu cannot load: {first}",
        "source the CANN set_env.sh, and check the driver with `npu-smi info`",
    )
