"""What `tidemill watch` costs: how soon a long run opens, what its server holds, and what it takes of a step's time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ABOUT = "the page of a long run: seconds to open, memory of its server, share of a step's time"
OPTIONS = {"steps": 100_000, "samples_per_step": 50, "follow_s": 20.0, "folder": ""}

REFRESH_S = 0.7  # how long the page gathers events before it asks
METRICS = 45  # of a line, as a GRPO run of one process writes
SHOWN = ["reward", "accuracy", "response_tokens", "entropy", "old_kl", "clip_share_low", "grad_norm", "lr"]
TEXT = "the sum of these two numbers is the first one plus the second one, so the answer must be"


def run(options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options["folder"] or None) as root:
        folder = Path(root) / "long"
        sizes = write(folder, options["steps"], options["samples_per_step"])
        opened = [open_once(folder) for _ in range(options["repeats"])]
        followed = follow(folder, options["steps"], options["samples_per_step"], options["follow_s"])
    return {
        "open_s": sorted(o["open_s"] for o in opened)[len(opened) // 2],
        "open_worst_s": max(o["open_s"] for o in opened),
        "indexed_s": sorted(o["indexed_s"] for o in opened)[len(opened) // 2],
        "page_s": max(o["page_s"] for o in opened),
        "sort_s": max(o["sort_s"] for o in opened),
        "server_mb": max(o["server_mb"] for o in opened),
        **followed,
        **sizes,
        "samples": options["steps"] * options["samples_per_step"],
    }


def write(folder: Path, steps: int, samples: int) -> dict[str, float]:
    """A run's files as a run of so many steps leaves them."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: long\ntrain: {{steps: {steps}}}\nalgorithm: {{name: grpo}}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line(step) for step in range(1, steps + 1))
    with (folder / "samples.jsonl").open("w") as file:
        file.writelines(block(step, samples) for step in range(1, steps + 1))
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "is_stopped": False}))
    return {f"{n}_mb": (folder / f"{n}.jsonl").stat().st_size / 1e6 for n in ("metrics", "samples")}


def line(step: int) -> str:
    base = math.sin(step / 500)
    own = {name: round(base + i, 12) for i, name in enumerate(SHOWN)}
    rest = {f"more/metric_{i:02d}": step * 0.1234567 + i for i in range(METRICS - len(SHOWN) - 1)}
    return json.dumps({"step": step, **own, **rest, "time/step": 1.0}) + "\n"


def block(step: int, samples: int) -> str:
    return "".join(
        f'{{"step": {step}, "id": {step * samples + i}, "group": {step * samples + i // 8}, '
        f'"prompt": "{step}+{i // 8}=", '
        f'"response": "{TEXT} {step + i}", "answer": "{step}", "reward": {(step * 7 + i * 3) % 11 / 10}, '
        f'"correct": false, "finish": "stop", "versions": [{step}]}}\n'
        for i in range(samples)
    )


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A page's server in a process of its own, and what asks it."""
    command = [sys.executable, "-m", "tidemill", "watch", str(folder), "--port", "0", "--token", "bench"]
    source = str(Path(__file__).resolve().parents[1] / "src")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source})
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^/]+/", process.stdout.readline())
        assert found is not None, "the server told no address"
        root = found[0]

        def ask(path: str, /, **asked: Any) -> Any:
            address = f"{root}{path}?{urlencode(asked, doseq=True)}"
            request = urllib.request.Request(address, headers={"authorization": "Bearer bench"})
            return urllib.request.urlopen(request, timeout=60)

        ask("static/style.css").read()
        yield process, ask
    finally:
        process.terminate()
        process.wait(30)


def open_once(folder: Path) -> dict[str, float]:
    """All that a browser asks for until the overview stands, then a page of samples, of a server that knows nothing."""
    with server(folder) as (process, ask):
        began = time.perf_counter()
        for name in ("", "static/style.css", "static/vendor/uPlot.iife.min.js", "static/js/app.js"):
            ask(name).read()
        ask("api/runs").read()
        json.load(ask("api/run", run="long"))
        curves = json.load(ask("api/series", run="long", name=SHOWN, points=800))
        assert len(curves["curves"]["reward"][0]) > 100
        opened = time.perf_counter()
        page = json.load(ask("api/samples", run="long"))
        assert len(page["samples"]) == 50
        paged = time.perf_counter()
        best = json.load(ask("api/samples", run="long", sort="-reward"))
        assert len(best["samples"]) == 50
        ordered = time.perf_counter()
        json.load(ask("api/samples", run="long", q="1234+0"))
        until(lambda: json.load(ask("api/series", run="long", name=SHOWN, points=800))["is_whole"])
        indexed = time.perf_counter()
        json.load(ask("api/series", run="long", name=SHOWN, points=4000))
        return {
            "open_s": opened - began,
            "page_s": paged - opened,
            "sort_s": ordered - paged,
            "indexed_s": indexed - began,
            "server_mb": peak_mb(process.pid),
        }


def follow(folder: Path, steps: int, samples: int, seconds: float) -> dict[str, float]:
    """Share of one core that the server takes while a run makes a step a second and a page follows it."""
    with server(folder) as (process, ask):
        until(lambda: json.load(ask("api/series", run="long", name=SHOWN, points=800))["is_whole"])
        events, lags, last = ask("api/events", run="long"), [], steps
        made: dict[int, float] = {}
        ending = threading.Event()

        def train() -> None:
            step = steps
            while not ending.wait(1.0):
                step += 1
                made[step] = time.perf_counter()
                with (folder / "samples.jsonl").open("a") as file:
                    file.write(block(step, samples))
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(line(step))

        thread = threading.Thread(target=train, daemon=True)
        told = threading.Event()
        threading.Thread(target=listen, args=(events, told), daemon=True).start()
        before, began = cpu_s(process.pid), time.perf_counter()
        thread.start()
        while time.perf_counter() - began < seconds:
            told.wait(2.0)
            time.sleep(REFRESH_S)
            told.clear()
            json.load(ask("api/run", run="long"))
            asked = {"name": SHOWN, "points": 800, "from": last + 1}  # only what is new
            for last in json.load(ask("api/series", run="long", **asked))["curves"]["reward"][0]:
                lags.append(time.perf_counter() - made[last])
        spent = cpu_s(process.pid) - before
        ending.set()
        thread.join()
        return {"step_share": spent / (time.perf_counter() - began), "lag_s": max(lags, default=math.nan)}


def listen(events: Any, told: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):  # the server has ended
        while line := events.readline():
            if line.startswith(b"data"):
                told.set()


def until(look: Any) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if look():
            return
        time.sleep(0.05)
    raise TimeoutError("the server did not come to it within 300 s")


def peak_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
