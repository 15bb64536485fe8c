"""On one accelerator: a mixture's kernels against the plain form, their tiles timed, and a whole decode step.

python benchmarks/gpu_mixture.py
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
import triton

from tidemill.rollout.native.kernels import triton_experts
from tidemill.rollout.native.kernels.triton_experts import Tiles

SHAPES = {"moe64": (2048, 768, 64, 8), "a3b": (2048, 768, 128, 8)}


def main() -> None:
    result: dict[str, Any] = {}
    for name, (width, inner, experts, k) in SHAPES.items():
        torch.manual_seed(0)
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05  # noqa: E731
        stacks = [(make(experts, 2 * inner, width), make(experts, width, inner)) for _ in range(4)]
        for tokens in (8, 64, 256, 512, 4096):
            h, x = make(tokens, width) * 20, make(tokens, width)
            chosen, shares = triton_experts.route(torch.randn(tokens, experts, device="cuda"), None, k, True)
            check(x, h, chosen, shares, stacks[0])
            result[f"{name}-{tokens}"] = best(x, h, chosen, shares, stacks)
            print(name, tokens, result[f"{name}-{tokens}"], flush=True)
    print(json.dumps(result))


def check(x: Any, h: Any, chosen: Any, shares: Any, stack: Any) -> None:
    made = x.clone()
    triton_experts.add_experts(made, h, chosen, shares, stack)
    rows = min(len(x), 32)
    wanted = x[:rows].float()
    for row, j in itertools.product(range(rows), range(chosen.shape[1])):
        e = int(chosen[row, j])
        gate, up = F.linear(h[row].float(), stack[0][e].float()).chunk(2)
        wanted[row] += shares[row, j] * F.linear(F.silu(gate) * up, stack[1][e].float())
    apart = float((made[:rows].float() - wanted).norm() / wanted.norm())
    assert apart < 1e-2, apart


def best(x: Any, h: Any, chosen: Any, shares: Any, stacks: Any) -> dict[str, Any]:
    """The layer as chosen by `tiles_for`, and the best of a small search."""
    pairs, held = chosen.numel(), stacks[0][1].shape[0]
    rows = -(-pairs // held)
    sizes = [m for m in (16, 32, 64, 128) if rows / 2 <= m <= max(16, 2 * rows)]
    timed = {}
    for m in sizes or [128]:
        for n, bk, warps, stages in (
            (64, 64, 4, 4),
            (64, 128, 4, 3),
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (64, 64, 8, 4),
            (32, 128, 4, 4),
            (64, 128, 8, 3),
        ):
            if m * n > 128 * 128:
                continue
            tile = Tiles(m, n, bk, warps, stages)
            try:
                timed[tile] = ms(
                    lambda tile=tile: [
                        triton_experts.add_experts(x, h, chosen, shares, s, tiles=(tile, tile)) for s in stacks
                    ]
                ) / len(stacks)
            except Exception as error:
                print("   ", tile, type(error).__name__)
    found = sorted(timed.items(), key=lambda item: item[1])[:3]
    now = ms(lambda: [triton_experts.add_experts(x, h, chosen, shares, s) for s in stacks]) / len(stacks)
    read = sum(t.nbytes for t in stacks[0])
    return {"us": now * 1e3, "best": [(tuple(t), round(v * 1e3, 1)) for t, v in found], "floor_us": read / 4.3e12 * 1e6}


def ms(work: Any) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return float(triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median"))


if __name__ == "__main__":
    main()
