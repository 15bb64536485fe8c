"""Checks and times the learner's accelerator paths: attention, log-probabilities, whole updates of the 1.5B job.

    PYTHONPATH=src python benchmarks/gpu_learn.py            # under five minutes on an H200

The job: 64 prompts × 8 samples of 256 + 512 tokens, GRPO, the shape of Qwen2.5-1.5B with random bfloat16 weights.
Each section is guarded: one that fails is printed with its traceback and the rest go on. A table and one JSON object
come last; the full log goes to $OUT/gpu_learn.log where OUT is set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

TABLE: list[tuple[str, str]] = []
FIGURES: dict[str, Any] = {}
LOG = Path(os.environ.get("OUT", ".")) / "gpu_learn.log"
STARTED = time.perf_counter()
DATA_SHEET = 989e12
PROMPT, RESPONSE, EACH = 256, 512, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def without_pydantic() -> None:
    """A machine without pydantic gets classes that keep defaults and check nothing: enough to build settings here."""
    stand_in: Any = types.ModuleType("pydantic")

    class BaseModel:
        def __init__(self, **given: Any) -> None:
            for kind in reversed(type(self).__mro__):
                for name in vars(kind).get("__annotations__", {}):
                    if name in vars(kind):
                        setattr(self, name, vars(kind)[name])
            for name, value in given.items():
                setattr(self, name, value)

        def model_copy(self, update: dict[str, Any]) -> Any:
            return type(self)(**{**vars(self), **update})

    stand_in.BaseModel = BaseModel
    stand_in.ConfigDict = dict
    stand_in.Field = lambda default=None, **_: default
    stand_in.model_validator = stand_in.field_validator = lambda **_: lambda function: function
    sys.modules["pydantic"] = stand_in


def say(text: str) -> None:
    line = f"[{time.perf_counter() - STARTED:6.1f}s] {text}"
    print(line, flush=True)
    with LOG.open("a") as log:
        log.write(line + "\n")


def row(name: str, value: str) -> None:
    TABLE.append((name, value))
    say(f"{name}: {value}")


@contextmanager
def section(name: str) -> Iterator[None]:
    say(f"== {name}")
    try:
        yield
    except Exception:
        row(name, "FAILED")
        say(traceback.format_exc()[-3000:])
    gc.collect()
    torch.accelerator.empty_cache()


def seconds(work: Callable[[], Any], times: int = 3, warm: int = 1) -> float:
    for _ in range(warm):
        work()
    torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.accelerator.synchronize()
    return (time.perf_counter() - started) / times


def matmul_rate() -> None:
    best = 0.0
    for m, n, k in ((8192, 8192, 8192), (16384, 8960, 1536), (32768, 1536, 8960)):
        a, b = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16) for s in ((m, k), (k, n)))
        rate = 2 * m * n * k / seconds(lambda: a @ b, 20, 3)  # noqa: B023
        say(f"matmul {m}x{k} @ {k}x{n}: {rate / 1e12:.0f} TFLOP/s")
        best = max(best, rate)
    FIGURES["matmul_tflops"] = best / 1e12
    row("measured matmul rate", f"{best / 1e12:.0f} TFLOP/s")


# Attention


def attention_inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, h, 128, device=DEVICE).to(dtype).requires_grad_() for h in (12, 2, 2)]


def attended(context: Any, inputs: list[torch.Tensor], window: int | None = None) -> list[torch.Tensor]:
    """Output and gradients."""
    out = context.attend(0, *inputs, 128**-0.5, window, None)
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out, dtype=torch.float32).to(out.dtype))
    return [out.detach(), *grads]


def gap(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(ours, wanted))


def check_attention() -> None:
    from tidemill.models.contexts import KINDS

    prompts, responses, group = [40, 3, 130, 77], [100, 1, 0, 260, 15, 33, 200, 129, 64], [0, 0, 1, 1, 2, 2, 3, 3, 0]
    lengths = [300, 1, 17, 128, 255, 64, 2]
    for shared in (False, True):
        total = sum(prompts) + sum(responses) if shared else sum(lengths)
        for window in (None, 50):

            def make(kind: str) -> Any:
                a = KINDS[kind]
                return a.shared(prompts, responses, group, DEVICE) if shared else a.packed(lengths, DEVICE)  # noqa: B023

            wanted = attended(make("blocks"), attention_inputs(total, torch.float32), window)
            for kind, dtype, most in (
                ("flash", torch.bfloat16, 0.02),
                ("flex", torch.bfloat16, 0.02),
                ("flex", torch.float32, 1e-3),
                ("blocks", torch.bfloat16, 0.02),
            ):
                name = f"attention {kind} {str(dtype)[6:]}{' shared' if shared else ''} window {window}"
                try:
                    found = gap(attended(make(kind), attention_inputs(total, dtype), window), wanted)
                    row(name, f"relative gap of output and gradients {found:.1e} {'ok' if found < most else 'WRONG'}")
                except Exception as error:
                    row(name, f"FAILED {str(error)[:300]}")


def time_attention() -> None:
    from tidemill.models.contexts import KINDS

    groups = 4
    for shared in (False, True):
        lengths = [PROMPT + RESPONSE - 1] * (groups * EACH)
        prompts, responses = [PROMPT] * groups, [RESPONSE - 1] * (groups * EACH)
        group = [i // EACH for i in range(groups * EACH)]
        tokens = sum(prompts) + sum(responses) if shared else sum(lengths)
        inputs = attention_inputs(tokens, torch.bfloat16)
        for kind in ("blocks", "flash", "flex"):
            try:
                a = KINDS[kind]
                context = a.shared(prompts, responses, group, DEVICE) if shared else a.packed(lengths, DEVICE)
                ms = seconds(lambda: attended(context, inputs), 5, 3) * 1e3  # noqa: B023
                row(
                    f"attention {kind}{' shared' if shared else ''}, {tokens} tokens, forward and backward",
                    f"{ms:.2f} ms",
                )
            except Exception as error:
                row(f"time attention {kind} {shared}", f"FAILED {str(error)[:200]}")


# Log-probabilities


def check_logprobs() -> None:
    from tidemill.learn.logprob import token_logprobs

    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for softcap, temperature in ((None, 1.0), (30.0, 0.7)):
            results = []
            for fused, kind in ((False, torch.float32), (True, dtype)):
                torch.manual_seed(0)
                hidden = torch.randn(300, 256, device=DEVICE).to(dtype).to(kind).requires_grad_()
                head = (torch.randn(50_001, 256, device=DEVICE) * 0.1).to(dtype).to(kind).requires_grad_()
                targets = torch.randint(0, 50_001, (300,), device=DEVICE)
                lp, h = token_logprobs(
                    hidden, head, targets, chunk=128, softcap=softcap, temperature=temperature, fused=fused
                )
                w = torch.randn(2, 300, device=DEVICE)
                (w[0] * lp + w[1] * h).sum().backward()
                results.append([lp.detach(), h.detach(), hidden.grad, head.grad])
            found = gap(results[1], results[0])
            row(
                f"log-probabilities fused {str(dtype)[6:]} softcap {softcap}",
                f"relative gap {found:.1e} {'ok' if found < most else 'WRONG'}",
            )


def time_logprobs() -> None:
    from tidemill.learn.logprob import token_logprobs

    tokens = 16384
    hidden = torch.randn(tokens, 1536, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    head = (torch.randn(151936, 1536, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, 151936, (tokens,), device=DEVICE)
    flops = 2 * tokens * 1536 * 151936
    for fused in (False, True):
        for chunk in (2048, 4096, 8192) if fused else (4096,):

            def both() -> None:
                lp, _ = token_logprobs(hidden, head, targets, chunk=chunk, fused=fused)  # noqa: B023
                lp.sum().backward()

            with torch.no_grad():
                ahead = seconds(lambda: token_logprobs(hidden, head, targets, chunk=chunk, fused=fused))  # noqa: B023
            whole = seconds(both)
            row(
                f"log-probabilities {'fused' if fused else 'plain'} chunk {chunk}, {tokens} tokens",
                f"forward {ahead * 1e3:.1f} ms ({flops / ahead / 1e12:.0f} TFLOP/s), forward and backward "
                f"{whole * 1e3:.1f} ms ({4 * flops / whole / 1e12:.0f} TFLOP/s)",
            )


# Learner


def settings(micro: int, **learn: Any) -> Any:
    from tidemill.config import Algorithm, Config, Learn, Train

    return Config(
        algorithm=Algorithm(name="grpo", aggregation="sample_mean"),
        train=Train(tokens_per_microbatch=micro),
        learn=Learn(lr=1e-6, **learn),
    )


def model_of(shape: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tidemill.models import attention

    sizes = {
        "1.5b": (151936, 1536, 8960, 28, 12, 2, 128),
        "tiny": (500, 256, 512, 4, 4, 2, 64),
    }[shape]
    config = Qwen2Config(
        **dict(
            zip(
                (
                    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "head_dim",
                ),
                sizes,
            )
        ),
        tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    model.config.use_cache = False
    return model.eval()


def job(groups: int, vocabulary: int, each: int = EACH, prompt: int = PROMPT, response: int = RESPONSE) -> Any:
    from tidemill.batch import Batch, Column

    rng = np.random.default_rng(0)
    tokens, count = [], groups * each
    for _ in range(groups):
        shared = rng.integers(3, vocabulary, prompt)
        tokens += [np.concatenate([shared, rng.integers(3, vocabulary, response)]) for _ in range(each)]
    return Batch(
        {
            "id": np.arange(count),
            "group": np.repeat(np.arange(groups), each),
            "tokens": Column.jagged(tokens, np.int32),
            "prompt_length": np.full(count, prompt, np.int32),
            "mask": Column.jagged([np.ones(response)] * count, np.uint8),
            "logprobs": Column.jagged([np.full(response, -np.log(vocabulary))] * count, np.float32),
            "advantages": rng.normal(size=count).astype(np.float32),
        }
    )


def plain_again(model: Any) -> None:
    from transformers import AttentionInterface

    from tidemill.learn.layers import layers_of
    from tidemill.models import attention

    AttentionInterface.register(attention.NAME, attention.attend)
    model.gradient_checkpointing_disable()
    model.eval()
    for layer in layers_of(model):
        layer._compiled_call_impl = None
        layer.gradient_checkpointing = False
    for p in model.parameters():
        p.grad = None


def check_learner() -> None:
    """Whole gradients of every variant against the plain path, in float32."""
    from tidemill.algorithms.registry import get
    from tidemill.learn.engine import Learner

    model, batch = model_of("tiny").float(), job(3, 500, 4, 37, 70)

    def gradients(**learn: Any) -> list[torch.Tensor]:
        plain_again(model)
        learner = Learner(model, settings(600, **learn), get("grpo"), 1)
        try:
            learner.accumulate(batch)
            return [learner.gradients.of(p).float().clone() for p in model.parameters()]
        finally:
            learner.gradients.close()

    wanted = gradients(attention="blocks", compile="off", share_prompts=False)
    for name, learn in {
        "shared prompts": {"attention": "blocks", "compile": "off"},
        "flex": {"attention": "flex", "share_prompts": False},
        "flex, shared": {"attention": "flex"},
        "recomputed": {"attention": "blocks", "recompute": "full", "share_prompts": False},
        "every second layer recomputed": {"attention": "blocks", "recompute": "full", "recompute_every": 2},
        "compiled": {"attention": "blocks", "compile": "on", "share_prompts": False},
        "compiled, recomputed, shared": {"attention": "blocks", "compile": "on", "recompute": "full"},
        "activations on the host": {"attention": "blocks", "offload": "activations"},
    }.items():
        try:
            worst = gap(gradients(**learn), wanted)
            row(f"gradient, float32: {name}", f"relative gap {worst:.1e} {'ok' if worst < 1e-4 else 'WRONG'}")
        except Exception as error:
            row(f"gradient, float32: {name}", f"FAILED {str(error)[:300]}")
    model.bfloat16()
    for name, learn in {
        "plain": {"attention": "blocks", "share_prompts": False},
        "flash": {"attention": "flash", "share_prompts": False},
        "flash, shared": {"attention": "flash"},
        "flash, shared, compiled, recomputed": {"attention": "flash", "compile": "on", "recompute": "full"},
        "flash, float32 sums": {"attention": "flash", "master": "float32", "share_prompts": False},
    }.items():
        try:
            row(f"gradient, bfloat16 to float32: {name}", f"relative gap {gap(gradients(**learn), wanted):.1e}")
        except Exception as error:
            row(f"gradient, bfloat16: {name}", f"FAILED {str(error)[:300]}")


def work_of(model: Any, samples: int, groups: int, share: bool) -> tuple[int, float]:
    """Tokens computed, and the arithmetic that must be done for them: 6·N·T and causal attention, no recompute."""
    c = model.config
    count = sum(p.numel() for p in model.parameters())
    width = c.num_attention_heads * c.head_dim
    whole, prompt = PROMPT + RESPONSE, PROMPT
    tokens = groups * prompt + samples * RESPONSE if share else samples * whole
    pairs = samples * (whole**2 - prompt**2) / 2 + (groups if share else samples) * prompt**2 / 2
    return tokens, 6 * count * tokens + 12 * c.num_hidden_layers * width * pairs


def time_job(model: Any, name: str, groups: int, micro: int, *, times: int = 1, **learn: Any) -> None:
    if time.perf_counter() - STARTED > LIMIT_S:
        row(name, "skipped: out of time")
        return
    from tidemill.algorithms.registry import get
    from tidemill.learn.engine import Learner

    plain_again(model)
    gc.collect()
    torch.accelerator.empty_cache()
    share = learn.get("share_prompts", True)
    learner = Learner(model, settings(micro, **learn), get("grpo"), 100)
    batch, warm = job(groups, model.config.vocab_size), job(max(1, micro // 4096), model.config.vocab_size)
    try:
        before = time.perf_counter()
        learner.accumulate(warm)
        learner.update()
        torch.accelerator.synchronize()
        ready = time.perf_counter() - before
        learner.accumulate(job(max(1, micro // 2048), model.config.vocab_size))
        learner.update()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        started = time.perf_counter()
        for _ in range(times):
            learner.accumulate(batch)
        asked = time.perf_counter() - started
        torch.accelerator.synchronize()
        added = (time.perf_counter() - started) / times
        started = time.perf_counter()
        learner.update()
        torch.accelerator.synchronize()
        updated = time.perf_counter() - started
    except torch.OutOfMemoryError:
        row(name, "out of memory")
        return
    finally:
        learner.gradients.close()
    spent = added + updated
    tokens, flops = work_of(model, batch.rows, groups, share)
    peak = torch.accelerator.max_memory_allocated() / 2**30
    figures = {
        "samples_per_s": batch.rows / spent, "tokens_per_s": int(batch["tokens"].lengths.sum()) / spent,
        "computed_tokens_per_s": tokens / spent, "step_s": spent, "accumulate_s": added, "host_s": asked / times,
        "update_s": updated, "peak_gib": peak, "first_s": ready, "mfu_data_sheet": flops / spent / DATA_SHEET,
        "mfu_measured": flops / spent / 1e12 / FIGURES.get("matmul_tflops", DATA_SHEET / 1e12),
    }  # fmt: skip
    FIGURES[name] = {k: round(v, 4) for k, v in figures.items()}
    row(
        name,
        f"{spent:.2f} s for {batch.rows} samples (update {updated * 1e3:.0f} ms, host {asked / times:.2f} s), "
        f"{figures['tokens_per_s']:,.0f} tokens/s, MFU {figures['mfu_data_sheet']:.1%} of the data sheet, "
        f"{figures['mfu_measured']:.1%} of measured, peak {peak:.1f} GiB, first {ready:.1f} s",
    )


def profile_job(model: Any, groups: int, micro: int, **learn: Any) -> None:
    """Where the device's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    from tidemill.algorithms.registry import get
    from tidemill.learn.engine import Learner

    plain_again(model)
    learner = Learner(model, settings(micro, **learn), get("grpo"), 100)
    batch = job(groups, model.config.vocab_size)
    learner.accumulate(batch)
    learner.update()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        learner.accumulate(batch)
        learner.update()
        torch.accelerator.synchronize()
    averages = [e for e in trace.key_averages() if e.self_device_time_total > 0 and e.device_type.name != "CPU"]
    averages.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in averages)
    for e in averages[:32]:
        spent = e.self_device_time_total
        say(f"  {spent / total:6.1%} {spent / 1e3:9.2f} ms {e.count:6d} × {e.key[:110]}")
    parts = {"matmul": 0.0, "attention": 0.0, "log-probabilities": 0.0, "optimizer": 0.0, "copies": 0.0, "other": 0.0}
    for e in averages:
        k = e.key.lower()
        part = (
            "attention" if "flash" in k or "fmha" in k or "flex" in k
            else "log-probabilities" if k in ("_statistics", "_gradient")
            else "matmul" if any(w in k for w in ("gemm", "nvjet", "cutlass", "xmma"))
            else "optimizer" if "adam" in k or "multi_tensor" in k or "foreach" in k
            else "copies" if "memcpy" in k or "memset" in k
            else "other"
        )  # fmt: skip
        parts[part] += e.self_device_time_total / total
    FIGURES["device time by part"] = {k: round(v, 4) for k, v in parts.items()}
    row("device time by part", ", ".join(f"{k} {v:.1%}" for k, v in parts.items()))


