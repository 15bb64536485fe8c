"""What fits one device: a 7B model with its optimizer on the host, a 32B model with adapters, 128k tokens in a row.

    PYTHONPATH=SITE:src python benchmarks/gpu_learn_large.py   # five minutes on an H200, 100 GiB of host memory

Random bfloat16 weights made on the device. Peaks are the allocator's; beside each stands `tidemill doctor`'s estimate.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._gpu import (
    EACH,
    FIGURES,
    ON_DEVICE,
    PROMPT,
    as_loaded,
    begin,
    empty,
    finish,
    is_late,
    job,
    model_of,
    parameters_of,
    report,
    row,
    say,
    section,
    settings,
    time_update,
    work_of,
)

LENGTHS = (16384, 32768, 65536, 131072)
FAST: dict[str, Any] = {"attention": "flash", "compile": "on", "recompute": "full"}


def made(shape: str, window: int = 4096) -> Any:
    torch.compiler.reset()
    empty()
    before = time.perf_counter()
    model = model_of(shape, window)
    say(f"{shape}: {parameters_of(model):,} parameters in {time.perf_counter() - before:.1f} s")
    return model


def long_sequences(shape: str, lengths: tuple[int, ...], **learn: Any) -> None:
    """One sample a step. Memory must grow in a straight line."""
    model, peaks = made(shape, max(lengths)), list[float]()
    words = model.config.vocab_size
    warm = job(1, words, 1, PROMPT, max(64, lengths[0] // 4 - PROMPT))
    for length in lengths:
        as_loaded(model)
        response = length - PROMPT
        config = settings(length, 1, 1, (PROMPT, response), **learn)
        figures = time_update(model, config, job(1, words, 1, PROMPT, response), [warm])
        report(f"{shape}, one sequence of {length:,} tokens", figures)
        peaks.append(figures["peak_gib"])
    slopes = [(b - a) / (m - n) * 2**20 for a, b, n, m in zip(peaks, peaks[1:], lengths, lengths[1:])]
    FIGURES["kib_per_token"] = slopes
    row(
        "memory a token", ", ".join(f"{s:.1f}" for s in slopes) + " KiB from each length to the next: straight if equal"
    )


def adapters(shape: str, groups: int) -> None:
    model = made(shape)
    words, parameters = model.config.vocab_size, parameters_of(model)
    config = settings(16384, groups, lora_rank=16, moments="float32", share_prompts=False, **FAST)
    figures = time_update(model, config, job(groups, words), [job(1, words)])
    # The frozen weights' own gradients are not computed: 4·N·T must be done, not 6.
    _, flops = work_of(model, groups * EACH, groups, False, parameters)
    report(f"{shape}, LoRA of rank 16, {groups * EACH} samples", figures, flops * 2 / 3)


def whole_model(shape: str, groups: int) -> None:
    model = made(shape)
    words, parameters = model.config.vocab_size, parameters_of(model)
    config = settings(
        16384, groups, optimizer_on_host=True, master="float32", moments="float32", share_prompts=False, **FAST
    )
    figures = time_update(model, config, job(groups, words), [job(1, words)])
    _, flops = work_of(model, groups * EACH, groups, False, parameters)
    report(f"{shape}, all weights, float32 copies and moments on the host, {groups * EACH} samples", figures, flops)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=260.0, help="seconds after which no new case starts")
    options.add_argument("--only", default="long,lora,whole")
    options.add_argument("--tiny", action="store_true", help="to try the script itself")
    asked = options.parse_args()
    begin()
    tiny = asked.tiny or not ON_DEVICE
    slow = {"attention": "blocks", "recompute": "full"}
    cases: dict[str, Any] = {
        "long": lambda: (
            long_sequences("tiny", (512, 1024), **slow) if tiny else long_sequences("1.5b", LENGTHS, **FAST)
        ),
        "lora": lambda: adapters("tiny" if tiny else "32b", 1 if tiny else 4),
        "whole": lambda: whole_model("tiny" if tiny else "7b", 1 if tiny else 8),
    }
    if tiny:
        FAST.clear()
        FAST.update(slow)
    for name in asked.only.split(","):
        if not is_late(name, asked.limit):
            with section(name):
                cases[name]()
    finish("gpu_learn_large")


if __name__ == "__main__":
    main()
