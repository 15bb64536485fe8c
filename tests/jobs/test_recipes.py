"""Recipes in the queue: a run gives way to a higher priority by a checkpoint, and its numbers stay the same."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.launch import recipes
from tidemill.jobs.journal import Journal
from tidemill.jobs.queue import Queue
from tidemill.jobs.recipe import recipe_job
from tidemill.jobs.runner import Processes
from tidemill.jobs.state import Spec

SRC = str(Path(recipes.__file__).resolve().parents[2] / "src")


def numbers(run: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["reward"]) for line in lines]


@pytest.mark.slow
def test_a_preempted_run_goes_on_and_computes_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", SRC)
    file = str(recipes.write(tmp_path))
    queue = Queue(tmp_path / "queue")
    runner = Processes(queue.folder / "jobs", {"OMP_NUM_THREADS": "1"})
    queue.add(recipe_job(queue.folder, file, ["name=first", "train.steps=20"], priority=0, slots=1, group=""))
    metrics = tmp_path / "runs" / "first" / "metrics.jsonl"
    asked: dict[tuple[int, int], float] = {}
    deadline = time.monotonic() + 200
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
        assert time.monotonic() < deadline and queue.jobs[1].phase in ("waiting", "running")
        queue.step(runner, 1, {}, asked)
        time.sleep(0.05)
    queue.add(Spec(("true",), "urgent", priority=9, folder=str(tmp_path)))
    queue.add(recipe_job(queue.folder, file, ["name=whole", "train.steps=20"], priority=-1, slots=1, group=""))
    queue.run(runner, 1, is_drain=True)
    starts = [event["id"] for event in Journal(queue.folder / "journal.jsonl").read() if event["event"] == "start"]
    assert [job.phase for job in queue.jobs.values()] == ["done"] * 3 and starts == [1, 2, 1, 3]
    assert numbers(tmp_path / "runs" / "first") == numbers(tmp_path / "runs" / "whole")