LIMIT_S = 270.0


def main() -> None:
    global LIMIT_S
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no new variant starts")
    options.add_argument("--only", default="", help="comma-separated sections")
    asked = options.parse_args()
    LIMIT_S = asked.limit
    only = {s for s in asked.only.split(",") if s}
    if "pydantic" not in sys.modules:
        try:
            import pydantic  # noqa: F401
        except ImportError:
            without_pydantic()
    LOG.unlink(missing_ok=True)
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'cpu'}")
    for name, check in (
        ("rate", matmul_rate), ("attention", check_attention), ("logprobs", check_logprobs), ("learner", check_learner),
        ("time_attention", time_attention), ("time_logprobs", time_logprobs),
    ):  # fmt: skip
        if not only or name in only:
            with section(name):
                check()
    model: Any = None
    with section("model"):
        model = model_of("1.5b")
        say(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    alone: dict[str, Any] = {"share_prompts": False, "attention": "flash"}
    fast: dict[str, Any] = {**alone, "compile": "on"}
    variants: list[tuple[str, int, int, dict[str, Any]]] = [
        ("plain (blocks, eager, recompute)", 8, 16384, {**alone, "attention": "blocks", "recompute": "full"}),
        ("flash, eager, recompute", 8, 16384, {**alone, "recompute": "full"}),
        ("flash, compiled, recompute", 16, 32768, {**fast, "recompute": "full"}),
        ("flash, compiled", 16, 16384, fast),
        ("flash, compiled, 32k", 16, 32768, fast),
        ("flash, compiled, every 2nd recomputed, 32k", 16, 32768, {**fast, "recompute": "full", "recompute_every": 2}),
        ("flash, compiled, shared", 16, 16384, {**fast, "share_prompts": True}),
        ("flash, compiled, shared, 32k", 16, 32768, {**fast, "share_prompts": True}),
        ("flex, compiled, shared", 16, 16384, {**fast, "attention": "flex", "share_prompts": True}),
        ("JOB recompute", 64, 32768, {**fast, "recompute": "full"}),
        ("JOB", 64, 16384, {**fast, "logprob_chunk": 8192}),
        ("JOB shared", 64, 16384, {**fast, "logprob_chunk": 8192, "share_prompts": True}),
        ("JOB shared recompute", 64, 32768, {**fast, "recompute": "full", "share_prompts": True}),
        ("stochastic rounding, 8-bit moments", 8, 16384, {**fast, "master": "stochastic", "moments": "int8"}),
        ("optimizer on the host", 8, 16384, {**fast, "optimizer_on_host": True, "moments": "float32"}),
        ("float32 master", 8, 16384, {**fast, "master": "float32"}),
    ]
    if model is not None and (not only or "job" in only):
        for name, groups, micro, learn in variants:
            with section(name):
                time_job(model, name, groups, micro, **learn)
            if name == "flash, compiled, shared, 32k":
                with section("profile"):
                    profile_job(model, 4, 16384, **fast)
    print("\n" + "\n".join(f"{name:60s} {value}" for name, value in TABLE))
    best = FIGURES.get("JOB", {})
    print(json.dumps({"bench": "gpu_learn", **best, "seconds": time.perf_counter() - STARTED, "all": FIGURES}))


if __name__ == "__main__":
    main()
