"""Checks the vLLM engine against vLLM itself, on an accelerator: tokens, loads in place, pause, sleep. Two minutes.

    PYTHONPATH=src python benchmarks/gpu_vllm.py

A small Qwen2 with a tied output layer and random weights in bfloat16. Ends with exit status 1 if something failed.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import torch

ABOUT = "the vLLM engine checked against vLLM itself: log-probabilities, loads in place, pause, sleep"
FAILED: list[str] = []
STARTED = time.perf_counter()


def check(name: str, is_good: bool, figure: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}s] {'ok' if is_good else 'FAILED':7} {name}: {figure}", flush=True)
    if not is_good:
        FAILED.append(name)


def small_model(device: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    import tidemill.models.attention  # noqa: F401  registers the attention

    config = Qwen2Config(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill", dtype=torch.bfloat16).eval()
    with torch.no_grad():  # else the distribution is flat and any weights agree
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def roll(engine: Any, requests: list[Any]) -> list[Any]:
    for request in requests:
        engine.submit(request)
    done = []
    while engine.has_work:
        done += engine.step()
    return sorted(done, key=lambda completion: (completion.request.id, completion.index))


def gap(model: Any, done: list[Any], temperature: float) -> Any:
    """vLLM's log-probabilities of its own samples against a plain forward pass."""
    from tidemill.rollout.hf import _plain
    from tidemill.rollout.mismatch import measure

    ours, theirs = [], []
    for completion in done:
        start = len(completion.request.prompt)
        ids = torch.tensor([[*completion.request.prompt, *completion.tokens]], device=model.device)
        with torch.no_grad(), _plain(model):
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float() / temperature
        theirs.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].cpu().numpy())
        ours.append(np.array(completion.logprobs, np.float32))
    return measure(np.concatenate(ours), np.concatenate(theirs))


def change(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter[torch.randperm(parameter.shape[0], device=parameter.device)])


def main() -> None:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.vllm import start

    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "no accelerator here"
    model = small_model(accelerator.type)
    before = time.perf_counter()
    engine = start(model, eos_ids=[2], max_len=512, max_seqs=64, memory_share=0.3, enforce_eager=True)
    check("start and first load", True, f"{time.perf_counter() - before:.0f} s, parity {engine.parity}")
    rng = np.random.default_rng(0)

    def asked(temperature: float, length: int = 64) -> list[Request]:
        how = Sampling(temperature=temperature, max_tokens=length)
        return [Request(i, rng.integers(3, 2000, 20 + 9 * i).tolist(), how, n=4) for i in range(8)]

    for temperature in (1.0, 0.7, 0.0):
        done = roll(engine, asked(temperature))
        met = gap(model, done, temperature or 1.0)
        check(f"log-probabilities at temperature {temperature}", met.mean < 0.1 and len(done) == 32, str(met))
    for version in (1, 2):
        change(model, version)
        stale = gap(model, roll(engine, asked(1.0)), 1.0)
        before = time.perf_counter()
        engine.load(None, version)
        took = time.perf_counter() - before
        fresh = gap(model, roll(engine, asked(1.0)), 1.0)
        figure = (
            f"gap before {stale.mean:.2f}, after {fresh.mean:.3f}, {took * 1e3:.0f} ms, probe {engine.parity.mean:.3f}"
        )
        check(f"load {version}", stale.mean > 0.3 and fresh.mean < 0.1, figure)
    for request in asked(1.0):
        engine.submit(request)
    for _ in range(10):
        engine.step()
    partials = engine.pause()
    tokens = sum(len(p.tokens) for p in partials)
    engine.load(None, 3)
    engine.resume(partials)
    done = roll(engine, [])
    mixed = sum(len(set(c.versions)) == 2 for c in done)
    check(
        "pause and resume", len(done) == 32 and mixed > 0 and tokens > 0, f"{tokens} tokens kept, {mixed} samples mixed"
    )
    for request in asked(1.0):
        engine.submit(request)
    engine.step()
    free = torch.accelerator.get_memory_info()[0]
    engine.sleep()
    given = torch.accelerator.get_memory_info()[0] - free
    engine.wake()
    done = roll(engine, [])
    check("sleep", given > 2**30 and gap(model, done, 1.0).mean < 0.1, f"{given / 2**30:.1f} GiB given back")
    bad = roll(engine, [Request(99, [5], Sampling(top_p=0.5))])
    check("refusal", bad[0].finish == "error", bad[0].error or "")
    print("failed: " + ", ".join(FAILED) if FAILED else "all good", flush=True)
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
