"""Compare per-step metrics of many tiny runs with golden values, to show that a refactoring changed nothing.

tidemill bench same --json
tidemill bench same --cases grpo,lora
tidemill bench same --record

Cases depend on recipe keys, `tidemill.train`, `tidemill export` and the run folder's metrics.jsonl alone. A run in one
process must give the same bits; a run over ranks or threads, whose sums have no fixed order, must stay within 1e-6.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tidemill
from tidemill import bench

ABOUT = "losses, gradient norms and rewards of tiny runs against golden values: the same bits, or 1e-6 over ranks"
OPTIONS: dict[str, Any] = {"cases": [], "record": False}
GOLDEN = Path(__file__).with_name("same.golden.json")
METRICS = ("loss", "grad_norm", "reward", "kl", "critic/loss", "critic/grad_norm", "eval/reward")
TOLERANCE = 1e-6  # of a metric's largest value in the case
# Cases whose sums have another order than when they were recorded, and why; each stays within the tolerance.
REORDERED = {
    "mixture": "rollout computes a mixture in the lean forward pass, not in the module: 1.2e-7",
    "mixture_replay": "the same: 8.9e-8",
    "recompute": "recomputed layers no longer keep rollout out of the lean forward pass: 6.0e-8",
}
# A policy loss is a sum of positive and negative terms near 1 that may cancel, so its error does not shrink with it.
SMALLEST_SCALE = 1.0

BASE: dict[str, Any] = {
    "name": "same",
    "device": "cpu",
    "threads": 1,
    "model": {
        "tiny": {
            "hidden": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "intermediate": 48,
            "window": 48,
            "alphabet": "0123456789+-*/:=<>; ",
        }
    },
    "data": {"source": "chain", "args": {"terms": 2, "max_value": 4, "pairs": True}, "max_prompt_tokens": 12},
    "rollout": {"max_new_tokens": 8},
    "rewards": {"functions": ["last_number", {"function": "length", "args": {"target": 4}, "label": "length"}]},
    "train": {
        "steps": 3,
        "prompts_per_step": 6,
        "samples_per_prompt": 4,
        "updates_per_step": 2,  # from the second update on, ratios differ from 1 and clipping shows
        "tokens_per_microbatch": 100,
    },
    "learn": {"lr": 3e-3},
    "eval": {"size": 4, "before": False, "after": False},
    "checkpoint": {"every": 0},
    "observe": {"tensorboard": False, "progress": "off"},
}
NIM = ("data={source: nim, args: {}, max_prompt_tokens: 8, held_out: 60}", "rollout.max_new_tokens=38")
SFT = ("algorithm=sft", "train.samples_per_prompt=1")
LENGTH_FIRST = "[{function: length, args: {target: 4}}, last_number]"
TOOLS = "{functions: [calculator], opening: '<', closing: '>', inline: true, result: '{};'}"
JUDGED = "[{function: last_number, weight: 0.5}, {function: model, args: {path: MODEL/reward_model}}]"
PROCESSES = ("cluster.executor=processes", "cluster.memory_mb=256")

# Overrides of BASE. MODEL/NAME stands for the exported model of case NAME.
CASES: dict[str, tuple[str, ...]] = {
    # every algorithm
    "grpo": (),
    "grpo_kl": ("algorithm.kl.coef=0.05",),
    "grpo_one_update": ("train.updates_per_step=1",),
    "grpo_recomputed_logprobs": ("algorithm.old_logprobs=recompute", "algorithm.rollout_correction=token"),
    "dapo": ("algorithm=dapo", "algorithm.overlong.buffer=2", "algorithm.dynamic_sampling_rounds=50"),
    "dr_grpo": ("algorithm=dr_grpo",),
    "gspo": ("algorithm=gspo",),
    "cispo": ("algorithm=cispo",),
    "rloo": ("algorithm=rloo",),
    "remax": ("algorithm=remax",),
    "reinforce_pp": ("algorithm=reinforce_pp", "algorithm.kl={coef: 0.01, estimator: k1, place: reward}"),
    "reinforce_pp_baseline": ("algorithm=reinforce_pp_baseline",),
    "ppo": ("algorithm=ppo", "algorithm.critic.lr=2e-3"),
    "ppo_warm_up": ("algorithm=ppo", "algorithm.critic={passes: 3, warmup_steps: 1}"),
    "ppo_shared_trunk": ("algorithm=ppo", "algorithm.critic.trunk=shared"),
    "kto": ("algorithm=kto",),
    "dpo": ("algorithm=dpo",),
    "ipo": ("algorithm=ipo",),
    "simpo": ("algorithm=simpo",),
    "orpo": ("algorithm=orpo",),
    "sft": SFT,
    "reward_model": ("algorithm=reward_model",),
    "distill": ("algorithm=distill", "algorithm.teacher=MODEL/sft"),
    "rejection": ("algorithm=rejection", f"rewards.functions={LENGTH_FIRST}", "rewards.correct_above=0.2"),
    "learned_reward": (f"rewards.functions={JUDGED}",),
    # what is learned, and how
    "lora": ("learn.lora_rank=4",),
    "dora": ("learn.lora_rank=4", "learn.dora=true"),
    "ema": (*SFT, "train.steps=6", "learn.lr=2e-2", "learn.ema=0.8", "eval.every=1", "eval.size=64"),
    "muon": ("learn.optimizer=muon",),
    "recompute": ("learn.recompute=full",),
    "bfloat16": ("model.dtype=bfloat16", "learn.master=float32"),
    "passes": ("train.passes_per_step=2", "train.updates_per_step=3"),
    "llama": ("model.tiny.architecture=llama",),
    "mixture": ("model.tiny.architecture=qwen3_moe", "model.tiny.experts=4", "learn.moe.balance=aux_loss"),
    "mixture_replay": ("model.tiny.architecture=mixtral", "model.tiny.experts=4", "learn.moe.replay=true"),
    # conversations
    "nim_warm_up": (*NIM, *SFT, "train.prompts_per_step=64", "train.steps=30", "learn.lr=1e-2"),
    "nim": (
        *NIM,
        "environment={name: nim, max_turn_tokens: 1}",
        "rewards=environment",
        "model.path=MODEL/nim_warm_up",
        "model.tiny=null",
    ),
    "tools": (
        "data={source: multiplication, args: {}, max_prompt_tokens: 8}",
        f"environment={{name: tools, args: {TOOLS}}}",
        "rollout.max_new_tokens=24",
    ),
    # engines and schedules
    "hf_engine": ("rollout.engine=hf",),
    "int8_cache": ("rollout.cache_dtype=int8",),
    "streamed": ("flow.schedule=streamed",),
    "streamed_ppo": ("flow.schedule=streamed", "algorithm=ppo"),
    "async_0": ("flow.schedule=async", "flow.max_staleness=0"),
    # several processes
    "local_fsdp": ("learn.parallel.fsdp=2",),
    "local_tp": ("learn.parallel.tp=2",),
    "local_pp": ("learn.parallel.pp=2",),
    "local_cp": ("learn.parallel.cp=2",),
    "local_ep": (
        "model.tiny.architecture=qwen3_moe",
        "model.tiny.experts=4",
        "learn.parallel={fsdp: 2, ep: 2}",
    ),
    "local_fsdp_ppo": ("algorithm=ppo", "learn.parallel.fsdp=2"),
    "processes": PROCESSES,
    "processes_ppo": (*PROCESSES, "algorithm=ppo"),
    "processes_colocated": (*PROCESSES, "cluster.placement=colocated"),
    "processes_two_by_two": (*PROCESSES, "cluster.rollouts=2", "cluster.learners=2"),
    "processes_async_0": (*PROCESSES, "flow.schedule=async", "flow.max_staleness=0"),
    "processes_lora": (*PROCESSES, "learn.lora_rank=4", "cluster.learners=2"),
    "processes_fsdp": (*PROCESSES, "learn.parallel.fsdp=2"),
    "processes_tp": (*PROCESSES, "learn.parallel.tp=2", "cluster.rollouts=2"),
    "processes_engine_tp": (*PROCESSES, "rollout.tp=2"),
}
OVER_RANKS = ("local_", "processes", "async_")  # how names of cases begin whose sums have no fixed order

Steps = dict[str, dict[str, str]]  # step: metric: float.hex, by which a float keeps its bits


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = [str(name) for name in options["cases"]] or list(CASES)
    for name in chosen:
        if name not in CASES:
            raise tidemill.errors.ConfigError(f"bench same has no case {name!r}", f"it has {', '.join(CASES)}")
    if options["record"]:
        return record(chosen)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = {name: list(differences(name, golden["cases"])) for name in chosen}
    differs = [d for case in found.values() for d in case]
    return {
        "cases": len(found),
        "identical": sum(not case for case in found.values()),
        "is_golden_machine": fingerprint() == golden["machine"],
        "golden_commit": golden["commit"],
        "differs": differs,
    }


def differences(name: str, golden: Mapping[str, Any], within: float | None = None) -> Iterator[dict[str, Any]]:
    """Run a case and give each metric that is not what it was. `within` is used instead of the case's own tolerance."""
    if name not in golden:
        yield {"case": name, "step": None, "metric": None, "want": None, "got": "not recorded; --record records it"}
        return
    try:
        got = measure(name)
    except Exception as error:  # a case that fails must not hide the others
        yield {"case": name, "step": None, "metric": None, "want": "a run", "got": f"{type(error).__name__}: {error}"}
        return
    tolerance = within
    if within is None:
        is_exact = golden[name]["compare"] == "bits" and name not in REORDERED
        tolerance = 0.0 if is_exact else TOLERANCE
    for found in compare(golden[name]["steps"], got, tolerance):
        yield {"case": name, **found}


