"""What every algorithm learns on its recipe in recipes/cpu: held-out accuracy before and after, for several seeds.

The RL algorithms, the game and the learned reward are judged by accuracy; those that learn from pairs also by how often
they prefer the right one. Distillation is set beside the GRPO run that made its teacher, by samples.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "held-out accuracy before and after each algorithm's CPU recipe, over seeds"
# only: names of recipes, all when empty. kept: a file that holds finished runs, to go on from.
OPTIONS = {"seeds": 3, "only": [], "kept": ""}
TEACHER_STEPS = 80
BELOW, ABOVE = 0.4, 0.75
SPREAD = 0.4  # of returns of 0 and 1: fewer than 80 % are alike


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.algorithms.shared.registry import names as known

    names = list(options["only"]) or [*known(), "game", "tools", "grpo_reward_model"]
    kept = Path(str(options["kept"])) if options["kept"] else None
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    with tempfile.TemporaryDirectory(prefix="tidemill-learning-") as folder:
        bench = Bench(Path(folder))
        for name in names:
            for seed in range(int(options["seeds"])):
                if any((r["name"], r["seed"]) == (name, seed) for r in rows):
                    continue
                rows.append({"name": name, "seed": seed, **bench.measure(name, seed)})
                if kept:
                    with kept.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    return {name: table([r for r in rows if r["name"] == name]) for name in names}


class Bench:
    """Runs recipes in one folder, from one warm start and one teacher that are made when first needed."""

    def __init__(self, place: Path) -> None:
        self.place, self.models = place, dict[str, str]()

    def measure(self, name: str, seed: int) -> dict[str, Any]:
        more: list[str] = [] if name in ("game", "tools") else [f"model.path={self.model('warm-start')}"]
        if name == "distill":
            more.append(f"algorithm.teacher={self.model('teacher')}")
        if name == "grpo_reward_model":
            path = self.model("judge", seed)  # a reward model of its own for every seed
            more.append(
                f"rewards.functions=[{{function: exact, weight: 0.0}}, {{function: model, args: {{path: {path}}}}}]"
            )
        summary, metrics, _ = self.train(name, seed, *more)
        last = metrics[-5:]
        found: dict[str, Any] = {
            "before": summary.accuracy_before,
            "after": summary.accuracy_after,
            "seconds": summary.seconds,
            "samples": sum(m.get("samples", 0.0) for m in metrics) or len(metrics) * samples_per_step(name),
            "loss_first": mean(metrics[:5], "loss"),
            "loss_last": mean(last, "loss"),
        }
        for key in ("preference_accuracy", "margin", "critic/explained_variance", "turns"):
            if key in metrics[-1]:
                found[key] = mean(last, key)
        if "critic/explained_variance" in metrics[-1]:
            found |= explained(metrics)
        for key in ("dropped_groups", "refilled_groups"):
            found[key] = sum(m.get(key, 0.0) for m in metrics)
        if name == "distill":
            found["teacher"] = float(self.models["teacher accuracy"])
        return found

    def model(self, which: str, seed: int = 0) -> str:
        """A folder with the trained model, made when first asked for."""
        key = f"{which}-{seed}" if seed else which
        if key not in self.models:
            from tidemill.run import trained

            more = [] if which == "warm-start" else [f"model.path={self.model('warm-start')}"]
            recipe, chosen = ("grpo", 100) if which == "teacher" else (which, seed)
            if which == "teacher":
                more.append(f"train.steps={TEACHER_STEPS}")
            summary, _, folder = self.train(recipe, chosen, *more)
            trained.export(folder, self.place / f"model-{key}")
            self.models |= {key: str(self.place / f"model-{key}"), f"{key} accuracy": str(summary.accuracy_after)}
        return self.models[key]

    def train(self, name: str, seed: int, *more: str) -> tuple[Any, list[dict[str, Any]], Path]:
        import tidemill

        chosen = f"{name}-{seed}-{time.monotonic_ns()}"
        fixed = [f"folder={self.place}", f"name={chosen}", f"seed={seed}", "threads=1", "observe.tensorboard=false"]
        summary = tidemill.train(f"cpu/{name}", [*fixed, "observe.progress=off", *more])
        lines = (self.place / chosen / "metrics.jsonl").read_text().splitlines()
        return summary, [m for m in map(json.loads, lines) if "loss" in m], self.place / chosen


def explained(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """By the critic: at its best step, and on average while the policy learns and returns still differ."""
    learning = [m for m in metrics if "grad_norm" in m and m["critic/return_std"] > SPREAD]
    best = max(m["critic/explained_variance"] for m in metrics)
    return {"explained_variance_best": best, "explained_variance_mean": mean(learning, "critic/explained_variance")}


def samples_per_step(name: str) -> int:
    from tidemill.recipe import load as recipe

    train = recipe.load(f"cpu/{name}").config.train
    return train.prompts_per_step * train.samples_per_prompt


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = [k for k in rows[0] if k not in ("name", "seed") and all(isinstance(r[k], int | float) for r in rows)]
    result: dict[str, Any] = {k: statistics.median(r[k] for r in rows) for k in keys}
    for end in ("before", "after"):
        if end in keys:
            result |= {f"{end}_lowest": min(r[end] for r in rows), f"{end}_highest": max(r[end] for r in rows)}
            result[f"{end}_runs"] = [r[end] for r in rows]
    result["seeds"] = len(rows)
    if "after" in keys:
        result["learned"] = sum(r["before"] < BELOW and r["after"] > ABOVE for r in rows)
    return result


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(r[key] for r in rows) / len(rows)
