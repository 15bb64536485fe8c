"""The rollout benchmark's own promises: equal work for everyone, a deadline that holds, failures in the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import rollout  # noqa: E402

import tidemill  # noqa: E402
from tidemill.errors import ConfigError  # noqa: E402


def test_the_tail_is_the_same_for_every_engine_and_has_long_samples() -> None:
    first, second = rollout._work("tail-1.5b"), rollout._work("tail-1.5b")
    assert first.prompts == second.prompts and (first.lengths == second.lengths).all()
    assert first.lengths.shape == (64, 8) and first.lengths.max() == 2048 and first.lengths.min() >= 1


def test_an_engine_that_starts_slowly_serves_all_cases_of_a_shape() -> None:
    names = ["fixed-1.5b", "tail-1.5b", "fixed-7b"]
    assert rollout._by_shape("vllm", names) == {"1.5b": names[:2], "7b": names[2:]}
    assert rollout._by_shape("native", names) == {name: [name] for name in names}


def test_what_hangs_is_stopped_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging.py"
    hanging.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(rollout, "__file__", str(hanging))
    monkeypatch.setenv("OUT", str(tmp_path))
    began = time.perf_counter()
    apart = rollout.Apart("cpu", 1, deadline_s=2.0, started=began)
    rows = apart.measure("native", "1.5b", ["fixed-1.5b"])
    assert rows == {"fixed-1.5b": {"error": "native was stopped at the deadline"}}
    assert time.perf_counter() - began < 60
    rows = apart.measure("hf", "1.5b", ["fixed-1.5b"])
    assert rows == {"fixed-1.5b": {"error": "hf was not started: the deadline was over"}}


def test_a_deadline_counts_from_the_start_of_the_process() -> None:
    apart = rollout.Apart("cpu", 1, deadline_s=1.0)
    assert time.perf_counter() - apart.started > 0.5  # of importing torch alone


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_process_behind(tmp_path: Path, how: signal.Signals) -> None:
    """Also none that an engine has started; and asked politely it shows what it has."""
    hanging, pids = tmp_path / "hanging.py", tmp_path / "pids"
    hanging.write_text(
        "import os, pathlib, subprocess, time\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pids)!r} + '.new').write_text(f'{{os.getpid()}} {{other.pid}}')\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "time.sleep(600)\n"
    )
    driver = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from benchmarks import rollout\n"
        f"rollout.__file__ = {str(hanging)!r}\n"
        "sys.argv = ['rollout', '--json', '--device', 'cpu', '--cases', 'fixed-quickstart']\n"
        "rollout.main()\n"
    )
    env = {**os.environ, "OUT": str(tmp_path)}
    bench = subprocess.Popen([sys.executable, "-c", driver], env=env, stdout=subprocess.PIPE, text=True)
    wait_for(pids.exists)
    started = [int(pid) for pid in pids.read_text().split()]
    bench.send_signal(how)
    shown, _ = bench.communicate(timeout=30)
    wait_for(lambda: not any(is_running(pid) for pid in started))
    if how == signal.SIGTERM:
        assert json.loads(shown)["cases"]["fixed-quickstart"]["error"] == "native was stopped from outside"


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    until = time.perf_counter() + limit_s
    while not condition():
        assert time.perf_counter() < until
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_table_shows_ratios_and_what_failed() -> None:
    case: dict[str, Any] = {"tokens_per_s": 300.0, "peers": {"vllm": {"tokens_per_s": 100.0}, "hf": {"error": "x"}}}
    text = rollout.ratio_table({"cases": {"fixed-1.5b": case}})
    assert "3.00x" in text and "nan" in text


def test_an_unknown_case_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"fixed-2b"):
        rollout.run({"cases": "fixed-2b", "device": "cpu", "peers": [], "repeats": 1, "deadline_s": 0})


def test_vllm_runs_as_it_comes_and_not_with_what_importing_tidemill_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in tidemill.OPENMP.items():
        monkeypatch.setenv(name, value)
    words, env = rollout.Apart("cpu", 2, 0.0)._command("vllm_mp", ["fixed-quickstart"], tmp_path / "row.json")
    assert not tidemill.OPENMP.keys() & env.keys() and env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    peer = Path(words[1]).read_text()
    assert "import tidemill" not in peer and "from tidemill" not in peer and "from benchmarks" not in peer
    job = json.loads((tmp_path / "row.job").read_text())
    assert job["sequences"] == 256 and job["repeats"] == 2 and (Path(job["folder"]) / "config.json").exists()
    work = rollout._work("fixed-quickstart")
    assert job["cases"]["fixed-quickstart"]["prompts"] == work.prompts
    row = rollout._vllm_row(work, {"seconds": [2.0, 4.0, 4.0], "start_s": 9.0})
    assert row["tokens_per_s"] == work.tokens / 4.0 and row["step_ms"] == 4000 / 128 and row["start_s"] == 9.0
