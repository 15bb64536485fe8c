"""Predictions of the model of time against measurements: whole steps on an H200 and on processes of a CPU, the search's
choice against a sweep, and tables that other systems published.

    tidemill bench plan --json                     # compares with plan.measured.json: seconds
    tidemill bench plan --record FOLDER            # what gpu_plan.py or _plan_cpu.py wrote becomes plan.measured.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ABOUT = "the model of time: predicted against measured steps, the search's choice, other systems' published figures"
OPTIONS: dict[str, Any] = {"record": "", "published_only": False}
MEASURED = Path(__file__).resolve().with_name("plan.measured.json")
KEPT_LENGTHS = 384  # of each CPU run, evenly over the sorted ones
WARM = 2  # steps of a CPU run that are not compared


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from benchmarks import _plan_published

    if options["record"]:
        record(Path(options["record"]))
    rows = _plan_published.table()
    order = _plan_published.orders(rows)
    found: dict[str, Any] = {
        "published": rows,
        "published_median_error": median(abs(r["error"]) for r in rows),
        "orders_right": sum(pair["is_right"] for pair in order),
        "orders": len(order),
        "orders_wrong": [pair for pair in order if not pair["is_right"]],
    }
    if not MEASURED.exists() or options["published_only"]:
        return found
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    errors: list[float] = []
    if "h200" in measured:
        h200 = accelerator_rows(measured["h200"])
        own = [abs(r["error"]) for r in h200 if not r["is_swept"]]
        found |= {"h200": h200, "h200_median_error": median(own), "h200_worst_error": max(own)}
        found["search"] = chosen(measured["h200"])
        errors += own
    if "cpu" in measured:
        cpu = cpu_rows(measured["cpu"])
        found |= {"cpu": cpu, "cpu_median_error": median(abs(r["error"]) for r in cpu)}
        found["replay_worst_error"] = max(abs(r["replay_error"]) for r in cpu)
        errors += [abs(r["error"]) for r in cpu]
    if errors:
        found |= {"median_error": median(errors), "worst_error": max(errors)}
    return found


# An accelerator


def accelerator_rows(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    from benchmarks._plan_settings import everything, sweep

    known = {setting.name: setting for setting in everything()}
    swept = {setting.name for setting in sweep()}
    rows = []
    for one in measured:
        setting = known.get(one["setting"])
        if setting is None:
            continue
        step = step_of(setting, one["made"])
        rows.append(
            {
                "setting": setting.name,
                "is_swept": setting.name in swept,
                "measured_s": one["seconds"],
                "predicted_s": step.seconds,
                "error": step.seconds / one["seconds"] - 1,
                "rollout_s": [one["rollout"], step.parts["rollout"]],
                "learn_s": [one["learn"], step.parts["learn"]],
            }
        )
    return rows


def step_of(setting: Any, made: float) -> Any:
    """`made`: response tokens of the step: those that ended by themselves were shorter."""
    from tidemill.plan import step_estimate
    from tidemill.plan.lengths import Lengths

    model = model_of(setting)
    each = made / setting.prompts / setting.each
    return step_estimate.estimate(model, Lengths(setting.prompt, each, setting.response, 0.0))


def model_of(setting: Any) -> Any:
    from benchmarks._plan_settings import model_settings
    from tidemill.models.shape import parse
    from tidemill.plan import hardware
    from tidemill.plan.time_model import TimeModel
    from tidemill.recipe.config import Config

    shape = parse(model_settings(setting.model))
    assert shape is not None
    config = Config.model_validate(setting.recipe("model", "prompts.jsonl", "runs"))
    return TimeModel(config, hardware.cluster_of("H200", 1, 1), shape=replace(shape, parameters=shape.total))


def chosen(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The search's choice among the settings of the sweep, and how far from the best it is as measured."""
    from benchmarks._plan_settings import SWEPT_AT_ONCE, SWEPT_MICRO, SWEPT_RECOMPUTE, sweep
    from tidemill.plan.lengths import Lengths
    from tidemill.plan.search import Choices, Search

    settings = list(sweep())
    took = {one["setting"]: one["seconds"] for one in measured}
    times = {s: took[s.name] for s in settings if s.name in took}
    if not times:
        return {}
    choices = Choices(micro=SWEPT_MICRO, at_once=SWEPT_AT_ONCE, recompute=SWEPT_RECOMPUTE)
    first = settings[0]
    search = Search(model_of(first), Lengths(first.prompt, first.response, first.response, 0.0), choices)
    best = search.run(keep=1).best[0].config
    pick = next(
        s
        for s in settings
        if s.micro == best.train.tokens_per_microbatch
        and s.concurrent == best.rollout.concurrent
        and s.learn.get("recompute", "none") == best.learn.recompute
    )
    least = min(times, key=lambda s: times[s])
    return {
        "settings": len(times),
        "chosen": pick.name,
        "chosen_s": times.get(pick),
        "best": least.name,
        "best_s": times[least],
        "off": times[pick] / times[least] - 1 if pick in times else None,
        "worst_s": max(times.values()),
    }