def compare(want: Steps, got: Steps, tolerance: float) -> Iterator[dict[str, Any]]:
    """Give every golden value that `got` lacks or has otherwise; a tolerance of 0 compares bits."""
    for step, metrics in want.items():
        for metric, bits in metrics.items():
            found = got.get(step, {}).get(metric)
            if found == bits:
                continue
            a, b = float.fromhex(bits), math.nan if found is None else float.fromhex(found)
            gap = abs(a - b) / _scale(want, metric)
            if not (tolerance and gap <= tolerance):
                yield {"step": int(step), "metric": metric, "want": a, "got": None if found is None else b, "gap": gap}


def _scale(steps: Steps, metric: str) -> float:
    return max(SMALLEST_SCALE, *(abs(float.fromhex(m[metric])) for m in steps.values() if metric in m))


def measure(name: str) -> Steps:
    """Run a case and read its metrics."""
    with TemporaryDirectory() as folder:
        _train(name, folder)
        lines = (Path(folder) / BASE["name"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps: Steps = {}
    for line in map(json.loads, lines):
        kept = {metric: float(line[metric]).hex() for metric in METRICS if metric in line}
        steps.setdefault(str(line["step"]), {}).update(kept)
    return steps


def _train(name: str, folder: str) -> None:
    overrides = [re.sub(r"MODEL/(\w+)", lambda found: _exported(found[1]), text) for text in CASES[name]]
    tidemill.train({**BASE, "folder": folder}, overrides)


_EXPORTS: list[TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def _exported(name: str) -> str:
    """Train a case and export its model."""
    _EXPORTS.append(TemporaryDirectory())
    folder = Path(_EXPORTS[-1].name)
    _train(name, str(folder))
    command = [sys.executable, "-m", "tidemill", "export", str(folder / BASE["name"]), "--to", str(folder / "model")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder / "model")


def record(chosen: list[str]) -> dict[str, Any]:
    """Write golden values. Each case runs twice: one that does not repeat itself is compared within the tolerance."""
    before = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"] if GOLDEN.exists() else {}
    cases, unsteady = {name: case for name, case in before.items() if name in CASES}, {}
    for name in chosen:
        first, second = measure(name), measure(name)
        gaps = [found["gap"] for found in compare(first, second, 0.0)]
        if gaps:
            unsteady[name] = max(gaps)
        steady = not gaps and not name.startswith(OVER_RANKS)
        cases[name] = {"compare": "bits" if steady else "within", "steps": first}
    head = {"commit": _commit(), "machine": fingerprint(), "metrics": METRICS, "tolerance": TOLERANCE}
    GOLDEN.write_text(_as_text(head, {name: cases[name] for name in CASES if name in cases}), encoding="utf-8")
    return {"recorded": len(chosen), "not_repeatable": unsteady}


def _as_text(head: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    """Give JSON with a line for each case, so that a diff names what changed."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    return f'{json.dumps(head, indent=1)[:-2]},\n "cases": {{\n{lines}\n}}}}\n'


def _commit() -> str:
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty"]
    return subprocess.run(command, cwd=GOLDEN.parent, capture_output=True, text=True).stdout.strip()


def fingerprint() -> dict[str, Any]:
    """Describe what bits depend on: processor, vector width, library versions, and the compiler of our kernels."""
    import torch

    from_bench = bench.machine()
    compiler = shutil.which("cc")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if compiler else "none"
    return {
        "processor": from_bench["processor"],
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "compiler": said.splitlines()[0],
        "torch": torch.__version__,
        **{name: _version(name) for name in ("numpy", "transformers")},
    }


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)
