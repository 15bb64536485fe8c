"""A recipe launched on this machine: the trainer is killed, the job goes on by itself and ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import recipes
from tidemill.launch import job as jobs
from tidemill.launch import send


def until(is_so: Callable[[], object], within_s: float = 200.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_trainer_is_resumed_and_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(jobs.ENV_FOLDER, str(tmp_path / "launch"))
    given = {"python": sys.executable, "env": {"OMP_NUM_THREADS": "1"}}
    job = send.send(send.prepare(str(recipes.write(tmp_path)), ["train.steps=60"], "local", given))
    run = Path(job.run)
    until(lambda: send.progress(job))
    os.kill(json.loads((run / "lock").read_text())["pid"], signal.SIGKILL)
    until(lambda: send.status(job.name)[1].state in jobs.ENDED)
    log = send.logs(job.name, 50)
    assert send.status(job.name)[1].state == "done" and "it is resumed" in log, log
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 61))
