"""MuJoCo's environments leave nothing behind where a run is started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tidemill.environment.vector.making import make_slots
from tidemill.recipe.environment import EnvironmentSettings

mujoco = pytest.importorskip("mujoco", reason="tidemill[control] is not installed")


def test_mujocos_warnings_go_to_the_log_once_and_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    slots = make_slots(EnvironmentSettings(name="gymnasium:HalfCheetah-v5"), 2)
    slots.reset(np.arange(2), np.arange(2))
    for env in slots.envs:
        env.unwrapped.data.qpos[:] = 1e30
        mujoco.mj_step(env.unwrapped.model, env.unwrapped.data)
    slots.close()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err.count("MuJoCo: Nan, Inf or huge value") == 1
