"""Curves of scaling by the model of time: one recipe on 8 to 3,072 devices, the best layout, and what limits it.

    python benchmarks/plan_scaling.py --out docs/pictures/scaling.png     # the picture, and the table on the terminal

Nothing is measured here: every point is a prediction of the search (`tidemill plan`) with the H200's calibration.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

if TYPE_CHECKING:
    from tidemill.plan.search import Candidate

MODELS = ("qwen2.5-7b", "qwen2.5-32b", "qwen3-235b-a22b")
DEVICES = (8, 64, 512, 3072)
PROMPTS, EACH, PROMPT, RESPONSE, LONGEST = 512, 16, 256, 2000, 8192


@dataclass(frozen=True)
class Point:
    model: str
    devices: int
    best: Candidate | None  # none: no layout fits in memory


def point(model: str, devices: int) -> Point:
    from tidemill.plan import hardware
    from tidemill.plan.lengths import Lengths
    from tidemill.plan.search import Choices, Search
    from tidemill.plan.time_model import TimeModel
    from tidemill.recipe.config import Config

    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16"},
            "data": {"max_prompt_tokens": 512},
            "rollout": {"max_new_tokens": LONGEST},
            "train": {"prompts_per_step": PROMPTS, "samples_per_prompt": EACH},
            "algorithm": "grpo",
            "flow": {"schedule": "async", "max_staleness": 1},
            "cluster": {"executor": "ray"},
        }
    )
    choices = Choices(micro=(16_384,), at_once=(64, 256), recompute=("full",), pp=(1, 4), tp=(1, 4, 8))
    search = Search(
        TimeModel(config, hardware.cluster_of("H200", devices // 8)), Lengths(PROMPT, RESPONSE, LONGEST), choices
    )
    best = search.run(keep=1).best
    made = Point(model, devices, best[0] if best else None)
    print(table([made]).splitlines()[-1], file=sys.stderr, flush=True)
    return made


def table(points: list[Point]) -> str:
    rows = [
        "| model | devices | s a step | tokens/s | of linear | learners + engines | limited by |",
        "|---|---|---|---|---|---|---|",
    ]
    first: dict[str, float] = {}  # tokens/s and device of a model's smallest cluster
    for p in points:
        if p.best is None:
            rows.append(f"| {p.model} | {p.devices:,} | no layout fits | | | | memory |")
            continue
        each = p.best.step.tokens_per_s / p.devices
        share = each / first.setdefault(p.model, each)
        config, step = p.best.config, p.best.step
        layout = f"{config.learn.parallel.ranks} + {config.cluster.rollouts} × {config.rollout.tp}"
        rows.append(
            f"| {p.model} | {p.devices:,} | {step.seconds:.3g} | {step.tokens_per_s:,.0f} | {100 * share:.0f} % "
            f"| {layout} | {step.limit} |"
        )
    return "\n".join(rows)


def draw(points: list[Point], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for model in dict.fromkeys(p.model for p in points):
        own = [(p.devices, p.best.step) for p in points if p.model == model and p.best is not None]
        x, y = [n for n, _ in own], [step.tokens_per_s for _, step in own]
        (line,) = axes.plot(x, y, "o-", label=model)
        axes.plot(x, [y[0] / x[0] * n for n in x], ":", color=line.get_color(), linewidth=1)
        for n, step in own:
            axes.annotate(step.limit, (n, step.tokens_per_s), textcoords="offset points", xytext=(4, -10), fontsize=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(DEVICES), [f"{n:,}" for n in DEVICES])
    axes.set_xlim(right=DEVICES[-1] * 4)
    axes.set_xlabel("H200 devices (dotted: linear)")
    axes.set_ylabel("tokens/s, predicted")
    axes.set_title(f"{PROMPTS} prompts × {EACH} a step, responses of {RESPONSE:,} tokens, async", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="the picture to write")
    asked = options.parse_args()
    points = [point(model, n) for model in MODELS for n in DEVICES]
    print(table(points))
    if asked.out is not None:
        draw(points, asked.out)


if __name__ == "__main__":
    main()
