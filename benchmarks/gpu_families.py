"""A model of Qwen3.5-2B's shape on one device: is it right, how fast does it learn, where does the time go.

    PYTHONPATH=SITE:src python benchmarks/gpu_families.py     # about 100 seconds on an H200
    PYTHONPATH=SITE:src python benchmarks/rollout.py --device cuda --cases fixed-q35 --peers vllm --repeats 2

Random bfloat16 weights made on the device: 24 layers, of which 18 are gated delta nets and 6 attention. `right`
compares float32 gradients of packed samples, by the kernels of this device, with those of transformers' own forward
pass of each sample alone, on small models. MFU is 6·N·T, causal attention of the 6 layers, and the delta rule as a
recurrence; no credit for recompute.
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
    DEVICE,
    EACH,
    FIGURES,
    ON_DEVICE,
    PROMPT,
    RESPONSE,
    as_loaded,
    begin,
    finish,
    is_late,
    job,
    parameters_of,
    report,
    row,
    say,
    section,
    settings,
    time_update,
)
from benchmarks.gpu_learn import matmul_rate

CLOSE = 1e-5  # of a float32 gradient, relative to the norm of all of it
HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}  # that blocks of products can have
SMALL: dict[str, dict[str, Any]] = {"qwen3_5_text": HEADS, "qwen3_next": HEADS, "gpt_oss": {}}
FLASH: dict[str, Any] = {"attention": "flash" if ON_DEVICE else "blocks", "share_prompts": False}
FAST: dict[str, Any] = {**FLASH, "compile": "on"} if ON_DEVICE else FLASH
# Name, tokens a pass, settings.
WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("8k, eager", 8192, {**FLASH, "compile": "off", "logprob_chunk": 2048}),
    ("8k", 8192, {**FAST, "logprob_chunk": 2048}),
    ("16k, shared prompts", 16384, {**FAST, "logprob_chunk": 2048, "share_prompts": True}),
    ("16k, MLPs recomputed", 16384, {**FAST, "logprob_chunk": 2048, "recompute": "mlp"}),
]


def right() -> None:
    from benchmarks import _families_parity as parity
    from benchmarks import _families_tiny as tiny
    from tidemill.models.recurrent.chunked import on_device

    torch.backends.cuda.matmul.allow_tf32 = False
    for family, changes in SMALL.items():
        ours, theirs = (model.to(DEVICE) for model in tiny.models(family, **changes))
        chunked = [m for m in ours.modules() if hasattr(m, "A_log") and on_device.is_chunked(m, DEVICE)]
        for what, gap, apart in parity.learner_gaps(ours, theirs):
            found = f"log-probabilities {gap:.1e}, gradient {apart:.1e}, {len(chunked)} layers in chunks"
            row(f"{family}, {what}, float32", f"{found} {'ok' if apart < CLOSE else 'WRONG'}")
            FIGURES[f"gradient {family}, {what}"] = apart


def shaped() -> Any:
    from transformers import Qwen3_5TextConfig

    from tidemill.models.attention import registry as attention
    from tidemill.models.calling import plug

    sizes: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    }  # fmt: skip
    if not ON_DEVICE:  # to try the script itself
        sizes |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
        sizes |= {"vocab_size": 500, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    torch.manual_seed(0)
    kind = attention.NAME
    config = Qwen3_5TextConfig(**sizes, tie_word_embeddings=True, max_position_embeddings=4096)
    with DEVICE:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config, attn_implementation=kind, dtype=torch.bfloat16)
    model.config.use_cache = False
    plug(model)
    return model.eval()


def work_of(model: Any, samples: int, groups: int, share: bool) -> float:
    """Arithmetic of an update that must be done."""
    c = model.config
    nets = list(c.layer_types).count("linear_attention")
    tokens = groups * PROMPT + samples * RESPONSE if share else samples * (PROMPT + RESPONSE)
    whole = PROMPT + RESPONSE
    pairs = samples * (whole**2 - PROMPT**2) / 2 + (groups if share else samples) * PROMPT**2 / 2
    attention = 12 * (c.num_hidden_layers - nets) * c.num_attention_heads * c.head_dim * pairs
    # A state is read by the key, changed, and read by the query, two operations each for every number of it; three
    # times as many with the gradient.
    rule = 18 * nets * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * tokens
    return 6 * parameters_of(model) * tokens + attention + rule


def learn(model: Any, groups: int, limit_s: float) -> None:
    for name, size, how in WAYS:
        micro = size if ON_DEVICE else 1024
        if is_late(name, limit_s):
            continue
        with section(name):
            as_loaded(model)
            words = model.config.vocab_size
            warm = [job(max(1, micro // 4096), words), job(max(1, micro // 2048), words)]
            figures = time_update(model, settings(micro, groups, **how), job(groups, words), warm)
            report(name, figures, work_of(model, groups * EACH, groups, bool(how["share_prompts"])))


def profiled(model: Any) -> None:
    """Where a pass's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    from tidemill.algorithms.shared.registry import get
    from tidemill.learn.engine import Learner

    as_loaded(model)
    learner, batch = Learner(model, settings(8192, 1, **FAST), get("grpo"), 9), job(2, model.config.vocab_size)
    for _ in range(2):
        learner.accumulate(batch)
        learner.update()
    with profile(activities=[ProfilerActivity.CUDA] if ON_DEVICE else [ProfilerActivity.CPU]) as trace:
        learner.accumulate(batch)
        if ON_DEVICE:
            torch.accelerator.synchronize()
    spent = {e.key: (e.self_device_time_total, e.count) for e in trace.key_averages() if e.self_device_time_total > 0}
    total = sum(time for time, _ in spent.values())
    for key, (own, count) in sorted(spent.items(), key=lambda one: -one[1][0])[:24]:
        say(f"  {own / total:6.1%} {own / 1e3:9.2f} ms {count:6d} × {key[:100]}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=90.0, help="seconds after which no new way starts")
    options.add_argument("--only", default="right,rate,learn,profile")
    options.add_argument("--groups", type=int, default=16 if ON_DEVICE else 1, help="of 8 samples")
    asked = options.parse_args()
    only = asked.only.split(",")
    begin()
    if "right" in only:
        with section("right"):
            right()
    if "rate" in only and ON_DEVICE:
        with section("rate"):
            matmul_rate()
    if "learn" in only or "profile" in only:
        started = time.perf_counter()
        model = shaped()
        say(f"{parameters_of(model):,} parameters in {time.perf_counter() - started:.1f} s")
        if "learn" in only:
            learn(model, asked.groups, asked.limit)
        if "profile" in only:
            with section("profile"):
                profiled(model)
    finish("gpu_families", "8k")


if __name__ == "__main__":
    main()
