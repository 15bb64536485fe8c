"""The learner on 1, 2 and 4 ranks of this machine: bytes sent against the textbook, memory against the estimate,
checkpoints under load, and a GRPO run on several layouts.

    tidemill bench parallel --json
    tidemill bench parallel --learning true     # also trains the quickstart's task on each layout; minutes
    tidemill bench parallel --learning true --model FOLDER     # from a warm start that is there already
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ABOUT = "the learner across ranks: bytes sent, memory per rank, checkpoints under load, learning"
OPTIONS: dict[str, Any] = {
    "learning": False,
    "model": "",
    "steps": 40,
    "seeds": 1,
    "rounds": 8,
    "hidden": 256,
    "layers": 4,
}

LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "fsdp2": {"fsdp": 2},
    "tp2": {"tp": 2},
    "replicate2": {"replicate": 2},
    "fsdp4": {"fsdp": 4},
    "tp4": {"tp": 4},
    "fsdp2_tp2": {"fsdp": 2, "tp": 2},
    "replicate2_fsdp2": {"replicate": 2, "fsdp": 2},
}
STUDY: dict[str, dict[str, int]] = {"1": {}, "fsdp2": {"fsdp": 2}, "tp2": {"tp": 2}, "fsdp2_tp2": {"fsdp": 2, "tp": 2}}
TOKENS = 2048  # of one micro-batch
VOCABULARY = 1024
LENGTH, PROMPT = 257, 32  # of a sample: its last token is only predicted


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    from tidemill.cluster.start.ranks import Ranks

    result: dict[str, Any] = {}
    with Ranks(4, preload=["benchmarks.parallel", "benchmarks._traffic"]) as ranks:
        for name, parallel in LAYOUTS.items():
            size = _ranks(parallel)
            found = ranks.call(measure, parallel, options["hidden"], options["layers"], options["repeats"], on=size)
            result |= {f"{name}/{key}": value for key, value in _worst(found).items()}
        with tempfile.TemporaryDirectory() as place:
            found = ranks.call(
                save_under_load, Path(place), options["hidden"], options["layers"], options["rounds"], on=2
            )
        result |= {f"checkpoint/{key}": value for key, value in found[0].items()}
    counted = [result[f"{n}/sent_over_minimum"] for n in LAYOUTS if n != "1"]
    result["sent_over_minimum_worst"] = max(counted)
    result["memory_error_worst"] = max(abs(result[f"{n}/memory_over_estimate"] - 1) for n in LAYOUTS)
    if options["learning"]:
        result |= learning(int(options["steps"]), int(options["seeds"]), str(options["model"]))
    return result


def _ranks(parallel: Mapping[str, int]) -> int:
    product = 1
    for name in ("replicate", "fsdp", "cp", "tp", "pp"):
        product *= parallel.get(name, 1)
    return product


def _worst(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: the one that sent, held or waited most."""
    out = {key: max(one[key] for one in found) for key in found[0] if key != "seconds"}
    return out | {"seconds": statistics.median(one["seconds"] for one in found)}


# On the ranks


def recipe(parallel: Mapping[str, int], hidden: int, layers: int) -> Any:
    from tidemill.recipe.config import Config

    letters = "".join(chr(0x4E00 + i) for i in range(VOCABULARY - 3))
    tiny = {
        "hidden": hidden, "layers": layers, "heads": 8, "kv_heads": 4, "intermediate": 3 * hidden, "window": 4096,
        "alphabet": letters, "architecture": "llama",
    }  # fmt: skip
    return Config.model_validate(
        {
            "model": {"tiny": tiny},
            "algorithm": "grpo",
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {"max_new_tokens": LENGTH - PROMPT},
            "train": {"tokens_per_microbatch": 2 * TOKENS},
            "learn": {"lr": 1e-4, "parallel": dict(parallel), "share_prompts": False, "logprob_chunk": 256},
        }
    )


def samples(ranks: int, seed: int) -> Any:
    """One micro-batch of TOKENS inputs for each data-parallel rank: as many everywhere, so that sums are exact."""
    import numpy as np

    from tidemill.batch import Batch, Column

    rng = np.random.default_rng(seed)
    length, prompt = LENGTH, PROMPT
    rows = ranks * TOKENS // (length - 1)
    return Batch(
        {
            "id": np.arange(rows),
            "group": np.arange(rows) // 4,
            "tokens": Column.jagged([rng.integers(3, VOCABULARY, length) for _ in range(rows)], np.int32),
            "prompt_length": np.full(rows, prompt, np.int32),
            "mask": Column.jagged([np.ones(length - prompt) for _ in range(rows)], np.uint8),
            "logprobs": Column.jagged([np.full(length - prompt, -7.0) for _ in range(rows)], np.float32),
            "advantages": rng.normal(size=rows).astype(np.float32),
        }
    )


def make(parallel: Mapping[str, int], hidden: int, layers: int) -> Any:
    from tidemill.learn.build import learner

    return learner(recipe(parallel, hidden, layers), 100)


