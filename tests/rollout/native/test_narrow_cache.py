"""A cache of one byte an element: how far it is from the whole one, the same by every path, and what it saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.errors import ConfigError
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import _plain
from tidemill.rollout.mismatch import measure
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.kernels import compiled as kernels
from tidemill.rollout.native.pages.cache import PageStore, narrow

compiled = pytest.mark.skipif(kernels.load() is None, reason="no C compiler here")


def make(model: Any, cache_dtype: str, **options: Any) -> NativeEngine:
    settings = {"max_seqs": 6, "max_len": 80, "page_size": 16, "step_tokens": 24, **options}
    return NativeEngine(model, eos_ids=[2], cache_dtype=cache_dtype, **settings)


def asked(**how: Any) -> list[Request]:
    rng = np.random.default_rng(3)
    sampling = Sampling(**{"max_tokens": 24, "seed": 5, **how})
    return [Request(i, rng.integers(3, VOCAB, 3 + 9 * i).tolist(), sampling, n=3) for i in range(5)]


@pytest.mark.parametrize("kind, step", [("int8", 0.5 / 127), ("fp8", 2.0**-4)])
def test_an_element_is_at_most_half_a_step_off(kind: str, step: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 32) * torch.logspace(-3, 3, 50)[:, None, None]
    byte, scale = narrow(x, kind)
    most = x.abs().amax(-1, keepdim=True) if kind == "int8" else x.abs().clamp_min(x.abs().amax() * 1e-9)
    least = 1e-2 * x.abs().amax(-1, keepdim=True) if kind == "fp8" else 0.0  # below it steps stop shrinking
    assert ((byte.float() * scale.unsqueeze(-1) - x).abs() <= most * step * 1.001 + least * step).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_written_is_read_and_copied(kind: str) -> None:
    torch.manual_seed(0)
    store = PageStore(6, 4, torch.device("cpu"), kind)
    k, v = torch.randn(9, 2, 8), torch.randn(9, 2, 6)
    at = torch.arange(9)
    store.write(0, k, v, at // 4, at % 4)
    store.copy([0, 1], [4, 5])
    for pages in (3, torch.tensor([4, 5])):
        keys, values = store.read_keys(0, pages, torch.float32), store.read_values(0, pages, torch.float32)
        assert (keys.permute(0, 3, 1, 2).flatten(0, 1)[:8] - k[:8]).abs().max() < 0.15
        assert (values.permute(0, 2, 1, 3).flatten(0, 1)[:8] - v[:8]).abs().max() < 0.15
    store.scrub([4])
    assert not store.read_keys(0, torch.tensor([4]), torch.float32).any()


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "deepseek-v3"])
@pytest.mark.parametrize("kind, mean", [("int8", 0.02), ("fp8", 0.1)])
def test_log_probabilities_stay_near_the_models(name: str, kind: str, mean: float) -> None:
    model = tiny_model(name)
    done = roll(make(model, kind), asked())
    ours, theirs = [], []
    for completion in done.values():
        start = len(completion.request.prompt)
        ids = torch.tensor([[*completion.request.prompt, *completion.tokens]])
        with torch.no_grad(), _plain(model):
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        theirs.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].numpy())
        ours.append(np.array(completion.logprobs, np.float32))
    gap = measure(np.concatenate(ours), np.concatenate(theirs))
    assert 1e-6 < gap.mean < mean and abs(gap.ratio_mean - 1) < mean


@compiled
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}])
def test_compiled_and_torch_paths_keep_the_same_bytes(how: dict[str, Any]) -> None:
    model = tiny_model("qwen3")
    first, second = make(model, "int8"), make(model, "int8", kernels=False)
    a, b = roll(first, asked(**how)), roll(second, asked(**how))
    assert np.mean([a[key].tokens == b[key].tokens for key in a]) > 0.8  # a byte may round the other way
    alike = [key for key in a if a[key].tokens == b[key].tokens]
    gap = np.concatenate([np.array(a[key].logprobs) - np.array(b[key].logprobs) for key in alike])
    assert np.abs(gap).mean() < 2e-3


@compiled
def test_it_takes_a_third_of_the_memory() -> None:
    model = tiny_model("qwen3")
    sizes = {}
    for kind in ("auto", "int8"):
        engine = make(model, kind)
        roll(engine, asked())
        assert engine.pool.used == 0
        sizes[kind] = engine.store.nbytes
    dim = model.config.head_dim
    assert sizes["int8"] == sizes["auto"] * (1 + 4 / dim) / 4


def test_samples_that_leave_and_come_back_stay_near() -> None:
    model = tiny_model("qwen3")
    engine = make(model, "int8", cache_tokens=160, speculate="off" if kernels.load() is None else "on")
    done = roll(engine, asked())
    assert engine.scheduler.preemptions > 0
    assert all(c.finish in ("stop", "length") for c in done.values()) and engine.pool.used == 0


def test_the_batch_invariant_mode_refuses_it() -> None:
    with pytest.raises(ConfigError, match="rounds"):
        make(tiny_model("qwen3"), "int8", batch_invariant=True)
