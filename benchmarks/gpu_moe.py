"""On one accelerator: grouped experts against the plain loop, attention of context parallel against the flash kernel,
and a whole learning step of a mixture. Checks first, then times; the last line is JSON.

    python benchmarks/gpu_moe.py                 # a Qwen3-30B-A3B layer, 16k tokens
    python benchmarks/gpu_moe.py --small         # a shape for a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tidemill.learn.parallel.collectives import world
from tidemill.learn.parallel.context import Shares, Ulysses
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.ring import AttentionRing
from tidemill.models.attention import registry as attention
from tidemill.models.attention.contexts import KINDS
from tidemill.models.attention.flex import Sight
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.mixture import experts

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small or not torch.accelerator.is_available()
    device = torch.device("cpu") if not torch.accelerator.is_available() else torch.accelerator.current_accelerator()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    result: dict[str, Any] = {"device": device.type, "torch": torch.__version__}
    result["experts"] = grouped_experts(device, dtype, small)
    result["attention"] = context_attention(device, dtype, small)
    result["step"] = learning_step(device, dtype, small)
    print(json.dumps(result))


def timed(work: Any, device: torch.device) -> float:
    """Median seconds, after one that is not counted."""
    times = []
    for i in range(REPEATS + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        times += [time.perf_counter() - began] if i else []
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def grouped_experts(device: torch.device, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """One layer's experts, forward and backward, by each implementation."""
    width, inner, count, k, tokens = (64, 32, 8, 2, 256) if small else (2048, 768, 128, 8, 16384)
    config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=k, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).to(device, dtype)
    module = made.get_decoder().layers[0].mlp.experts
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    index = torch.rand(tokens, count, device=device).topk(k).indices
    weights = torch.rand(tokens, k, device=device, dtype=dtype).requires_grad_()

    def run(name: str) -> list[torch.Tensor]:
        made.set_experts_implementation(name)
        made.zero_grad(set_to_none=True)
        x.grad = weights.grad = None
        out = module(x, index, weights)
        out.backward(torch.ones_like(out))
        return [out.detach(), x.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad]

    plain = run("eager")
    apart = max(_apart(a, b) for a, b in zip(run(experts.NAME), plain))
    assert apart < (1e-4 if dtype == torch.float32 else 2e-2), f"grouped experts differ from the loop by {apart:.1e}"
    flops = 6 * 3 * width * inner * k * tokens
    found: dict[str, Any] = {"apart": apart, "tokens": tokens, "fused": experts._fused(x, module.gate_up_proj)}
    print(f"experts: {tokens} tokens, {count} experts of {inner}, {k} chosen; apart from the loop {apart:.1e}")
    for name in ("eager", "grouped_mm", experts.NAME):
        try:
            seconds = timed(lambda name=name: run(name), device)
        except Exception as error:
            print(f"  {name:12} {type(error).__name__}: {error}")
            continue
        found[name] = {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12}
        print(f"  {name:12} {seconds * 1e3:8.2f} ms   {flops / seconds / 1e12:7.1f} TFLOP/s forward and backward")
    return found


def context_attention(device: torch.device, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """The two forms on one rank: what their own work costs beside the kernel alone, and that they agree with it."""
    heads, kv_heads, dim, length, each = (4, 2, 16, 96, 2) if small else (16, 4, 128, 8192, 2)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", rank=0, world_size=1)
    lengths = [length] * each
    sight, shares = Sight.packed(lengths), Shares.of(length * each, 1)
    over = world(Flight(_get_default_store(), 0, 60.0))
    base = KINDS["blocks" if device.type == "cpu" else "flash"].packed(lengths, device)
    forms = {"kernel": base, "ulysses": Ulysses(base, shares, over, device)}
    forms |= {f"ring_{t}": AttentionRing(sight, shares, over, device, tile=t) for t in (256, 1024)}
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(length * each, h, dim, device=device, dtype=dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )

    def run(context: Any) -> list[torch.Tensor]:
        q.grad = k.grad = v.grad = None
        out = context.attend(0, q, k, v, AttentionForm(dim**-0.5))
        out.backward(torch.ones_like(out))
        return [out.detach(), q.grad, k.grad, v.grad]

    wanted, found = run(base), {}
    print(f"attention: {each} samples of {length} tokens, {heads} heads, {kv_heads} key heads")
    for name, context in forms.items():
        apart = max(_apart(a, b) for a, b in zip(run(context), wanted))
        assert apart < (1e-4 if dtype == torch.float32 else 3e-2), f"{name} differs from the kernel by {apart:.1e}"
        seconds = timed(lambda context=context: run(context), device)
        found[name] = {"ms": seconds * 1e3, "apart": apart}
        print(f"  {name:12} {seconds * 1e3:8.2f} ms   apart {apart:.1e}")
    dist.destroy_process_group()
    return found


def learning_step(device: torch.device, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """GRPO's whole update of a mixture with its routers balanced and replayed, compiled layers included."""
    import numpy as np

    from tidemill.algorithms.shared.registry import get
    from tidemill.batch import Batch, Column
    from tidemill.learn.engine import Learner
    from tidemill.recipe.config import Config

    width, inner, count, k, layers, rows, length = (64, 32, 8, 2, 2, 8, 24) if small else (1024, 512, 64, 8, 8, 64, 512)
    model_config = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=k,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=32000,
        norm_topk_prob=True, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(model_config, attn_implementation=attention.NAME).to(device, dtype)
    experts.plug(made)
    rng = np.random.default_rng(0)
    routes = [np.argsort(rng.random(((length - 1) * layers, count)), 1)[:, :k].reshape(-1) for _ in range(rows)]
    batch = Batch(
        {
            "id": np.arange(rows),
            "group": np.arange(rows) // 4,
            "tokens": Column.jagged([rng.integers(3, 32000, length) for _ in range(rows)], np.int32),
            "prompt_length": np.full(rows, 8, np.int32),
            "mask": Column.jagged([np.ones(length - 8)] * rows, np.uint8),
            "logprobs": Column.jagged([np.full(length - 8, -10.4)] * rows, np.float32),
            "advantages": rng.normal(size=rows).astype(np.float32),
            "routes": Column.jagged(routes, np.int16),
        }
    )
    found: dict[str, Any] = {}
    print(f"step: {rows} samples of {length} tokens, {layers} layers of {count} experts")
    for name, moe in {
        "plain": {},
        "aux_loss": {"balance": "aux_loss"},
        "bias": {"balance": "bias"},
        "replay": {"replay": True},
    }.items():
        settings = Config.model_validate(
            {
                "algorithm": "grpo",
                "train": {"tokens_per_microbatch": 16384},
                "learn": {"moe": moe, "share_prompts": False, "compile": "off"},
            }
        )
        learner = Learner(made, settings, get("grpo"), 100)

        def update(learner: Any = learner) -> None:
            learner.accumulate(batch)
            update.metrics = learner.update()  # type: ignore[attr-defined]

        seconds = timed(update, device)
        metrics = update.metrics  # type: ignore[attr-defined]
        assert np.isfinite(metrics["grad_norm"]) and metrics["skipped_updates"] == 0
        found[name] = {"ms": seconds * 1e3, "busiest": metrics["moe_busiest"]}
        print(f"  {name:12} {seconds * 1e3:8.1f} ms   busiest expert {metrics['moe_busiest']:.2f} of an even load")
        learner.gradients.close()
    return found


if __name__ == "__main__":
    main()
