"""The native engine on an NPU makes the CPU's tokens, in captured graphs, and waits once for each step."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.tiny import VOCAB, as_batch, roll, tiny_model
from tidemill.learn.engine import score
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward.graphs import GraphDecoder

OPTIONS: dict[str, Any] = {"eos_ids": [2], "max_seqs": 6, "max_len": 64, "cache_tokens": 256, "step_tokens": 24}
HOW = {
    "plain": {},
    "truncated": {"top_k": 9, "top_p": 0.9},
    "steered": {"repetition_penalty": 1.3, "min_p": 0.02},
}


def asked(**how: Any) -> list[Request]:
    rng = np.random.default_rng(2)
    sampling = Sampling(max_tokens=20, seed=1, **how)
    return [Request(i, rng.integers(3, VOCAB, 2 + 8 * i).tolist(), sampling, n=3) for i in range(4)]


def same(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert {key: c.tokens for key, c in found.items()} == {key: c.tokens for key, c in wanted.items()}
    for key, completion in wanted.items():
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "mistral", "deepseek-v3", "gemma2"])
def test_tokens_are_those_of_the_cpu(name: str, how: str, npu: torch.device, counts: Any) -> None:
    if how != "plain" and name != "qwen3":
        pytest.skip("one model is enough for each way to draw")
    model = tiny_model(name)
    wanted = roll(NativeEngine(model, **OPTIONS), asked(**HOW[how]))
    engine = NativeEngine(copy.deepcopy(model).to(npu), **OPTIONS)
    assert (engine.decoder is not None) == (name != "gemma2")  # which has a norm of its own, and is decoded in step
    same(roll(engine, asked(**HOW[how])), wanted)
    if not counts.is_real:
        assert counts.refusals == []


def test_the_host_waits_once_a_step_and_never_inside_a_graph(
    npu: torch.device, counts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(tiny_model("qwen3").to(npu), **{**OPTIONS, "eos_ids": []})
    assert engine.decoder is not None
    engine.decoder.capture()
    for request in asked():
        engine.submit(request)
    while any(sequence is None for sequence in engine.scheduler.sequence):  # until all slots decode
        engine.step()
    passes = []
    for name in ("decode", "begin"):  # a step that ends a prompt draws its first tokens in a pass of their own
        whole = getattr(GraphDecoder, name)
        monkeypatch.setattr(GraphDecoder, name, lambda *given, whole=whole: passes.append(1) or whole(*given))
    counts.reset()
    while engine.has_work:
        engine.step()
    assert len(passes) > 50 and counts.syncs <= len(passes) + 1 and counts.refusals == []
    assert set(counts.waits) == {"event.synchronize"}


def test_sixteen_bits_are_decoded_by_the_vendors_attention_which_is_told_every_length(
    npu: torch.device, counts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    options = {**OPTIONS, "eos_ids": []}

    def gap() -> float:
        engine = NativeEngine(copy.deepcopy(model).to(npu), **options)
        assert engine.library is not None and engine.library.host_argument and engine.decoder is not None
        done = list(roll(engine, asked()).values())
        found = score(model, as_batch(done), Config())
        return float(np.abs(found.values - np.concatenate([c.logprobs for c in done])).max())

    assert gap() < 0.15
    if not counts.is_real:  # untold, every sequence would see one token
        monkeypatch.setattr(GraphDecoder, "_tell", lambda *_: None)
        assert gap() > 0.5


def test_a_cache_that_slept_serves_again(npu: torch.device) -> None:
    model = tiny_model("qwen2")
    wanted = roll(NativeEngine(model, **OPTIONS), asked())
    engine = NativeEngine(copy.deepcopy(model).to(npu), **OPTIONS)
    same(roll(engine, asked()), wanted)
    engine.sleep()
    engine.wake()
    same(roll(engine, asked()), wanted)
