"""How the native engine scales: tokens per second over sequences at once, and what a long queue costs a step."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import rollout as bench
from benchmarks._rollout_engines import captured

ABOUT = "the native engine with 1 to 512 sequences at once, and with 10,000 requests waiting"
OPTIONS = {"shape": "auto", "device": "auto", "sequences": [1, 8, 64, 256, 512], "waiting": 10_000}
PROMPT, RESPONSE = 64, 64
SLOTS, STEPS = 64, 60  # of the queue's measurement


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    device = bench._device(options["device"])
    name = options["shape"] if options["shape"] != "auto" else "quickstart" if device == "cpu" else "1.5b"
    if device == "cpu":
        torch.set_num_threads(1)
    model = bench._shape(name, device, PROMPT + RESPONSE).model
    repeats = int(options["repeats"])
    rates = {str(n): throughput(model, n, device, repeats) for n in options["sequences"]}
    values = list(rates.values())
    return {
        "shape": name,
        "device": device,
        "tokens_per_s": rates,
        "is_monotone": all(a < b for a, b in pairwise(values)),
        "queue": queue_cost(model, int(options["waiting"]), device),
    }


def _clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def _ask(engine: Any, count: int, length: int, first_id: int = 0) -> None:
    from tidemill.rollout.engine import Request, Sampling

    rng = np.random.default_rng(first_id)
    for i in range(count):
        prompt = rng.integers(3, engine.vocab, PROMPT).tolist()
        engine.submit(Request(first_id + i, prompt, Sampling(max_tokens=length)))


def throughput(model: Any, sequences: int, device: str, repeats: int) -> float:
    """Tokens per second of `sequences` at once, each with a prompt of its own; the median of some runs."""
    engine = captured(model, max_seqs=sequences, max_len=PROMPT + RESPONSE)
    rates = []
    for attempt in range(repeats + 1):  # the first warms up
        _ask(engine, sequences, RESPONSE)
        started, made = _clock(device), 0
        while engine.has_work:
            made += sum(len(completion.tokens) for completion in engine.step())
        if attempt:
            rates.append(made / (_clock(device) - started))
    return float(np.median(rates))


def queue_cost(model: Any, waiting: int, device: str) -> dict[str, float]:
    """The median step with all slots taken and nobody waiting, and with `waiting` requests behind them. Two engines
    take turns, so that contexts are equally long and a busy machine hits both."""
    engines = [captured(model, max_seqs=SLOTS, max_len=PROMPT + 2 * STEPS) for _ in range(2)]
    for engine in engines:
        _ask(engine, SLOTS, 2 * STEPS)
        for _ in range(STEPS // 2):
            engine.step()
    _ask(engines[1], waiting, RESPONSE, first_id=SLOTS)
    times: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for engine, taken in zip(engines, times):
            started = _clock(device)
            engine.step()
            taken.append(_clock(device) - started)
    alone, behind = (float(np.median(taken) * 1e3) for taken in times)
    for engine in engines:
        engine.pause()
    return {"waiting": waiting, "step_ms": alone, "step_ms_with_queue": behind, "ratio": behind / alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = vars(parser.parse_args())
    print(json.dumps(run({**OPTIONS, **chosen}), indent=1))


if __name__ == "__main__":
    main()
