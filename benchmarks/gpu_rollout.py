"""Checks and times the native engine's accelerator path: kernels, captured decoding, whole workloads.

    PYTHONPATH=src python benchmarks/gpu_rollout.py            # about four minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_rollout.py --quick    # checks and one workload

Each section is guarded: one that fails is printed with its traceback and the rest go on. A table comes last; the full
log goes to $OUT/gpu_rollout.log where OUT is set.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import rollout as bench
from benchmarks._gpu import LOG, TABLE, row, say, section


def milliseconds(work: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        work()
    torch.accelerator.synchronize()
    begin, end = (torch.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


# Kernels


def pages_for(lengths: list[int], page: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    counts = [-(-n // page) for n in lengths]
    keys = torch.randn(sum(counts) + 1, kv_heads, dim, page, device="cuda", dtype=dtype)
    values = torch.randn(sum(counts) + 1, kv_heads, page, dim, device="cuda", dtype=dtype)
    order = torch.randperm(sum(counts)).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for i, held in enumerate(order):
        table[i, : len(held)] = held.int()
    return keys, values, table.cuda()


def check_attention() -> None:
    from tidemill.models.attention.registry import AttentionForm
    from tidemill.rollout.native.kernels.triton_decode import TritonKernels
    from tidemill.rollout.native.pages.attention import causal_attention

    worst = 0.0
    for page in (16, 64):
        for heads, kv_heads, dim, window in ((12, 2, 128, None), (14, 2, 64, None), (28, 4, 128, 100)):
            for splits in (1, 4, 16):
                lengths = [1, 15, 16, 17, 64, 65, 300, 777]
                keys, values, table = pages_for(lengths, page, kv_heads, dim, torch.bfloat16)
                q, k, v = (
                    torch.randn(len(lengths), h, dim, device="cuda", dtype=torch.bfloat16)
                    for h in (heads, kv_heads, kv_heads)
                )
                length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
                out = TritonKernels().attend(
                    q, k, v, keys, values, table, length, AttentionForm(dim**-0.5, window), splits
                )
                for i, n in enumerate(lengths):
                    held = table[i, : -(-n // page)].long()
                    all_k = keys[held].permute(1, 0, 3, 2).flatten(1, 2)[None, :, :n].float()
                    all_v = values[held].permute(1, 0, 2, 3).flatten(1, 2)[None, :, :n].float()
                    assert torch.equal(all_k[0, :, -1], k[i].float()), "the new key was not written"
                    wanted = causal_attention(
                        q[i, None, :, None].float(), all_k, all_v, n - 1, AttentionForm(dim**-0.5, window)
                    )[0, :, 0]
                    worst = max(worst, (out[i].float() - wanted).abs().max().item())
    row("attention: largest error, bf16", f"{worst:.4f}")
    assert worst < 0.03


def check_draw() -> None:
    from tidemill.rollout.native.draw.sampling import Draw, draw, stream_key
    from tidemill.rollout.native.kernels.triton_decode import TritonKernels

    rows, vocab = 256, 151936
    torch.manual_seed(0)
    logits = torch.randn(rows, vocab, device="cuda") * 2
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    state = SimpleNamespace(
        temperature=torch.rand(rows, device="cuda") + 0.5,
        greedy=(index % 4 == 0).int(),
        key=torch.tensor([stream_key(0, 0, i) for i in range(rows)], device="cuda"),
        latest=torch.zeros(rows, dtype=torch.int64, device="cuda"),
    )
    tokens, logprobs = TritonKernels().draw(logits, index, index, index, state)
    wanted = draw(logits, Draw(state.key, index.long(), state.temperature, state.greedy.bool()))
    same = tokens == wanted.tokens
    gap = (logprobs - wanted.logprobs)[same].abs().max().item()
    row("draw: same tokens as torch", f"{same.float().mean().item():.3f} (log-probability gap {gap:.1e})")
    assert same.float().mean() > 0.9 and gap < 1e-3


def time_kernels() -> None:
    from tidemill.models.attention.registry import AttentionForm
    from tidemill.rollout.native.kernels.triton_decode import TritonKernels

    rows, heads, kv_heads, dim, hidden, inside, vocab = 512, 12, 2, 128, 1536, 8960, 151936
    lengths = np.random.default_rng(0).integers(257, 769, rows).tolist()
    moved = sum(lengths) * kv_heads * dim * 2 * 2
    q, k, v = (torch.randn(rows, h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
    length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for page in sorted({variant[0] for variant in ATTEND_VARIANTS}):
        keys, values, table = pages_for(lengths, page, kv_heads, dim, torch.bfloat16)
        for block, warps, stages in (variant[1:] for variant in ATTEND_VARIANTS if variant[0] == page):
            for splits in (1, 2):
                kernels = TritonKernels(block, warps, stages)
                try:
                    ms = milliseconds(
                        lambda: kernels.attend(q, k, v, keys, values, table, length, AttentionForm(dim**-0.5), splits)  # noqa: B023
                    )
                except Exception as error:
                    say(f"attend page {page} block {block} warps {warps} stages {stages}: {str(error)[:120]}")
                    continue
                say(
                    f"attend page {page} block {block} warps {warps} stages {stages} splits {splits}: "
                    f"{ms * 1e3:.0f} us, {moved / ms / 1e9:.2f} TB/s"
                )
                BEST_ATTEND.append((ms, page, block, warps, stages, splits))
    ms, page, block, warps, stages, splits = min(BEST_ATTEND)
    row(
        "attention, 512 rows of 257-768 tokens",
        f"{ms * 1e3:.0f} us, {moved / ms / 1e9:.2f} TB/s (page {page}, block {block}, warps {warps}, stages {stages}, "
        f"splits {splits})",
    )
    kernels = TritonKernels()
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(rows, 2 * inside, device="cuda", dtype=torch.bfloat16)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    table_ = torch.randn(1024, 1, dim, device="cuda", dtype=torch.bfloat16)
    at = torch.randint(0, 1024, (rows,), device="cuda")
    head = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.mm(x, head.t(), out_dtype=torch.float32)
    index = torch.arange(rows, dtype=torch.int32, device="cuda")
    state = SimpleNamespace(
        temperature=torch.ones(rows, device="cuda"), greedy=torch.zeros_like(index),
        key=torch.arange(rows, device="cuda"), latest=torch.zeros(rows, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    gu, down, wo, wqkv = (
        torch.randn(a, b, device="cuda", dtype=torch.bfloat16)
        for a, b in ((2 * inside, hidden), (hidden, inside), (hidden, hidden), (qkv.shape[1], hidden))
    )
    half = wide[:, :inside].contiguous()
    parts = {
        "rms": lambda: kernels.rms(x, weight, 1e-6),
        "rotate": lambda: kernels.rotate(qkv, (heads, kv_heads), None, (table_, table_, at), 1e-6),
        "gate": lambda: kernels.gate(wide),
        "draw": lambda: kernels.draw(logits, index, index, index, state),
        "linear qkv": lambda: torch.nn.functional.linear(x, wqkv),
        "linear out (addmm_)": lambda: x.addmm_(x, wo.t()),
        "linear gate_up": lambda: torch.nn.functional.linear(x, gu),
        "linear down (addmm_)": lambda: x.addmm_(half, down.t()),
        "head, float32 out": lambda: torch.mm(x, head.t(), out_dtype=torch.float32),
        "head, bf16 out": lambda: torch.mm(x, head.t()),
    }
    row("kernels, us", ", ".join(f"{name} {milliseconds(work) * 1e3:.0f}" for name, work in parts.items()))


# page, then block, warps and stages of the kernel
ATTEND_VARIANTS = (
    (16, 16, 2, 5), (32, 32, 2, 5), (32, 32, 4, 4), (64, 32, 2, 5), (64, 32, 4, 5), (64, 64, 4, 2), (64, 64, 4, 3),
    (64, 64, 4, 4), (64, 64, 4, 5), (64, 64, 8, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3),
)  # fmt: skip
BEST_ATTEND: list[tuple[float, int, int, int, int, int]] = []


# Engines


def tiny(kind: str) -> Any:
    import transformers
    from transformers import AutoModelForCausalLM

    import tidemill.models.attention.registry  # noqa: F401

    config = getattr(transformers, kind)(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill", dtype=torch.float32).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def check_engine() -> None:
    """Captured decoding against the plain reference engine: the same samples, in float32."""
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.hf import HFEngine
    from tidemill.rollout.native.engine import NativeEngine

    for kind in ("Qwen2Config", "Qwen3Config", "LlamaConfig"):
        model = tiny(kind)
        rng = np.random.default_rng(0)
        asked = [
            Request(i, rng.integers(3, 500, 3 + 11 * i).tolist(), Sampling(max_tokens=40, temperature=i % 3 * 0.5), n=2)
            for i in range(9)
        ]

        def roll(engine: Any) -> dict[tuple[int, int], Any]:
            for request in asked:  # noqa: B023
                engine.submit(request)
            done = {}
            while engine.has_work:
                for completion in engine.step():
                    done[completion.request.id, completion.index] = completion
            return done

        wanted = roll(HFEngine(model, eos_ids=range(2, 8)))
        engine = NativeEngine(model, eos_ids=range(2, 8), max_seqs=10, max_len=256, page_size=16, step_tokens=64)
        assert engine.decoder is not None, "no captured decoding"
        made = roll(engine)
        same = np.mean([made[key].tokens == wanted[key].tokens for key in wanted])
        gap = max(
            np.abs(np.array(made[key].logprobs) - np.array(wanted[key].logprobs)).max()
            for key in wanted
            if made[key].tokens == wanted[key].tokens
        )
        row(f"engine against reference, {kind}", f"{same:.2f} of samples equal, log-probability gap {gap:.1e}")
        assert same > 0.85 and engine.pool.used == 0


def sleep_gives_back() -> None:
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.engine import NativeEngine

    engine = NativeEngine(tiny("Qwen2Config"), eos_ids=[], max_seqs=64, max_len=512, cache_tokens=1 << 18)
    engine.submit(Request(0, [5, 6], Sampling(max_tokens=4), n=64))
    while engine.has_work:
        engine.step()
    held = engine.store.nbytes
    torch.accelerator.empty_cache()
    awake = torch.accelerator.get_memory_info()[0]
    engine.sleep()
    torch.accelerator.empty_cache()
    asleep = torch.accelerator.get_memory_info()[0]
    engine.wake()
    engine.submit(Request(1, [5, 6], Sampling(max_tokens=4), n=64))
    while engine.has_work:
        engine.step()
    row("sleep", f"{(asleep - awake) / 2**20:.0f} MiB of {held / 2**20:.0f} MiB cache given back")


def run_engine(shape: str, workload: str, *, page: int = 32, variant: tuple[int, int, int] = (32, 2, 5)) -> None:
    from tidemill.device import mapped
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.engine import NativeEngine

    work = bench._work(f"{workload}-{shape}")
    like = bench._shape(shape, "cuda", work.window)
    model = MODELS.get(shape) or like.model
    MODELS[shape] = model
    floor = bench._floor_ms(like, work)
    torch.accelerator.synchronize()
    started = time.perf_counter()
    engine = NativeEngine(model, eos_ids=[], max_seqs=work.lengths.size, max_len=work.window, page_size=page)
    assert engine.decoder is not None
    kernels: Any = engine.runner.kernels  # type: ignore[attr-defined]
    kernels.block, kernels.warps, kernels.stages = variant
    with torch.inference_mode():
        engine.decoder.capture()
    torch.accelerator.synchronize()
    ready = time.perf_counter() - started
    results = []
    for attempt in range(2):
        for i, prompt in enumerate(work.prompts):
            limits = work.lengths[i].tolist()
            engine.submit(Request(i, prompt, Sampling(), n=len(limits), limits=limits))
        torch.accelerator.synchronize()
        started = time.perf_counter()
        made, steps, times = 0, 0, []
        while engine.has_work:
            before = time.perf_counter()
            made += sum(len(c.tokens) for c in engine.step())
            times.append(time.perf_counter() - before)
            steps += 1
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
        assert made == work.tokens, (made, work.tokens)
        results.append((made / seconds, seconds, steps, float(np.median(times) * 1e3)))
        say(f"{workload}-{shape} run {attempt}: {made / seconds:,.0f} tokens/s in {seconds:.2f} s, {steps} steps")
    best = max(results)
    peak = (torch.accelerator.max_memory_allocated() + mapped.most_bytes()) / 2**30
    share = floor / 1e3 / best[1]
    row(
        f"{workload}-{shape} page {page} attend {variant}",
        f"{best[0]:,.0f} tokens/s, step {best[3]:.2f} ms (median), floor {floor / best[2]:.2f} ms, "
        f"share of floor {share:.2f}, ready in {ready:.1f} s, peak {peak:.1f} GiB",
    )
    FIGURES[f"{workload}-{shape}-page{page}-{variant}"] = {
        "tokens_per_s": best[0], "step_ms": best[3], "floor_ms": floor / best[2], "share_of_floor": share,
        "start_s": ready, "peak_gib": peak,
    }  # fmt: skip
    if (shape, workload) == ("1.5b", "fixed") and not BEST_ATTEND:
        with section("profile"):
            profile_step(engine, work)
        with section("mismatch"):
            mismatch(engine, model, work)


MODELS: dict[str, Any] = {}
FIGURES: dict[str, Any] = {}


def profile_step(engine: Any, work: Any) -> None:
    """Where a step of 512 rows goes, kernel by kernel, and what the host does meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    from tidemill.rollout.engine import Request, Sampling

    for i, prompt in enumerate(work.prompts):
        engine.submit(Request(i, prompt, Sampling(max_tokens=200), n=8))
    for _ in range(100):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            engine.step()
        torch.accelerator.synchronize()
    say(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=70))
    import cProfile
    import io
    import pstats

    host = cProfile.Profile()
    host.enable()
    for _ in range(20):
        engine.step()
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(14)
    say(text.getvalue())
    while engine.has_work:
        engine.step()


