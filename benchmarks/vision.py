"""What small models learn from pictures, and whether they really look: with every image blank the same run must stay
at chance.

tidemill bench vision --json
tidemill bench vision --only count --seeds 1
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._recipe_runs import Came, Job, run_all

ABOUT = "held-out accuracy of a small model that looks, by task and seed, and with its images blanked"
RECIPES = {"count": "vision/count", "seen_grid": "vision/seen-grid"}
BLANK = "data.images.blank=true"
OPTIONS = {
    "only": [],  # tasks, all when empty
    "seeds": 3,
    "at_once": 1,  # runs side by side
    "limit_s": 36_000,
    "settings": [],  # more settings of every run
    "folder": "",  # where runs are kept; none: a temporary folder
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    tasks = [task for task in RECIPES if not options["only"] or task in options["only"]]
    jobs = [
        Job(RECIPES[task], seed, (*options["settings"], *more), f"{task}-{kind}")
        for seed in range(int(options["seeds"]))
        for task in tasks
        for kind, more in (("seen", ("data.images.blank=false",)), ("blind", (BLANK,)))
    ]
    with tempfile.TemporaryDirectory(prefix="tidemill-vision-") as temporary:
        place = Path(options["folder"] or temporary)
        place.mkdir(parents=True, exist_ok=True)
        came = run_all(jobs, place, int(options["at_once"]), float(options["limit_s"]))
    found = {task: ([c for c in came if c.job.label == f"{task}-{k}"] for k in ("seen", "blind")) for task in tasks}
    result: dict[str, Any] = {"accuracy": {}, "blind_accuracy": {}}
    for task, (seen, blind) in found.items():
        result["accuracy"][task] = of_seeds(seen)
        result["blind_accuracy"][task] = [c.after["greedy"] for c in blind]
    return result


def of_seeds(came: Sequence[Came]) -> dict[str, list[float]]:
    return {
        "before": [c.before["greedy"] for c in came],
        "after": [c.after["greedy"] for c in came],
        "steps": [c.after["step"] for c in came],
        "seconds": [round(c.seconds, 1) for c in came],
    }
