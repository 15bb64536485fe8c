"""A recipe submitted to a real Ray cluster runs, and is resumed when its driver is killed (`make test-ray-jobs`)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import recipes
from tests.launch.slurm_cluster import free_ports
from tidemill.launch import job as jobs
from tidemill.launch import node, send

pytestmark = [
    pytest.mark.skipif(
        "TIDEMILL_TEST_RAY_JOBS" not in os.environ, reason="starts a Ray of its own: `make test-ray-jobs`"
    ),
    pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="not installed: ray[default]"),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def cluster() -> Iterator[tuple[Path, str]]:
    folder = Path(tempfile.mkdtemp(prefix="tm-r-"))
    port, dashboard, client = free_ports(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jobs.ENV_FOLDER, str(folder / "launch"))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        words = ("--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}")
        more = (f"--temp-dir={folder / 'ray'}", "--num-cpus=4", f"--object-store-memory={80 << 20}")
        ray = node.spawn(node.ray_start(*words, *more))
        try:
            until(lambda: answers(f"http://127.0.0.1:{dashboard}"))
            yield folder, f"http://127.0.0.1:{dashboard}"
        finally:
            ray.terminate()
            ray.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


def answers(address: str) -> bool:
    from tidemill.launch.targets.ray_jobs import connect

    try:
        connect(address).list_jobs()
    except Exception:
        return False
    return True


def until(is_so: Callable[[], object], within_s: float = 500.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def steps_of(job: jobs.Job) -> list[int]:
    file = Path(job.run) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_submitted_job_survives_the_kill_of_its_driver_and_finishes(cluster: tuple[Path, str]) -> None:
    folder, address = cluster
    given = {"address": address, "python": sys.executable, "env": {"OMP_NUM_THREADS": "1"}}
    job = send.send(send.prepare(str(recipes.write(folder)), ["train.steps=20"], "ray", given))

    def state() -> str:
        return send.status(job.name)[1].state

    until(lambda: len(steps_of(job)) >= 2 or state() == "failed")
    assert state() == "running", send.logs(job.name, 60)
    os.kill(json.loads((Path(job.run) / "lock").read_text())["pid"], signal.SIGKILL)
    until(lambda: state() in ("done", "failed"))
    log = send.logs(job.name, 60)
    assert state() == "done" and steps_of(job) == list(range(1, 21)), log
    assert "it is resumed" in log


def test_two_hosts_become_a_ray_cluster_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for ssh that runs commands here, in a folder for each host."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nshift 4\nmkdir -p {tmp_path}/$1 && cd {tmp_path}/$1 && shift && exec sh -c "$1"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(jobs.ENV_FOLDER, str(tmp_path / "launch"))
    (tmp_path / "hosts").write_text("one address=127.0.0.1\ntwo address=127.0.0.1\n")
    env = {"OMP_NUM_THREADS": "1", "TIDEMILL_NODE_CPUS": "2", "TIDEMILL_NODE_STORE_BYTES": str(80 << 20)}
    given = {"hosts": str(tmp_path / "hosts"), "python": sys.executable, "port": free_ports(1)[0], "env": env}
    job = send.send(send.prepare(str(recipes.write(tmp_path)), [], "ssh", given))
    until(lambda: send.status(job.name)[1].state in jobs.ENDED)
    assert send.status(job.name)[1].state == "done", send.logs(job.name, 100)
    assert steps_of(job) == list(range(1, recipes.STEPS + 1))
    until(lambda: (tmp_path / "two" / ".tidemill" / "launch" / job.label / "exit").exists(), within_s=60)
    assert (tmp_path / "two" / ".tidemill" / "launch" / job.label / "exit").read_text() == "0\n"
