"""The timeline of a run: what each worker did when, written by itself and read by the page and the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.observe import timeline
from tidemill.observe.timeline import Recorder, Span
from tidemill.run import start


def test_pieces_of_one_stage_are_one_span_until_something_lies_between(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "rollout-0")
    for start_s in (0.0, 0.1, 0.2, 0.6):
        recorder.span("rollout", start_s, start_s + 0.099, rows=4, steps=1)
    recorder.close()
    first, second = timeline.read(tmp_path)
    assert first.end - first.start == pytest.approx(0.299, abs=1e-4) and first.work == {"rows": 12, "steps": 3}
    assert second.work == {"rows": 4, "steps": 1} and first.worker == "rollout-0"


def test_every_piece_of_work_is_kept_where_it_is_wanted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "learner-0", keeps_all=True)
    for i in range(3):
        recorder.span("learn", i * 0.1, i * 0.1 + 0.0999, tokens=7)
    recorder.close()
    assert [s.work for s in timeline.read(tmp_path)] == [{"tokens": 7}] * 3


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    timeline.write(tmp_path, [Span("a", "learn", 1.0, 2.0)], origin=100.0)
    with (tmp_path / timeline.FOLDER / "a.jsonl").open("a") as file:
        file.write('{"what": "learn", "start": 3')
    assert [(s.start, s.end) for s in timeline.read(tmp_path)] == [(101.0, 102.0)]


def test_a_trace_for_other_viewers_has_microseconds_and_a_row_a_worker() -> None:
    events = json.loads(timeline.as_trace([Span("learner-0", "learn", 1.5, 2.0)]))["traceEvents"]
    assert (events[0]["ts"], events[0]["dur"], events[0]["tid"]) == (1.5e6, 0.5e6, "learner-0")


@pytest.mark.parametrize("kind", ["stages", "off"])
def test_a_run_tells_what_was_done_when(kind: str, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "folder": str(tmp_path),
        "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2}},
        "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2},
        "data": {"max_prompt_tokens": 32},
        "rollout": {"max_new_tokens": 6},
        "eval": {"size": 0},
        "observe": {"timeline": kind, "tensorboard": False, "progress": "off"},
    }
    start.train(recipe)
    spans = list(timeline.read(tmp_path / "run"))
    if kind == "off":
        assert not spans and not (tmp_path / "run" / timeline.FOLDER).exists()
        return
    steps = [s for s in spans if s.worker == "driver"]
    assert [s.work["step"] for s in steps] == [1, 2]
    work = [s for s in spans if s.worker != "driver" and s.start >= steps[0].start]
    assert {s.what for s in work} >= {"rollout", "reward", "learn"}
    assert all(steps[0].start <= s.start <= s.end <= steps[1].end + 0.1 for s in work)