# Processes of a CPU


def cpu_rows(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    from tidemill.plan import calibration, hardware
    from tidemill.plan.lengths import Lengths
    from tidemill.plan.simulate.run import simulate
    from tidemill.plan.time_model import TimeModel
    from tidemill.recipe.config import Config

    made = calibration.parse(json.dumps(measured["calibration"]), "plan.measured.json")
    machines = replace(hardware.this_machine(), cores=measured["cores"])
    rows = []
    for one in measured["runs"]:
        config = Config.model_validate(one["config"])
        model = TimeModel(config, machines, made=made)
        lengths = Lengths(
            one["prompt"], sum(one["lengths"]) / len(one["lengths"]), config.rollout.max_new_tokens,
            seen=tuple(one["lengths"]),
        )  # fmt: skip
        found = simulate(model, lengths, steps=config.train.steps, seed=1)
        step_s = found.step_s(WARM)
        rows.append(
            {
                "run": one["name"],
                "measured_s": one["step_s"],
                "predicted_s": step_s,
                "error": step_s / one["step_s"] - 1,
                "replay_error": one["replay_error"],
            }
        )
    return rows


# Recording


def record(folder: Path) -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    if (folder / "settings.jsonl").exists():
        measured["h200"] = _accelerator(folder / "settings.jsonl")
    if (folder / "cpu.json").exists():
        measured["cpu"] = _processes(folder)
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def _accelerator(file: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if "seconds" not in one:
            continue
        lap = min(one["laps"][1:], key=lambda lap: lap["seconds"])
        found[one["setting"]] = {
            "setting": one["setting"],
            "seconds": round(one["seconds"], 4),
            "rollout": round(lap["time/rollout"], 4),
            "learn": round(lap["time/learn"], 4),
            "made": lap["made"],
            "peak_gib": one["peak_gib"],
        }
    return list(found.values())


def _processes(folder: Path) -> dict[str, Any]:
    from tidemill.device import host
    from tidemill.observe.run_folder import RunFolder, metrics_of
    from tidemill.plan.lengths import lines_of
    from tidemill.plan.simulate.replay import replay

    runs = []
    for own in sorted(path.parent for path in folder.glob("*/config.yaml")):
        steps = [m["time/step"] for m in metrics_of(own)][WARM:]
        samples = lines_of(own / "samples.jsonl")
        lengths = sorted(len(line["tokens"]) for line in samples)
        again = replay(own)
        config = RunFolder.open(own, exclusive=False).config
        runs.append(
            {
                "name": own.name,
                "config": json.loads(config.model_copy(update={"folder": "runs"}).model_dump_json()),
                "step_s": median(steps),
                "steps_s": [round(s, 4) for s in steps],
                "prompt": sum(len(line["prompt"]) for line in samples) / len(samples),
                "lengths": lengths[:: max(1, len(lengths) // KEPT_LENGTHS)],
                "replay_error": round(again.error, 4),
            }
        )
    calibration = json.loads((folder / "cpu.json").read_text(encoding="utf-8"))
    return {"calibration": calibration, "cores": host.cores(), "runs": runs}