def mismatch(engine: Any, model: Any, work: Any) -> None:
    """Rollout's log-probabilities against a plain forward pass of the whole sequence, both bfloat16."""
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.mismatch import measure

    for i, prompt in enumerate(work.prompts[:8]):
        engine.submit(Request(i, prompt, Sampling(max_tokens=128), n=2))
    ours, theirs = [], []
    model.set_attn_implementation("sdpa")
    done = []
    while engine.has_work:
        done += engine.step()
    for completion in done:
        prompt = list(completion.request.prompt)
        ids = torch.tensor([[*prompt, *completion.tokens]], device="cuda")
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            logits = torch.mm(hidden, model.lm_head.weight.t(), out_dtype=torch.float32)
            picked = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        ours.append(np.array(completion.logprobs))
        theirs.append(picked.cpu().numpy())
    model.set_attn_implementation("tidemill")
    met = measure(np.concatenate(ours), np.concatenate(theirs))
    row("mismatch, 1.5b bf16", f"mean {met.mean:.1e}, max {met.max:.1e}, ratio mean {met.ratio_mean:.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="sections whose name contains this")
    parser.add_argument("--no-7b", action="store_true")
    chosen = parser.parse_args()
    LOG.unlink(missing_ok=True)
    import transformers
    import triton

    say(f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}")
    say(torch.cuda.get_device_name())
    torch.backends.cuda.matmul.allow_tf32 = False
    sections: list[tuple[str, Callable[[], None]]] = [
        ("check attention", check_attention),
        ("check draw", check_draw),
        ("check engine", check_engine),
        ("sleep", sleep_gives_back),
        ("fixed 1.5b", lambda: run_engine("1.5b", "fixed")),
    ]
    if not chosen.quick:
        sections += [
            ("time kernels", time_kernels),
            ("fixed 1.5b, best attention", fixed_with_best),
            ("tail 1.5b", lambda: run_engine("1.5b", "tail")),
            ("fixed 0.5b", lambda: run_engine("0.5b", "fixed")),
            ("tail 0.5b", lambda: run_engine("0.5b", "tail")),
        ]
        if not chosen.no_7b:
            sections.append(("fixed 7b", only_7b))
    for name, work in sections:
        if chosen.only in name:
            with section(name):
                work()
    print("\n" + "\n".join(f"{name:55} {value}" for name, value in TABLE))
    print(json.dumps(FIGURES))
    (LOG.parent / "gpu_rollout.json").write_text(json.dumps({"figures": FIGURES, "table": TABLE}, indent=1))


def fixed_with_best() -> None:
    _, page, block, warps, stages, _ = min(entry for entry in BEST_ATTEND if entry[5] == 1)
    run_engine("1.5b", "fixed", page=page, variant=(block, warps, stages))


def only_7b() -> None:
    MODELS.clear()
    torch.accelerator.empty_cache()
    run_engine("7b", "fixed")


if __name__ == "__main__":
    main()
