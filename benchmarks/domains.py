"""What the four domains' recipes make of SmolLM2-135M: base, supervised, reinforced, on held-out cases.

tidemill bench domains --json                      # one GPU
tidemill bench domains --size cpu --only health    # 2 CPU cores
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._recipe_runs import Came, Job, base, run_all

ABOUT = "held-out accuracy of the domains' recipes: base, supervised and reinforced, over seeds"
NAMES = ("finance", "health", "industry", "service")
OPTIONS = {
    "size": "gpu",  # gpu, or cpu: the recipes' size for two cores
    "only": [],  # names of domains, all when empty
    "seeds": 3,
    "at_once": 1,  # runs side by side
    "limit_s": 36_000,
    "settings": [],  # more settings of every run
    "folder": "",  # where runs are kept; none: a temporary folder
    "with_base": True,
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    end = "-cpu" if options["size"] == "cpu" else ""
    names = [name for name in NAMES if not options["only"] or name in options["only"]]
    jobs = [
        Job(f"domains/{name}{end}", seed, tuple(options["settings"]), name)
        for seed in range(int(options["seeds"]))
        for name in names
    ]
    with tempfile.TemporaryDirectory(prefix="tidemill-domains-") as temporary:
        place = Path(options["folder"] or temporary)
        place.mkdir(parents=True, exist_ok=True)
        came = run_all(jobs, place, int(options["at_once"]), float(options["limit_s"]))
        result = {name: of_seeds([c for c in came if c.job.label == name]) for name in names}
        if options["with_base"]:
            for name in names:
                result[name]["base"] = base("smollm2-135m", f"domains/{name}{end}", 200, 1)["greedy"]
    return result


def of_seeds(came: Sequence[Came]) -> dict[str, Any]:
    """Return a domain's accuracies by seed; of health also how often its safety rule was broken in the last step."""
    result: dict[str, Any] = {
        "sft": [c.before["greedy"] for c in came],
        "rl": [c.after["greedy"] for c in came],
        "steps": [int(c.after["step"]) for c in came],
        "seconds": [c.seconds for c in came],
    }
    broken = [[m["reward/health.broken"] for m in c.metrics if "reward/health.broken" in m] for c in came]
    if any(broken):
        result["broken"] = [{"first_step": of_one[0], "last_step": of_one[-1]} for of_one in broken if of_one]
    return result
