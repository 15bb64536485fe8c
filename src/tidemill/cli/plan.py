"""`tidemill plan`, `calibrate`, `tune`: predict a run on a cluster, measure a device, measure the best few layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.frame import SCALE, Overrides, Recipe, app, check_new_file, say

if TYPE_CHECKING:
    from tidemill.plan.search import Found
    from tidemill.plan.time_model import TimeModel

Cluster = Annotated[
    str,
    typer.Option(
        "--cluster", help="a cluster's file, or such as 8xH100 or 24x16x910C (nodes × devices); none: this machine"
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option("--lengths", help="mean lengths in tokens (RESPONSE or PROMPT,RESPONSE), a run's folder, or full"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Measured = Annotated[
    str | None, typer.Option("--calibration", help="file that `tidemill calibrate` wrote; none: the device's own")
]


@app.command(rich_help_panel=SCALE)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    cluster: Cluster = "",
    goal: Annotated[str, typer.Option(help="what to optimise: throughput, cost or deadline")] = "throughput",
    hours: Annotated[
        float | None, typer.Option(help="with --goal deadline: hours that the run may take", min=0.001)
    ] = None,
    lengths: Lengths = None,
    keep: Annotated[int, typer.Option(help="how many layouts to show", min=1)] = 4,
    write: Annotated[Path | None, typer.Option("--write", help="write a recipe with the best layout")] = None,
    calibration: Measured = None,
    as_json: Json = False,
) -> None:
    """Find the best layout for a recipe on a cluster, with its time, memory, cost and energy."""
    from tidemill.errors import ConfigError, did_you_mean
    from tidemill.plan import words
    from tidemill.plan.ask import asked
    from tidemill.plan.search import Search
    from tidemill.plan.search import overrides as settings_of
    from tidemill.recipe import load as recipes

    goals = ("throughput", "cost", "deadline")
    if goal not in goals:
        raise ConfigError(f"there is no goal {goal!r}{did_you_mean(goal, goals)}", "use throughput, cost or deadline")
    if goal == "deadline" and hours is None:
        raise ConfigError("--goal deadline needs --hours, the time that the run may take", "for example --hours 8")
    check_new_file("--write", write)
    question = asked(recipe, overrides or (), cluster, lengths, calibration)
    found = Search(question.model, question.lengths).run(goal, keep, hours)  # type: ignore[arg-type]
    if not found.best:
        raise ConfigError(
            f"no layout of this recipe fits on {question.machines.topology.name}: the smallest needs {found.nearest} a "
            f"device, which has {question.machines.sheet.memory_bytes / 1e9:.0f} GB",
            "use more devices, a shorter rollout.max_new_tokens, or LoRA (learn.lora_rank=16)",
        )
    if write is not None:
        best = recipes.load(question.config, settings=settings_of(found.best[0].config)).config
        write.write_text(recipes.dump(best), encoding="utf-8")
    if as_json:
        print(json.dumps(words.found_plain(found, question.model, question.said)))
        return
    _show(found, question.model, question.said)
    if write is not None:
        say(f"the recipe was written to {write}; run it with tidemill train {write}")


def _show(found: Found, model: TimeModel, said: str) -> None:
    from tidemill.plan import words

    peak = model.machines.sheet.flops
    say(f"{model.machines.topology.name}: {model.machines.devices} devices; {found.looked_at:,} layouts, of which "
        f"{found.too_large:,} do not fit in memory")  # fmt: skip
    for number, c in enumerate(found.best, 1):
        came, what, limit = words.lines(c, peak)
        say(f"{number}. {came}", style="bold")
        say(f"   {what}")
        say(f"   limited by {limit}")
    if found.as_written is not None:
        came, what, limit = words.lines(found.as_written, peak)
        say(f"As written: {came}\n   {what}\n   limited by {limit}", style="dim")
    say("Why the first:")
    for reason in found.best[0].why:
        say(f"  {reason}")
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.best[0].step.parts.items() if seconds)
    say(f"Its step: {parts}")
    say(f"Rests on {said}", style="dim")


@app.command(rich_help_panel=SCALE)
def calibrate(
    out: Annotated[
        Path | None, typer.Option(help="the file to write; none: where `tidemill plan` looks for it")
    ] = None,
    limit: Annotated[
        float, typer.Option(help="time limit in seconds; what is not measured in time keeps its default", min=20)
    ] = 170.0,
) -> None:
    """Measure this device for `tidemill plan`: matrix products, engine steps, learner passes. Takes three minutes."""
    from tidemill.plan import calibration, hardware
    from tidemill.plan.calibrate import calibrate as measure

    check_new_file("--out", out, may_exist=True)
    made = measure(lambda text: say(text, style="dim"), limit_s=limit)
    name = "cpu" if made.device == "cpu" else hardware.find(made.device) or made.device
    file = out or calibration.own_folder() / calibration.file_name(name, made.threads)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(made.dump(), encoding="utf-8")
    fits = ", ".join(f"{phase} {100 * error:.1f} %" for phase, error in made.errors.items())
    say(f"{made.device}: {made.flops / 1e12:.3g} TFLOP/s, {made.bytes_per_s / 1e9:.4g} GB/s; off in the median: {fits}")
    say(f"written: {file}")


@app.command(rich_help_panel=SCALE)
def tune(
    recipe: Recipe,
    overrides: Overrides = None,
    keep: Annotated[int, typer.Option(help="how many layouts to measure", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="timed steps of each layout, after one that is not timed", min=1)] = 2,
    lengths: Lengths = None,
    write: Annotated[Path | None, typer.Option("--write", help="write a recipe with the fastest layout")] = None,
    as_json: Json = False,
) -> None:
    """Run a few steps of the recipe with each of the best layouts on this machine, and compare."""
    from tidemill.plan.ask import asked
    from tidemill.plan.search import overrides as settings_of
    from tidemill.recipe import load as recipes
    from tidemill.run import tune as tuning

    check_new_file("--write", write)
    question = asked(recipe, overrides or (), "", lengths)
    tried = tuning.tune(question.model, question.lengths, keep, steps, lambda text: None if as_json else say(text))
    if write is not None:
        best = recipes.load(question.config, settings=settings_of(tried[0].config)).config
        write.write_text(recipes.dump(best), encoding="utf-8")
    if as_json:
        print(json.dumps([t.plain() for t in tried]))
    elif write is not None:
        say(f"the recipe was written to {write}; run it with tidemill train {write}")
