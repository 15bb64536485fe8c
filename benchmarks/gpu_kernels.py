"""The draw and the log-prob loss as Triton kernels beside their plain torch forms: how far apart, and how much faster.

    PYTHONPATH=src python benchmarks/gpu_kernels.py                # about a minute on an H200, most of it compiling
    PYTHONPATH=src python benchmarks/gpu_kernels.py --device cpu   # tiny, in Triton's interpreter (numpy below 2.4)

The last line is one JSON object. It ends with an error if anything is further apart than `BOUNDS` allows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as numbers
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Largest gaps to the plain form: of log-probabilities and entropies (nats), of gradients (relative to the largest), of
# the mass that truncation keeps (nats); and the smallest share of rows with the same token, where a sum may round to
# the other side.
BOUNDS = {"logprob": 1e-3, "entropy": 1e-3, "gradient": 1e-2, "drawn_logprob": 1e-3, "kept": 1e-2}
SAME_TOKENS = 0.98
CUTS = {"plain": {}, "top_k 50": {"top_k": 50}, "top_p 0.95": {"top_p": 0.95}, "all three": {"top_k": 50, "top_p": 0.9,
        "min_p": 0.02}}  # fmt: skip
OFF = {"top_k": (1 << 31) - 1, "top_p": 2.0, "min_p": 0.0}


def seconds(work: Callable[[], Any], device: torch.device, times: int) -> float:
    """The median of `times`, after one that compiles."""
    spent = []
    for _ in range(times + 1):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        spent.append(time.perf_counter() - started)
    return numbers.median(spent[1:])


def loss(device: torch.device, rows: int, vocabulary: int, dtype: torch.dtype, times: int) -> dict[str, float]:
    from tidemill.learn.logprob import tokens as plain
    from tidemill.learn.logprob import triton_logprob as fused

    torch.manual_seed(0)
    logits = (torch.randn(rows, vocabulary, device=device) * 4).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    given = torch.randn(2, rows, device=device)

    def run(module: Any, logits: Tensor) -> tuple[Tensor, ...]:
        sums = plain.no_words(logits)
        module.fold(sums, logits, targets, 0.8, None)
        logprobs, entropy, log_z = plain.finished(sums)
        gradient = module.logit_gradient(logits, targets, log_z, entropy, *given, 0.8, None, torch.float32)
        return logprobs, entropy, gradient

    found, wanted = run(fused, logits), run(plain, logits.float())  # the kernels compute in float32, too
    gaps = [float((a - b).abs().max()) for a, b in zip(found, wanted)]
    return {
        "logprob": gaps[0],
        "entropy": gaps[1],
        "gradient": gaps[2] / float(wanted[2].abs().max()),
        "ms": 1e3 * seconds(lambda: run(fused, logits), device, times),
        "plain_ms": 1e3 * seconds(lambda: run(plain, logits), device, times),
    }


def drawn(device: torch.device, rows: int, vocabulary: int, how: dict[str, float], times: int) -> dict[str, float]:
    from tidemill.rollout.native.draw import triton_draw
    from tidemill.rollout.native.draw.sampling import Draw, draw, stream_key

    torch.manual_seed(1)
    logits = torch.randn(rows, vocabulary, device=device) * 3
    index = torch.arange(rows, dtype=torch.int32, device=device)
    wants = {**OFF, **how}
    state = SimpleNamespace(
        temperature=torch.rand(rows, device=device) + 0.5,
        greedy=(index % 7 == 0).int(),
        key=torch.tensor([stream_key(0, 0, i) for i in range(rows)], device=device),
        latest=torch.zeros(rows, dtype=torch.int64, device=device),
        top_k=torch.full((rows,), int(wants["top_k"]), dtype=torch.int32, device=device),
        top_p=torch.full((rows,), wants["top_p"], device=device),
        min_p=torch.full((rows,), wants["min_p"], device=device),
    )
    cut: dict[str, Any] = {"truncated": index.long(), "top_k": state.top_k.clamp_max(vocabulary).long(),
                           "top_p": state.top_p, "min_p": state.min_p} if how else {}  # fmt: skip
    asked = Draw(state.key, index.long(), state.temperature, state.greedy.bool(), **cut)
    kernel = triton_draw.draw_truncated if how else triton_draw.draw
    found, wanted = kernel(logits, index, index, index, state), draw(logits, asked)
    same = found[0] == wanted.tokens
    gaps = {"drawn_logprob": float((found[1] - wanted.logprobs)[same].abs().max())}
    if how:
        assert wanted.kept is not None
        gaps["kept"] = float((found[2] - wanted.kept).abs().max())
    return {
        **gaps,
        "same_tokens": float(same.float().mean()),
        "ms": 1e3 * seconds(lambda: kernel(logits, index, index, index, state), device, times),
        "plain_ms": 1e3 * seconds(lambda: draw(logits, asked), device, times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = torch.device(parser.parse_args().device)
    is_tiny = device.type == "cpu"
    if is_tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import triton

    rows, vocabulary, times = (6, 700, 1) if is_tiny else (256, 151_936, 20)
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32,) if is_tiny else (torch.float32, torch.bfloat16):
        found[f"log-prob loss, {str(dtype)[6:]}"] = loss(device, 8 * rows, vocabulary, dtype, times)
    for name, how in CUTS.items():
        found[f"draw, {name}"] = drawn(device, rows, vocabulary, how, times)
    wrong = [f"{what}: {k} {v:g}" for what, line in found.items() for k, v in line.items() if not v <= BOUNDS.get(k, v)]
    wrong += [f"{what}: {line['same_tokens']:.1%} same tokens" for what, line in found.items()
              if line.get("same_tokens", 1.0) < SAME_TOKENS]  # fmt: skip
    name = "processor" if is_tiny else torch.cuda.get_device_name()
    for what, line in found.items():
        print(f"{what:28}", *(f"{k}={v:.3g}" for k, v in line.items()))
    print(json.dumps({"device": name, "triton": triton.__version__, "torch": torch.__version__, "rows": rows,
                      "vocabulary": vocabulary, "found": found, "wrong": wrong}))  # fmt: skip
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
