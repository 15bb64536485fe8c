"""Checks and times the learner's accelerator paths: attention, log-probabilities, whole updates of the 1.5B job.

    PYTHONPATH=SITE:src python benchmarks/gpu_learn.py --only rate,learner,job   # about five minutes on an H200
    PYTHONPATH=SITE:src python benchmarks/gpu_learn.py --only rate,options       # every optimizer and saving, once
    PYTHONPATH=SITE:src python benchmarks/gpu_learn.py --only rate,optimizers,low # 8 bits, Muon, savings; four minutes
    PYTHONPATH=SITE:src python benchmarks/gpu_learn.py --only rate,wide --shape 7b # 8-bit products of a 7B shape
    PYTHONPATH=SITE:src python benchmarks/gpu_learn.py --only rate,attention,logprobs,time_attention,time_logprobs

The job: 64 prompts × 8 samples of 256 + 512 tokens, GRPO, the shape of Qwen2.5-1.5B with random bfloat16 weights.
Beside each measured peak stands the estimate of `tidemill doctor`. Each section is guarded: one that fails is printed
with its traceback and the rest go on. A table and one JSON object come last; the log goes to $OUT where OUT is set.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
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
    empty,
    finish,
    is_late,
    job,
    model_of,
    parameters_of,
    report,
    row,
    say,
    seconds,
    section,
    settings,
    time_update,
    work_of,
)


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
    from tidemill.models.attention.registry import AttentionForm

    out = context.attend(0, *inputs, AttentionForm(128**-0.5, window))
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out, dtype=torch.float32).to(out.dtype))
    return [out.detach(), *grads]


def gap(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(ours, wanted))


def check_attention() -> None:
    from tidemill.models.attention.contexts import KINDS

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
    from tidemill.models.attention.contexts import KINDS

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
    from tidemill.learn.logprob.tokens import token_logprobs

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
    from tidemill.learn.logprob.tokens import token_logprobs

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


def check_learner() -> None:
    """Whole gradients of every variant against the plain path, in float32."""
    from tidemill.algorithms.shared.registry import get
    from tidemill.learn.engine import Learner

    model, batch = model_of("tiny").float(), job(3, 500, 4, 37, 70)

    def gradients(**learn: Any) -> list[torch.Tensor]:
        as_loaded(model)
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
        "MLPs recomputed": {"attention": "blocks", "recompute": "mlp"},
        "activations recomputed": {"attention": "blocks", "recompute": "selective"},
        "compiled, MLPs recomputed": {"attention": "blocks", "compile": "on", "recompute": "mlp"},
        "compiled, activations recomputed": {"attention": "blocks", "compile": "on", "recompute": "selective"},
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
        "flash, 8-bit products, tensorwise": {"attention": "flash", "fp8": "tensorwise", "share_prompts": False},
        "flash, 8-bit products, rowwise": {"attention": "flash", "fp8": "rowwise", "share_prompts": False},
        "flash, float32 sums": {"attention": "flash", "master": "float32", "share_prompts": False},
    }.items():
        try:
            row(f"gradient, bfloat16 to float32: {name}", f"relative gap {gap(gradients(**learn), wanted):.1e}")
        except Exception as error:
            row(f"gradient, bfloat16: {name}", f"FAILED {str(error)[:300]}")


def check_optimizers() -> None:
    """The fused update against the plain one, and both timed on as many weights as the 1.5B shape's embeddings have."""
    from tidemill.learn.optim.adam import Adam
    from tidemill.learn.optim.muon import orthogonal

    group: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    rows = 151936 if ON_DEVICE else 40
    for master, moments in (("none", "int8"), ("float32", "float32"), ("float32", "int8"), ("stochastic", "int8")):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(rows, 1536, device=DEVICE).bfloat16())
        p.grad = torch.randn(rows, 1536, device=DEVICE).bfloat16() * 0.1
        how = {k: v for k, v in group.items() if k != "weight_decay"}
        one = Adam([{"params": [p], **group}], gradient=lambda p: p.grad, master=master, moments=moments, **how)  # type: ignore[arg-type]
        one.step()
        state = {k: v.clone() for k, v in one.state[p].items() if k != "step"}
        plain = torch.nn.Parameter(p.detach().clone())
        one.step()
        plain_state = one._plain_step(
            plain.data, p.grad.float(), state, 2, group, 1 if master == "stochastic" else None
        )
        kept = one.state[p]
        codes = [(kept[k].int() - v.int()).abs() for k, v in plain_state.items() if v.dtype != torch.float32]
        floats = [((kept[k] - v).norm() / v.norm()).item() for k, v in plain_state.items() if v.dtype == torch.float32]
        far = (p.float() - plain.float()).abs().max().item()
        apart = max([c.max().item() for c in codes], default=0)
        right = max(floats) < 1e-4 and apart <= 1 and far < 0.05
        fused_ms = seconds(one.step, 5, 2) * 1e3
        plainly = partial(one._plain_step, plain.data, p.grad.float(), state, 3, group, None)
        plain_ms = seconds(plainly, 2, 1) * 1e3
        row(
            f"AdamW master {master}, moments {moments}: {p.numel() / 1e6:.0f} M weights",
            f"fused {fused_ms:.2f} ms, plain {plain_ms:.1f} ms; state {max(floats):.1e}, codes at most {apart} apart, "
            f"weights {far:.1e} {'ok' if right else 'WRONG'}",
        )
        del one, p, plain, state, plain_state, kept, codes, plainly
        empty()
    x = torch.randn((8, 1536, 8960) if ON_DEVICE else (2, 15, 60), device=DEVICE)
    wanted, found = orthogonal(x), orthogonal(x.bfloat16()).float()
    gap_16 = ((wanted - found).norm() / wanted.norm()).item()
    ms = [seconds(lambda y=y: orthogonal(y), 3, 1) * 1e3 / len(x) for y in (x, x.bfloat16())]
    row("Newton-Schulz of an MLP's matrix", f"float32 {ms[0]:.2f} ms, bfloat16 {ms[1]:.2f} ms, gap {gap_16:.1e}")