def measure(parallel: Mapping[str, int], hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    from benchmarks._sent import sent
    from benchmarks._traffic import Peak, Traffic
    from tidemill.estimate.ranks_memory import per_rank
    from tidemill.models.shape import shape_of

    learner = make(parallel, hidden, layers)
    sizes = shape_of(learner.config.model)
    batches = [samples(learner.meshes.dp_size, i) for i in range(max(2, repeats + 1))]
    _update(learner, batches[0])  # the optimizer's state is made, groups are connected
    with Traffic() as traffic:
        _update(learner, batches[1])
    held = [*learner.tensors().values(), *(b for _, b in learner.model.named_buffers())]
    with Peak(held) as peak:
        _update(learner, batches[1])
    times = []
    for batch in batches[1:]:
        began = time.perf_counter()
        _update(learner, batch)
        times.append(time.perf_counter() - began)
    least = sent(learner.config, sizes, TOKENS).total
    wanted = per_rank(learner.config, sizes, TOKENS)
    learner.close()
    out = {
        "sent_bytes": traffic.total,
        "least_bytes": least,
        "peak_bytes": peak.most,
        "estimated_bytes": wanted.total,
        "memory_over_estimate": peak.most / wanted.total,
        "seconds": statistics.median(times),
    }
    return out | ({"sent_over_minimum": traffic.total / least} if least else {})


def _update(learner: Any, batch: Any) -> None:
    learner.accumulate(batch)
    learner.update()


def save_under_load(folder: Path, hidden: int, layers: int, rounds: int) -> dict[str, Any]:
    """Steps during which a checkpoint is saved and steps without one, turn about, each first as often as the other.

    A step that saves is timed from the call of `save` to the end of the update after it: the copy that training waits
    for and what writing takes from the step. `left` is how long the writing then still went on; `cpu` counts this
    rank's processor time, all its threads, from the call of `save` until everything is on disk."""
    learner = make({"fsdp": 2}, hidden, layers)
    batch = samples(4, 0)  # two micro-batches per rank
    _update(learner, batch)
    learner.save(folder, 1, {}, keep=1)  # memory for the copies is touched once
    learner.saver.wait()
    alone, beside = [], []
    for i in range(rounds):
        for saves in (False, True) if i % 2 else (True, False):
            (beside if saves else alone).append(_step(learner, batch, folder if saves else None, i + 2))
    written = sum(f.stat().st_size for f in next(folder.glob("step-*")).iterdir())
    learner.close()

    def median(of: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in of)

    plain, loaded = median(alone, "seconds"), median(beside, "seconds")
    pairs = sorted(b["seconds"] / a["seconds"] - 1 for a, b in zip(alone, beside))
    return {
        "step_seconds": plain,
        "step_seconds_while_saving": loaded,
        "overhead": loaded / plain - 1,
        "overhead_of_pairs": statistics.median(pairs),
        "overhead_of_pairs_least": pairs[0],
        "overhead_of_pairs_most": pairs[-1],
        "blocked_seconds": median(beside, "blocked"),
        "left_seconds": median(beside, "left"),
        "step_cpu_seconds": median(alone, "cpu"),
        "save_cpu_seconds": median(beside, "cpu") - median(alone, "cpu"),
        "cpu_overhead": median(beside, "cpu") / median(alone, "cpu") - 1,
        "bytes": written,
    }


def _step(learner: Any, batch: Any, folder: Path | None, number: int) -> dict[str, float]:
    """One update, with a checkpoint under way if there is a folder for it."""
    learner.links["world"].gather_plain(None)  # ranks begin together
    found = {"blocked": 0.0}
    began, cpu = time.perf_counter(), time.process_time()
    if folder is not None:
        learner.save(folder, number, {}, keep=1)
        found["blocked"] = time.perf_counter() - began
    _update(learner, batch)
    found["seconds"] = time.perf_counter() - began
    learner.saver.wait()
    found["left"] = time.perf_counter() - began - found["seconds"]
    return found | {"cpu": time.process_time() - cpu}


# Learning


def learning(
    steps: int, seeds: int, model: str = "", first: int = 0, layouts: Sequence[str] = tuple(STUDY)
) -> dict[str, Any]:
    """Accuracy on the quickstart's task after GRPO on each layout, from one warm start."""
    import tidemill
    from tidemill.run.trained import export

    quiet = ["observe.progress=off", "observe.tensorboard=false", "threads=1", "device=cpu"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        common = [f"folder={place}", *quiet]
        if not model:
            tidemill.train("quickstart-worked", [*common, "name=worked"])
            export(Path(place) / "worked", Path(place) / "a")
            tidemill.train("quickstart-sft", [*common, "name=sft", f"model.path={place}/a", "eval.before=false"])
            export(Path(place) / "sft", Path(place) / "b")
            model = f"{place}/b"
        for name in layouts:
            sizes = [f"learn.parallel.{key}={value}" for key, value in STUDY[name].items()]
            scores, times = [], []
            for seed in range(first, first + seeds):
                began = time.perf_counter()
                summary = tidemill.train(
                    "quickstart",
                    [*common, f"name=rl-{name}-{seed}", f"model.path={model}", f"train.steps={steps}", f"seed={seed}",
                     "eval.every=0", "eval.size=400", "checkpoint.every=0", *sizes],
                )  # fmt: skip
                scores.append(summary.accuracy_after)
                times.append(time.perf_counter() - began)
            found[f"learning/{name}/accuracy"] = statistics.mean(scores)
            found[f"learning/{name}/seconds"] = statistics.mean(times)
            found["learning/accuracy_before"] = summary.accuracy_before
    if "1" in layouts:
        one = found["learning/1/accuracy"]
        found["learning/points_from_one_rank"] = max(
            abs(100 * (found[f"learning/{name}/accuracy"] - one)) for name in layouts
        )
    return found
