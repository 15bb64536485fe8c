"""The driver is killed: no worker outlives it, and the run is resumed with the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.runs import assert_same, measured, train
from tidemill.cluster.driver import status
from tidemill.observe.lock import lives
from tidemill.run import start as launch

pytest.importorskip("msgspec")
pytestmark = pytest.mark.slow

CODE = """
import sys
from pathlib import Path
from tests.cluster.runs import recipe
from tests.faults.test_resume import KillAfter
from tidemill.run import start as launch
launch.train(recipe(Path(sys.argv[1]), cluster={"executor": sys.argv[2], "rollouts": 2}), watch=KillAfter(2))
"""


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_a_killed_driver_leaves_nobody_behind_and_its_run_is_resumed(tmp_path: Path, executor: str) -> None:
    if executor == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    train(tmp_path / "calm", cluster={"executor": "local"})
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path), executor], timeout=240)
    assert done.returncode == -signal.SIGKILL
    run = tmp_path / "small"
    plain = json.loads((run / status.FILE).read_text())
    pids = [w["pid"] for w in plain["workers"]]
    assert len(pids) == 4 and all(pids)
    deadline = time.monotonic() + 60
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(lives(pid) for pid in pids)
    assert "its driver has ended" in status.render(status.read(run))
    launch.resume(run)
    assert_same(measured(tmp_path), measured(tmp_path / "calm"))
    assert os.path.exists(run / "summary.json")
