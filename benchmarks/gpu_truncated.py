"""Truncated and steered sampling inside captured graphs, and graphs that outlive a sleep, on an accelerator.

    PYTHONPATH=src python benchmarks/gpu_truncated.py                  # about three minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_truncated.py --device cpu     # a tiny shape, to see that it runs

Sections are guarded: one that fails is printed and the rest go on. One JSON object comes last.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks._gpu_rollout import FIGURES, Setup, roll, run, say

# Off is a value that cuts nothing, as the engine writes it.
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 1000": {"top_k": 1000},
    "min_p 0.05": {"min_p": 0.05},
}


def steered(vocab: int) -> dict[str, dict[str, Any]]:
    return {
        "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        "allowed tokens, top_p 0.95": {"allowed_tokens": tuple(range(3, min(400, vocab))), "top_p": 0.95},
        "bias": {"logit_bias": dict.fromkeys(range(10, 60), 0.5)},
    }


def state_of(rows: int, device: str, hows: list[dict[str, Any]]) -> SimpleNamespace:
    from tidemill.rollout.native.draw.sampling import stream_key

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([hows[i % len(hows)].get(name, off) for i in range(rows)], dtype=dtype, device=device)

    torch.manual_seed(0)
    return SimpleNamespace(
        temperature=torch.rand(rows, device=device) + 0.5,
        greedy=torch.zeros(rows, dtype=torch.int32, device=device),
        key=torch.tensor([stream_key(0, 0, i) for i in range(rows)], device=device),
        latest=torch.zeros(rows, dtype=torch.int64, device=device),
        top_k=column("top_k", (1 << 31) - 1, torch.int32),
        top_p=column("top_p", 2.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
    )


def eager(logits: torch.Tensor, position: torch.Tensor, state: SimpleNamespace) -> Any:
    from tidemill.rollout.native.draw.sampling import Draw, draw

    rows = torch.arange(len(logits), device=logits.device)
    how = Draw(
        state.key, position.long(), state.temperature, truncated=rows, top_k=state.top_k.long(), top_p=state.top_p,
        min_p=state.min_p,
    )  # fmt: skip
    return draw(logits, how)


def kernels(setup: Setup) -> None:
    """The draw alone: against the torch one, and how long each takes."""
    from tidemill.rollout.native.draw import triton_draw

    rows, vocab = 512, 151936
    index = torch.arange(rows, dtype=torch.int32, device=setup.device)
    for name, spread in (("flat", 0.3), ("as random weights make it", 1.0), ("peaked", 6.0)):
        logits = torch.randn(rows, vocab, device=setup.device) * spread
        state = state_of(rows, setup.device, list(HOWS.values()))
        tokens, logprobs, kept = triton_draw.draw_truncated(logits, index, index, index, state)
        wanted = eager(logits, index, state)
        same = tokens == wanted.tokens
        gap = (logprobs - wanted.logprobs)[same].abs().max().item()
        mass = (kept - wanted.kept).abs().max().item()
        say(f"draw, {name}", f"{same.float().mean().item():.4f} of tokens as torch's, log-probabilities within "
            f"{gap:.1e}, log of the kept mass within {mass:.1e}")  # fmt: skip
        for how_name, how in HOWS.items():
            state = state_of(rows, setup.device, [how])
            kernel = triton_draw.draw_truncated if how else triton_draw.draw
            ms = milliseconds(setup, lambda: kernel(logits, index, index, index, state))  # noqa: B023
            FIGURES[f"draw-{spread}-{how_name}-ms"] = ms
            say(f"draw of {rows} rows, {name}, {how_name}", f"{ms:.3f} ms")
        del wanted
    state = state_of(rows, setup.device, [HOWS["top_k 50, top_p 0.95"]])
    say(
        "the same outside a graph, with torch's sort",
        f"{milliseconds(setup, lambda: eager(logits, index, state)):.2f} ms",
    )


def milliseconds(setup: Setup, work: Callable[[], Any], times: int = 10) -> float:
    work()
    started = setup.wait()
    for _ in range(times):
        work()
    return (setup.wait() - started) / times * 1e3


def equality(setup: Setup) -> None:
    """A small model in float32: samples of captured decoding against those drawn outside of it, all kinds mixed."""
    from benchmarks._rollout_engines import Work
    from benchmarks.gpu_rollout import tiny
    from tidemill.rollout.native.engine import NativeEngine

    rng = np.random.default_rng(0)
    work = Work([rng.integers(3, 500, 5 + 3 * i).tolist() for i in range(12)], np.full((12, 4), 60))
    model = tiny("Qwen2Config")
    hows = [{**how, "temperature": 0.7 + 0.1 * i} for i, how in enumerate(HOWS.values())]
    hows += [{"temperature": 0.0}, {"top_k": 5, "seed": 3}, *steered(model.config.vocab_size).values()]
    wanted, _ = roll(NativeEngine(model, eos_ids=[], max_seqs=48, max_len=256, graphs=False), work, *hows)
    engine = NativeEngine(model, eos_ids=[], max_seqs=48, max_len=256)
    assert engine.decoder is not None

    def outside(*_: Any) -> Any:
        raise AssertionError("drawn outside the graph")

    engine._draw = outside  # type: ignore[method-assign]
    made, _ = roll(engine, work, *hows)
    same = float(np.mean([a.tokens == b.tokens for a, b in zip(made, wanted)]))
    gaps = [np.abs(np.array(a.kept) - np.array(b.kept)).max() for a, b in zip(made, wanted)
            if a.tokens == b.tokens and b.kept is not None]  # fmt: skip
    say("samples in graphs as outside", f"{same:.3f} of {len(made)}, kept mass within {max(gaps):.1e}")
    kinds = sorted({(kind.is_truncated, kind.is_steered) for kind in engine.decoder.buckets})
    say("kinds captured (truncated, steered)", f"{kinds}; {len(engine.decoder.buckets)} graphs")
    FIGURES["equal"] = same


def speeds(setup: Setup) -> None:
    work = setup.works["fixed"]
    engine = setup.engine(work)
    rates: dict[str, float] = {}
    for name, how in (HOWS | steered(setup.shape.config.vocab_size)).items():
        before = setup.wait()
        roll(engine, work, how, most=3)
        first = setup.wait() - before
        best, steps = 0.0, 0
        for _ in range(2):
            started = setup.wait()
            done, steps = roll(engine, work, how)
            best = max(best, sum(len(c.tokens) for c in done) / (setup.wait() - started))
        rates[name] = best
        kept = [np.exp(c.kept).mean() for c in done if c.kept is not None]
        say(f"fixed, {name}", f"{best:,.0f} tokens/s, {work.lengths.size / best * 1e3:.2f} ms a step, "
            f"{best / rates['plain']:.2f} x plain; kept mass {np.mean(kept) if kept else 1:.3f}; "
            f"first three tokens {first:.2f} s (kernels compiled, graphs captured)")  # fmt: skip
        FIGURES[f"fixed-{name}"] = {"tokens_per_s": best, "step_ms": work.lengths.size / best * 1e3, "steps": steps}
    engine.sleep()


def engine_of(setup: Setup, keeps: bool) -> Any:
    """With a cache as it is, or one whose addresses do not stay when it sleeps."""
    engine = setup.engine(setup.works["fixed"])
    if not keeps:
        engine.store.memory = None  # nothing is written yet but by capturing: dropped here, captured again below
        engine.store.clear()
        if engine.decoder is not None:
            engine.decoder.forget_graphs()
            with torch.inference_mode():
                engine.decoder.capture()
    return engine


def cost_of_addresses(setup: Setup) -> None:
    """Whether decoding is slower in a cache whose addresses stay: the two in turn, plain draws."""
    work = setup.works["fixed"]
    rates: dict[bool, list[float]] = {True: [], False: []}
    for keeps in (True, False, True, False, True, False):
        engine = engine_of(setup, keeps)
        roll(engine, work, most=3)
        started = setup.wait()
        done, _ = roll(engine, work)
        rates[keeps].append(sum(len(c.tokens) for c in done) / (setup.wait() - started))
        engine.sleep()
        del engine
        gc.collect()
    both = {keeps: float(np.median(found)) for keeps, found in rates.items()}
    say("addresses that stay", f"{both[True]:,.0f} tokens/s, others {both[False]:,.0f} (medians of three)")
    FIGURES["addresses"] = {"stay": rates[True], "go": rates[False]}


def sleep_and_wake(setup: Setup) -> None:
    """Twice: as it is, and with a cache whose addresses do not stay (graphs are then captured again)."""
    work = setup.works["fixed"]
    for keeps in (True, False):
        engine = engine_of(setup, keeps)
        wanted, _ = roll(engine, work, most=40)
        roll(engine, work, HOWS["top_k 50, top_p 0.95"], most=3)
        if not setup.is_small:
            torch.accelerator.empty_cache()
        graphs = dict(engine.decoder.buckets) if engine.decoder is not None else {}
        cache, awake = engine.store.nbytes, setup.memory()
        started = setup.wait()
        engine.sleep()
        slept = setup.wait() - started
        direct = setup.memory()
        if not setup.is_small:
            torch.accelerator.empty_cache()
        asleep = setup.memory()
        started = setup.wait()
        engine.wake()
        woken = setup.wait() - started
        started = setup.wait()
        roll(engine, work, most=3)
        first = setup.wait() - started
        made, _ = roll(engine, work, most=40)
        same = np.mean([a.tokens == b.tokens for a, b in zip(made, wanted)])
        if engine.decoder is not None:
            before = setup.wait()
            with torch.inference_mode():
                engine.decoder.capture()  # what is still missing
            again = setup.wait() - before
            stayed = sum(engine.decoder.buckets.get(kind) is bucket for kind, bucket in graphs.items())
        else:
            again, stayed = 0.0, 0
        name = "addresses stay" if keeps else "addresses go"
        say(f"sleep, {name}", f"cache {cache / 2**30:.2f} GiB; {(direct - awake) / 2**30:.2f} GiB given back in "
            f"{slept:.3f} s ({(asleep - awake) / 2**30:.2f} with what torch kept); awake in {woken:.3f} s, three "
            f"tokens of {work.lengths.size} samples {first:.3f} s later; {stayed} of {len(graphs)} graphs stayed, "
            f"the rest captured again in {again:.2f} s; {same:.3f} of samples as before")  # fmt: skip
        FIGURES[f"sleep-{'kept' if keeps else 'dropped'}"] = {
            "cache_gib": cache / 2**30, "given_back_gib": (direct - awake) / 2**30, "sleep_s": slept, "wake_s": woken,
            "first_s": first, "recapture_s": again, "same": float(same),
        }  # fmt: skip
        engine.sleep()
        del engine
        gc.collect()


if __name__ == "__main__":
    run(
        __doc__,
        {"sleep": sleep_and_wake, "addresses": cost_of_addresses, "speeds": speeds},
        on_accelerator={"kernels": kernels, "equality": equality},
    )
