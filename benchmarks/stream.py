"""A run on a file larger than memory: how long until its lines are found, how fast rows come, and whether memory grows.

tidemill bench stream --gb 20 --json
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "training on a file larger than memory: seconds to find its lines, rows per second, memory over the run"
OPTIONS: dict[str, Any] = {"gb": 20.0, "steps": 400, "rows": 20_000, "folder": ""}
ROW_BYTES, BLOCK = 1000, 10_000  # bytes of a row, and rows written at once


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.data.source import Order, open_source
    from tidemill.data.streamed.stores import line_ends
    from tidemill.recipe.config import Data

    with tempfile.TemporaryDirectory(prefix="tm-stream-", dir=options["folder"] or None) as place:
        os.environ["TIDEMILL_CACHE"] = f"{place}/cache"
        file = Path(place) / "rows.jsonl"
        written = write(file, float(options["gb"]))
        began = time.perf_counter()
        line_ends(file)
        found = time.perf_counter() - began
        source, _ = open_source(Data(source=str(file), columns=COLUMNS, stream=True), 0)
        order, count = Order(source, 0), int(options["rows"])
        began = time.perf_counter()
        usable = sum(1 for _ in source.usable([order(position) for position in range(count)]))
        rows_per_s = usable / (time.perf_counter() - began)
        return {
            "gb": file.stat().st_size / 1e9, "rows": written, "find_lines_s": found, "rows_per_s": rows_per_s,
            **trained(file, Path(place), int(options["steps"])),
        }  # fmt: skip


COLUMNS = {"prompt": "ask", "answer": "is"}


def write(file: Path, gb: float) -> int:
    """Rows of sums, each with padding that no prompt shows."""
    draw, rows = random.Random(0), 0
    with file.open("wb", buffering=1 << 24) as out:
        while out.tell() < gb * 1e9:
            made = []
            for i in range(rows, rows + BLOCK):
                a, b = draw.randrange(10), draw.randrange(10)
                row = f'{{"ask": "{a}+{b}= #{i % 1000}", "is": "{a + b}", "number": {i}, "pad": "'
                made.append(row + "x" * (ROW_BYTES - len(row) - 3) + '"}\n')
            out.write("".join(made).encode())
            rows += BLOCK
    return rows


def trained(file: Path, place: Path, steps: int) -> dict[str, Any]:
    """Run GRPO with a small model on the file, and look at this process's memory after each step."""
    from tidemill.run import start as launch
    from tidemill.run.watcher import Watcher

    own: list[float] = []
    mapped: list[float] = []

    class Watch(Watcher):
        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            own.append(float(status["RssAnon"].split()[0]) / 1e3)
            mapped.append(float(status["RssFile"].split()[0]) / 1e3)

    recipe = {
        "name": "stream",
        "folder": str(place / "runs"),
        "device": "cpu",
        "model": {"tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "window": 64}},
        "data": {"source": str(file), "columns": COLUMNS, "held_out": 50, "max_prompt_tokens": 24, "stream": True},
        "algorithm": {"name": "grpo"},
        "rewards": {"functions": ["last_number"]},
        "rollout": {"max_new_tokens": 8},
        "train": {"steps": steps, "prompts_per_step": 64, "samples_per_prompt": 2},
        "eval": {"size": 50, "every": 0, "before": False, "after": False},
        "checkpoint": {"every": 0},
        "observe": {"progress": "off", "tensorboard": False},
    }
    launch.train(recipe, watch=Watch())
    tenth = math.ceil(steps / 10)
    early, late = statistics.mean(own[tenth : 2 * tenth]), statistics.mean(own[-tenth:])
    return {
        "steps": steps, "second_tenth_mb": early, "last_tenth_mb": late, "growth": late / early - 1,
        "is_flat": late <= 1.02 * early, "mapped_mb": max(mapped), "peak_mb": max(map(sum, zip(own, mapped))),
    }  # fmt: skip
