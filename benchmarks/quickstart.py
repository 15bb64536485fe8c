"""The quickstart, seed by seed: held-out accuracy before and after, and the time it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "the quickstart's run on several seeds: accuracy before and after, seconds from command to end"
OPTIONS: dict[str, Any] = {"seeds": [0, 1, 2, 3, 4], "threads": 0}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    seeds = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options["seeds"]:
            words = [f"seed={seed}", f"name=seed-{seed}", f"folder={folder}", "observe.progress=off"]
            words += [f"threads={options['threads']}"] if options["threads"] else []
            code = "from tidemill.cli import main; main()"
            started = time.perf_counter()
            command = [sys.executable, "-c", code, "train", "quickstart", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            summary = json.loads((Path(folder) / f"seed-{seed}" / "summary.json").read_text())
            kept = {k: summary[k] for k in ("accuracy_before", "accuracy_after", "steps", "tokens_per_s")}
            seeds[str(seed)] = {**kept, "wall_s": seconds}
            print(seed, seeds[str(seed)], file=sys.stderr, flush=True)
    return {
        "seeds": seeds,
        "accuracy_before_max": max(s["accuracy_before"] for s in seeds.values()),
        "accuracy_after_min": min(s["accuracy_after"] for s in seeds.values()),
        "wall_s_max": max(s["wall_s"] for s in seeds.values()),
    }
