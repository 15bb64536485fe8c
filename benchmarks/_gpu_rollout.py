"""What the accelerator scripts of rollout share: a log, the work and its engine, guarded sections, the figures last."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import rollout as bench
from benchmarks._rollout_engines import Work, captured

FIGURES: dict[str, Any] = {}
STARTED = time.perf_counter()


def say(name: str, value: Any) -> None:
    FIGURES[name] = value
    print(f"[{time.perf_counter() - STARTED:6.1f}s] {name}: {value}", flush=True)


class Setup:
    def __init__(self, device: str) -> None:
        self.device = device
        self.is_small = device == "cpu"
        name = "quickstart" if self.is_small else "1.5b"
        self.works = {kind: bench._work(f"{kind}-{name}") for kind in ("fixed", "tail")}
        if self.is_small:
            self.works = {kind: Work(w.prompts[:4], w.lengths[:4]) for kind, w in self.works.items()}
        self.shape = bench._shape(name, device, max(w.window for w in self.works.values()))

    def engine(self, work: Work, **options: Any) -> Any:
        settings = {"max_seqs": work.lengths.size, "max_len": work.window, **options}
        return captured(self.shape.model, **settings)

    def wait(self) -> float:
        if not self.is_small:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def memory(self) -> int:
        if self.is_small:
            return 0
        torch.accelerator.synchronize()
        return int(torch.accelerator.get_memory_info()[0])


def roll(
    engine: Any, work: Work, *hows: dict[str, Any], prompts: int | None = None, most: int = 1 << 30
) -> tuple[list[Any], int]:
    """All of the work, or some prompts of it, sampled as `hows` say in turn; what was made, and in how many steps."""
    from tidemill.rollout.engine import Request, Sampling

    for i, prompt in enumerate(work.prompts[:prompts]):
        limits = np.minimum(work.lengths[i], most).tolist()
        how = hows[i % len(hows)] if hows else {}
        engine.submit(Request(i, prompt, Sampling(**how), n=len(limits), limits=limits))
    done, steps = [], 0
    while engine.has_work:
        done += engine.step()
        steps += 1
    return sorted(done, key=lambda c: (c.request.id, c.index)), steps


Sections = dict[str, Callable[[Setup], None]]


def run(about: str | None, sections: Sections, on_accelerator: Sections | None = None) -> None:
    """`on_accelerator`: what a CPU cannot do; it comes first. A section that fails is printed and the rest go on."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="sections whose name contains this")
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    elif on_accelerator:
        sections = {**on_accelerator, **sections}
    setup = Setup(chosen.device)
    for name, work in sections.items():
        if chosen.only in name:
            try:
                work(setup)
            except Exception:
                say(f"{name} FAILED", traceback.format_exc()[-3000:])
    print(json.dumps(FIGURES))
