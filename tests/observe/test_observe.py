import io
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from tidemill.errors import TidemillError
from tidemill.observe import curve
from tidemill.observe.metrics import MetricsWriter
from tidemill.observe.progress import Progress, clock_text


@dataclass
class Folder:
    path: Path

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# Metrics


def test_each_step_is_one_line_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(Folder(tmp_path), tensorboard=False)
    writer.write(1, {"reward": 0.5, "tokens": 12})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5, "tokens": 12}
    assert writer.close() is None


def test_a_value_that_is_not_finite_is_written_as_null(tmp_path):
    with MetricsWriter(Folder(tmp_path), tensorboard=False) as writer:
        writer.write(1, {"loss": float("nan"), "norm": float("inf"), "ok": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "loss": None, "norm": None, "ok": 1.0}


def test_a_resumed_writer_appends(tmp_path):
    for step in (1, 2):
        with MetricsWriter(Folder(tmp_path), tensorboard=False) as writer:
            writer.write(step, {"a": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_tensorboard_gets_every_value_by_the_time_the_writer_is_closed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(Folder(tmp_path)) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward": step / 10, "loss": float("nan")})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("reward")] == [(s, s / 10) for s in range(1, 6)]


def test_the_writer_does_not_wait_for_tensorboard_to_load(tmp_path):
    started = time.perf_counter()
    writer = MetricsWriter(Folder(tmp_path))
    writer.write(1, {"a": 1.0})
    # Loading it takes a second or more in a fresh process; here only the order counts.
    assert time.perf_counter() - started < 0.5
    writer.close()


def test_a_tensorboard_that_fails_is_told_at_the_end_and_stops_nothing(tmp_path):
    (tmp_path / "tensorboard").touch()  # a file where its folder should be
    writer = MetricsWriter(Folder(tmp_path))
    writer.write(1, {"a": 1.0})
    assert "TensorBoard events were not all written" in writer.close()
    assert (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_metrics_is_told_without_a_traceback(tmp_path):
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    writer = MetricsWriter(Folder(tmp_path), tensorboard=False)
    with pytest.raises(TidemillError, match="No space left on device"):
        writer.write(1, {"a": 1.0})


# Curves


def test_a_sparkline_rises_with_its_values():
    assert curve.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert curve.sparkline([1, 1, 1], 8) == "▁▁▁"
    assert len(curve.sparkline(list(range(1000)), 20)) == 20
    assert curve.sparkline([0, float("nan"), 1], 3) == "▁ █"
    assert curve.sparkline([], 5) == ""


def dots(chart: str) -> list[tuple[int, int]]:
    """(column, row) of every cell with a dot."""
    lines = chart.splitlines()
    return [(x, y) for y, line in enumerate(lines) for x, c in enumerate(line) if 0x2801 <= ord(c) <= 0x28FF]


def test_a_terminal_curve_has_its_size_its_axis_and_its_shape():
    chart = curve.terminal_curve([i / 99 for i in range(100)], width=40, height=8, title="reward", xlabel="step")
    lines = chart.splitlines()
    assert len(lines) == 8
    assert max(len(line) for line in lines) <= 40
    assert lines[0] == "reward"
    assert "1.0 ┤" in lines[1] and "0.5 ┤" in chart and "0.0 ┤" in lines[-2]
    assert lines[-1].endswith("step 100")
    drawn = dots(chart)
    assert min(drawn)[1] == 6  # the leftmost dots are in the lowest row
    assert max(drawn)[1] == 1  # the rightmost in the highest


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(0.012, 0.023, ("0.012", "0.023")), (1200, 5000, ("1,200", "5,000")), (1e-9, 2e-9, ("1e-09", "2e-09"))],
)
def test_an_axis_has_as_many_decimals_as_it_needs(low, high, labels):
    chart = curve.terminal_curve([low, high])
    assert all(label in chart for label in labels)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [0, 1], [1, float("nan"), 0], [float("inf"), 2.0]])
def test_odd_curves_are_drawn_too(values):
    assert dots(curve.terminal_curve(values))


def test_an_empty_curve_says_so():
    assert curve.terminal_curve([], title="reward") == "reward: nothing to draw yet"
    assert "nothing to draw" in curve.terminal_curve([float("nan")])


def test_a_png_is_saved(tmp_path):
    pytest.importorskip("matplotlib")
    one = curve.Line("one", [(float(i), i % 7) for i in range(1, 40)], [(0.0, 0.1), (20.0, 0.5)])
    other = curve.Line("other", [(1.0, 0.1), (2.0, 0.4)])
    told = curve.save_png(tmp_path / "c.png", {"reward": [one, other], "accuracy": [one]})
    assert "was written to" in told
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "cannot be written" in curve.save_png(tmp_path / "no" / "c.png", {"a": [curve.Line("a", [(0, 0)])]})


def test_without_matplotlib_a_note_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'tidemill[plot]'" in curve.save_png(tmp_path / "c.png", {"a": [curve.Line("a", [(0, 0)])]})


# Progress


def test_plain_progress_is_one_line_a_step_with_the_time_left():
    out, clock = io.StringIO(), Clock()
    with Progress("auto", 10, out=out, clock=clock) as progress:
        clock.now = 2.0
        progress.step(1, {"reward": 0.25, "accuracy": 0.5, "tokens_per_s": 12345.0})
        clock.now = 4.0
        progress.step(2, {"reward": 0.5})
        progress.note("saved")
    assert out.getvalue().splitlines() == [
        "step  1/10  reward 0.250  accuracy 50.0 %  12.3k tokens/s  0:18 left",
        "step  2/10  reward 0.500  accuracy 50.0 %  12.3k tokens/s  0:16 left",
        "saved",
    ]


def test_live_progress_shows_step_metrics_and_a_sparkline():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with Progress("rich", 4, title="quickstart", console=console) as progress:
        progress.doing("rolling out", 3, 8)
        for step in (1, 2, 3):
            progress.step(step, {"reward": step / 3, "accuracy": 0.4})
        progress.note("eval: [50 %]")
    shown = screen.getvalue()
    assert "quickstart" in shown
    assert "step 3/4" in shown
    assert "accuracy 40.0 %" in shown
    assert "▁" in shown and "█" in shown
    assert "eval: [50 %]" in shown


def test_progress_off_says_nothing():
    out = io.StringIO()
    with Progress("off", 3, out=out) as progress:
        progress.step(1, {"reward": 1.0})
        progress.note("x")
    assert out.getvalue() == ""


def test_a_run_without_rewards_shows_its_loss():
    out = io.StringIO()
    with Progress("plain", 3, out=out) as progress:
        progress.step(1, {"loss": 2.0})
    assert "loss 2.000" in out.getvalue()


def test_a_resumed_run_counts_time_left_from_its_own_steps():
    clock = Clock()
    with Progress("off", 100, start_step=90, clock=clock) as progress:
        assert progress.seconds_left() is None
        clock.now = 3.0
        progress.step(91, {})
        assert progress.seconds_left() == pytest.approx(27.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (75, "1:15"), (3700, "1:01:40")])
def test_times_are_said_like_a_clock(seconds, text):
    assert clock_text(seconds) == text
