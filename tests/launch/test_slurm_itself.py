"""A recipe on a real Slurm with two nodes runs, survives the kill of its step, and is resumed (`make test-slurm`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import recipes, slurm_cluster
from tidemill.launch import job as jobs
from tidemill.launch import send

pytestmark = [
    pytest.mark.skipif("TIDEMILL_TEST_SLURM" not in os.environ, reason="starts a Slurm of its own: `make test-slurm`"),
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"not installed: {', '.join(slurm_cluster.missing())}"),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tm-slurm-"))
    try:
        with slurm_cluster.cluster(folder / "slurm") as env, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", env["SLURM_CONF"])
            patch.setenv("PATH", env["PATH"])
            patch.setenv(jobs.ENV_FOLDER, str(folder / "launch"))
            yield folder
    finally:
        if "TIDEMILL_KEEP" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


def launched(folder: Path, name: str, nodes: int, steps: int, **more: str) -> jobs.Job:
    recipe = recipes.write(folder)
    # Two nodes on one machine: each offers few cores and a small object store.
    env = {"OMP_NUM_THREADS": "1", "TIDEMILL_NODE_CPUS": "2", "TIDEMILL_NODE_STORE_BYTES": str(80 << 20)}
    given = {"nodes": nodes, "python": sys.executable, "cpus_per_task": 1, "warn_s": 30, "env": env, **more}
    return send.send(send.prepare(str(recipe), [f"name={name}", f"train.steps={steps}"], "slurm", given))


def wait_until(job: jobs.Job, is_so: Callable[[], object], within_s: float = 600.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        now = send.status(job.name)[1]
        late = time.monotonic() > deadline
        assert not late and now.state not in ("failed", "lost"), f"{now}\n{send.logs(job.name, 60)}"
        time.sleep(0.3)


def steps_of(job: jobs.Job) -> list[int]:
    file = Path(job.run) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_two_nodes_run_a_recipe_and_a_killed_step_is_resumed(slurm: Path) -> None:
    job = launched(slurm, "killed", nodes=2, steps=30)
    wait_until(job, lambda: len(steps_of(job)) >= 2)
    shown = subprocess.run(["squeue", "-s", "-h", "-o", "%i"], capture_output=True, text=True).stdout.split()
    step = next(name for name in shown if name.endswith(".0"))
    before = len(steps_of(job))
    subprocess.run(["scancel", "--signal=KILL", step], check=True)
    wait_until(job, lambda: send.status(job.name)[1].state == "done")
    log = send.logs(job.name, 100_000)
    assert "the run is resumed inside the allocation" in log
    assert 2 <= before < 30 and steps_of(job) == list(range(1, 31)), log


def test_a_stopped_job_saves_and_a_resumed_one_goes_on(slurm: Path) -> None:
    job = launched(slurm, "stopped", nodes=1, steps=200)
    wait_until(job, lambda: len(steps_of(job)) >= 2)
    send.stop(job.name)
    wait_until(job, lambda: send.status(job.name)[1].state == "stopped")
    made = len(steps_of(job))
    assert 2 <= made < 200
    again = send.resume(job.name)
    wait_until(again, lambda: len(steps_of(again)) > made)
    send.stop(job.name)
    wait_until(again, lambda: send.status(job.name)[1].state == "stopped")
    assert steps_of(again) == list(range(1, len(steps_of(again)) + 1))


def test_a_requeued_job_goes_on_where_it_was(slurm: Path) -> None:
    """What happens when a node fails or another job preempts it: Slurm puts it back and starts it again."""
    job = launched(slurm, "requeued", nodes=1, steps=60)
    wait_until(job, lambda: len(steps_of(job)) >= 2)
    subprocess.run(["scontrol", "requeue", job.reference], check=True)
    wait_until(job, lambda: send.status(job.name)[1].state == "done")
    assert steps_of(job) == list(range(1, 61))
    assert "restarted 1 times" in send.status(job.name)[1].detail


def test_a_job_near_its_time_limit_saves_and_goes_back_into_the_queue(slurm: Path) -> None:
    job = launched(slurm, "limited", nodes=1, steps=5000, time="2")
    wait_until(job, lambda: "restarted 1 times" in send.status(job.name)[1].detail)
    made = len(steps_of(job))
    wait_until(job, lambda: len(steps_of(job)) > made)
    send.stop(job.name)
    wait_until(job, lambda: send.status(job.name)[1].state == "stopped")
    log = send.logs(job.name, 100_000)
    assert "the run was stopped and saved" in log
    assert "resumed inside the allocation" not in log and "TIME LIMIT" not in log, log
    assert made > 0 and steps_of(job) == list(range(1, len(steps_of(job)) + 1))