def check_deterministic() -> None:
    """The same batch twice from the same weights: are the gradients the same bits, with and without being asked to."""
    from tidemill.algorithms.shared.registry import get
    from tidemill.device import determinism
    from tidemill.learn.engine import Learner

    model, batch = model_of("tiny"), job(8, 500, 8, 37, 200)

    def gradients() -> list[torch.Tensor]:
        as_loaded(model)
        learner = Learner(model, settings(4096, 8, attention="flash", compile="on"), get("grpo"), 1)
        learner.accumulate(batch)
        return [p.grad.clone() for p in model.parameters()]

    for asked in (False, True):
        if asked:
            determinism.demand()
        first, *others = [gradients() for _ in range(4)]
        unlike = sum(not torch.equal(a, b) for other in others for a, b in zip(first, other))
        verdict = "ok" if not unlike else "WRONG" if asked else "as may be"
        row(f"gradients four times over, deterministic {asked}", f"{unlike} tensors differ {verdict}")
    torch.use_deterministic_algorithms(False)


def profile_job(model: Any, groups: int, micro: int, **learn: Any) -> None:
    """Where the device's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    from tidemill.algorithms.shared.registry import get
    from tidemill.learn.engine import Learner

    as_loaded(model)
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
            else "log-probabilities" if k in ("_fold", "_gradient")
            else "matmul" if any(w in k for w in ("gemm", "nvjet", "cutlass", "xmma"))
            else "optimizer" if "adam" in k or "multi_tensor" in k or "foreach" in k
            else "copies" if "memcpy" in k or "memset" in k
            else "other"
        )  # fmt: skip
        parts[part] += e.self_device_time_total / total
    FIGURES["device time by part"] = {k: round(v, 4) for k, v in parts.items()}
    row("device time by part", ", ".join(f"{k} {v:.1%}" for k, v in parts.items()))


def time_job(model: Any, name: str, groups: int, micro: int, **learn: Any) -> None:
    as_loaded(model)
    groups = groups if ON_DEVICE else 1
    share = learn.get("share_prompts", True)
    words, parameters = model.config.vocab_size, parameters_of(model)
    try:
        figures = time_update(
            model,
            settings(micro, groups, **learn),
            job(groups, words),
            [job(max(1, micro // 4096), words), job(max(1, micro // 2048), words)],
        )
    except torch.OutOfMemoryError:
        row(name, "out of memory")
        return
    report(name, figures, work_of(model, groups * EACH, groups, share, parameters)[1])


ALONE: dict[str, Any] = {"share_prompts": False, "attention": "flash" if ON_DEVICE else "blocks"}
FAST: dict[str, Any] = {**ALONE, "compile": "on"}
# Name, groups of 8 samples, tokens a pass, settings.
JOBS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("JOB recompute MLPs", 64, 16384, {**FAST, "recompute": "mlp"}),
    ("JOB recompute activations", 64, 16384, {**FAST, "recompute": "selective"}),
    ("JOB", 64, 16384, {**FAST, "logprob_chunk": 8192}),
    ("JOB shared", 64, 16384, {**FAST, "logprob_chunk": 8192, "share_prompts": True}),
    ("JOB recompute activations, 8k tokens", 64, 8192, {**FAST, "recompute": "selective"}),
    ("JOB recompute MLPs, 8k tokens", 64, 8192, {**FAST, "recompute": "mlp", "logprob_chunk": 2048}),
    ("JOB recompute all", 64, 32768, {**FAST, "recompute": "full"}),
    ("JOB shared, recompute MLPs", 64, 16384, {**FAST, "recompute": "mlp", "share_prompts": True}),
    ("JOB shared, recompute all", 64, 32768, {**FAST, "recompute": "full", "share_prompts": True}),
]
# The same job in as little memory as TRL's learner takes, or less.
LITTLE: dict[str, Any] = {**FAST, "logprob_chunk": 1024}
EIGHT_BITS: dict[str, Any] = {"master": "stochastic", "moments": "int8"}
SMALL: list[tuple[str, int, int, dict[str, Any]]] = [
    ("JOB recompute MLPs, 16k tokens, 8-bit moments", 64, 16384, {**LITTLE, "recompute": "mlp", **EIGHT_BITS}),
    ("JOB recompute MLPs, 8k tokens, small chunks", 64, 8192, {**LITTLE, "recompute": "mlp"}),
    ("JOB recompute MLPs, 12k tokens, small chunks", 64, 12288, {**LITTLE, "recompute": "mlp"}),
    ("JOB recompute MLPs, 12k tokens, 8-bit moments", 64, 12288, {**LITTLE, "recompute": "mlp", **EIGHT_BITS}),
    ("JOB recompute MLPs, 8k tokens, 8-bit moments", 64, 8192, {**LITTLE, "recompute": "mlp", **EIGHT_BITS}),
    ("JOB recompute all, 16k tokens", 64, 16384, {**LITTLE, "recompute": "full"}),
    ("JOB recompute all, 8k tokens", 64, 8192, {**LITTLE, "recompute": "full"}),
    ("JOB recompute MLPs, 4k tokens", 64, 4096, {**LITTLE, "recompute": "mlp"}),
]
OPTIONS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("AdamW", 16, 16384, FAST),
    ("float32 copies", 16, 16384, {**FAST, "master": "float32"}),
    ("stochastic rounding, 8-bit moments", 16, 16384, {**FAST, "master": "stochastic", "moments": "int8"}),
    ("optimizer on the host", 16, 16384, {**FAST, "optimizer_on_host": True, "moments": "float32"}),
    ("Muon", 16, 16384, {**FAST, "optimizer": "muon"}),
    ("LoRA 16", 16, 16384, {**FAST, "lora_rank": 16}),
    ("LoRA 16, recompute all", 16, 16384, {**FAST, "lora_rank": 16, "recompute": "full"}),
    ("DoRA 16", 16, 16384, {**FAST, "lora_rank": 16, "dora": True}),
    ("8-bit products, tensorwise", 16, 16384, {**FAST, "fp8": "tensorwise"}),
    ("8-bit products, rowwise", 16, 16384, {**FAST, "fp8": "rowwise"}),
    ("activations on the host", 8, 8192, {**FAST, "offload": "activations"}),
    ("eager", 8, 16384, {**ALONE, "compile": "off"}),
]
# What OPTIONS has of optimizers, 8-bit products and savings, those first that were slow once.
LOW: list[tuple[str, int, int, dict[str, Any]]] = [
    ("AdamW", 16, 16384, FAST),
    ("stochastic rounding, 8-bit moments", 16, 16384, {**FAST, "master": "stochastic", "moments": "int8"}),
    ("Muon", 16, 16384, {**FAST, "optimizer": "muon"}),
    ("8-bit products, tensorwise", 16, 16384, {**FAST, "fp8": "tensorwise"}),
    ("8-bit products, rowwise", 16, 16384, {**FAST, "fp8": "rowwise"}),
    ("float32 copies", 16, 16384, {**FAST, "master": "float32"}),
    (
        "recompute MLPs, 8k tokens, 8-bit moments",
        16,
        8192,
        {**FAST, "recompute": "mlp", "logprob_chunk": 1024, "master": "stochastic", "moments": "int8"},
    ),
    ("eager", 8, 16384, {**ALONE, "compile": "off"}),
    ("activations on the host", 8, 8192, {**FAST, "offload": "activations"}),
    ("optimizer on the host", 16, 16384, {**FAST, "optimizer_on_host": True, "moments": "float32"}),
    ("recompute activations", 16, 16384, {**FAST, "recompute": "selective"}),
]
# With --shape 7b, whose products are large enough for 8 bits to show.
WIDE: list[tuple[str, int, int, dict[str, Any]]] = [
    (f"recompute MLPs, products {kind}", 4, 8192, {**FAST, "recompute": "mlp", "fp8": kind})
    for kind in ("none", "tensorwise", "rowwise")
]
PARTS = {"small": SMALL, "job": JOBS, "options": OPTIONS, "low": LOW, "wide": WIDE}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=300.0, help="seconds after which no new variant starts")
    options.add_argument("--only", default="", help="comma-separated sections; none: all")
    options.add_argument("--shape", default="1.5b", help="tiny: to try the script itself")
    asked = options.parse_args()
    only = {s for s in asked.only.split(",") if s}
    begin()
    checks = {
        "rate": matmul_rate, "attention": check_attention, "logprobs": check_logprobs, "learner": check_learner,
        "time_attention": time_attention, "time_logprobs": time_logprobs, "deterministic": check_deterministic,
        "optimizers": check_optimizers,
    }  # fmt: skip
    for name, check in checks.items():
        if not only or name in only:
            with section(name):
                check()
    usual = only or PARTS.keys() - {"low", "wide"}
    variants = [v for part, all_of in PARTS.items() if part in usual for v in all_of]
    profiles = {"profile": FAST, "profile_fp8": {**FAST, "fp8": "tensorwise"}}
    if variants or only & profiles.keys():
        model = model_of(asked.shape)
        say(f"{parameters_of(model):,} parameters")
        for name, groups, micro, learn in variants:
            if is_late(name, asked.limit):
                continue
            with section(name):
                time_job(model, name, groups, micro, **learn)
        for name in [name for name in profiles if name in only]:
            with section(name):
                profile_job(model, 4, 16384, **profiles[name])
    finish("gpu_learn", "JOB recompute activations, 8k tokens")


if __name__ == "__main__":
    main()
