"""Rollout with 8-bit weights on an accelerator: kernels and gap on a small model, speed and rounding of a 7B shape.

    PYTHONPATH=SITE:src:. python benchmarks/gpu_eight.py                      # about 70 s on an H200
    PYTHONPATH=src:. python benchmarks/gpu_eight.py --shape quickstart        # on a CPU, to see that it runs

vLLM's figures are those of `benchmarks/rollout.py --cases fixed-7b,fixed-7b-fp8 --peers vllm_mp`. A table comes last,
then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import rollout as bench
from benchmarks._gpu import DEVICE, FIGURES, ON_DEVICE, TABLE, begin, row, say, seconds, section, wait

FP8 = "fp8"


def small(hidden: int = 256) -> Any:
    """A decoder whose logits differ as a trained one's do: fresh weights are too alike."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tidemill.models.attention import registry

    config = Qwen3Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        dtype = torch.bfloat16 if ON_DEVICE else torch.float32
        model = AutoModelForCausalLM.from_config(config, attn_implementation=registry.NAME, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def rolled(model: Any, weights: str, **options: Any) -> list[Any]:
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.engine import NativeEngine

    engine = NativeEngine(model, eos_ids=[], max_seqs=64, max_len=256, weights=weights, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for i in range(16):
        engine.submit(Request(i, rng.integers(3, 512, 5 + 9 * i).tolist(), Sampling(max_tokens=48, seed=1), n=2))
    done = []
    while engine.has_work:
        done += engine.step()
    return done


def gap_to_module(model: Any, done: list[Any], rounds: bool) -> float:
    """Mean over tokens, in nats, to the module in float32; `rounds`: its layers' products of rounded numbers."""
    import copy

    import torch.nn.functional as F
    from torch import nn

    from tidemill.models.layers.eight import DTYPES, encode
    from tidemill.rollout.hf import _plain

    def decoded(x: torch.Tensor) -> torch.Tensor:
        code, scale = encode(x, DTYPES[FP8])
        return code.float() * scale[..., None]

    plain = copy.deepcopy(model).float()
    if rounds:
        for module in plain.model.layers.modules():
            if isinstance(module, nn.Linear):
                wide = decoded(module.weight.detach())
                module.forward = lambda x, wide=wide: F.linear(decoded(x), wide)  # type: ignore[method-assign]
    gaps = []
    for c in done:
        start, ids = len(c.request.prompt), torch.tensor([[*c.request.prompt, *c.tokens]], device=DEVICE)
        with torch.no_grad(), _plain(plain):
            logits = plain(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        theirs = logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].cpu().numpy()
        gaps.append(np.abs(theirs - np.array(c.logprobs)))
    return float(np.concatenate(gaps).mean())


def check() -> None:
    """Captured, uncaptured and plain forms of the same 8-bit model."""
    model = small()
    for name, weights, options in (
        ("own dtype", "same", {}),
        (FP8, FP8, {}),
        ("fp8 without graphs", FP8, {"graphs": False}),
    ):
        done = rolled(model, weights, **options)
        to_own, to_rounded = (gap_to_module(model, done, rounds) for rounds in (False, True))
        FIGURES[f"gap {name}"] = {"to_module": to_own, "to_rounded_module": to_rounded}
        row(f"gap, {name}", f"{to_own:.4f} nats to the module, {to_rounded:.4f} to the module of rounded numbers")


def speed(shape: str, repeats: int) -> None:
    from benchmarks._rollout_engines import native

    work = bench._work(f"fixed-{shape}")
    like = bench._shape(shape, DEVICE.type, work.window)
    like.model  # noqa: B018  before the clock starts
    for weights in ("same", FP8):
        started = time.perf_counter()
        roll = native(like, [work], weights)
        wait()
        ready = time.perf_counter() - started
        roll(work, True)
        rates, steps = [], 1
        for _ in range(repeats):
            wait()
            began = time.perf_counter()
            steps = roll(work, False)
            wait()
            rates.append(work.tokens / (time.perf_counter() - began))
        rate = float(np.median(rates))
        FIGURES[f"fixed-{shape} {weights}"] = {"tokens_per_s": rate, "runs": rates, "ready_s": ready, "steps": steps}
        row(
            f"fixed-{shape}, weights {weights}", f"{rate:,.0f} tokens/s, step {1e3 * work.tokens / rate / steps:.2f} ms"
        )
        del roll
    if ON_DEVICE:
        torch.accelerator.empty_cache()


def rounding(shape: str) -> None:
    """What making all of a model's layers 8 bits takes, as every new version does."""
    from tidemill.models.layers.eight import DTYPES, EightWeight

    like = bench._shape(shape, DEVICE.type, 1024)
    linears = [m.weight for m in like.model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    made = [EightWeight([weight], DTYPES[FP8]) for weight in linears]
    spent = seconds(lambda: [weight.refresh() for weight in made])
    read = sum(w.numel() * w.element_size() for w in linears)
    FIGURES["rounding"] = {"seconds": spent, "gb_per_s": read / 1e9 / spent}
    row(f"rounding all layers of {shape}", f"{spent * 1e3:.1f} ms, {read / 1e9 / spent:,.0f} GB/s read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    begin()
    with section("gap"):
        check()
    with section("speed"):
        speed(chosen.shape, chosen.repeats)
    with section("rounding"):
        rounding(chosen.shape)
    say("done")
    print("\n" + "\n".join(f"{name:40s} {value}" for name, value in TABLE))
    print(json.dumps({"bench": "gpu_eight", "all": FIGURES}))


if __name__ == "__main__":
    main()
