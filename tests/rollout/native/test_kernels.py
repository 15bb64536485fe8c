"""The compiled kernels compute what the torch operations compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.device import compiled as compiled_sources
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.draw.sampling import Draw, draw, stream_key, uniform, uniform_array
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward import lean
from tidemill.rollout.native.kernels import compiled as kernels

compiled = pytest.mark.skipif(kernels.load() is None, reason="no C compiler here")


def loaded() -> kernels.Kernels:
    found = kernels.load()
    assert found is not None
    return found


@compiled
@pytest.mark.parametrize("dim", [5, 16, 40, 128])
def test_norm_rotation_and_gate(dim: int) -> None:
    k = loaded()
    torch.manual_seed(dim)
    x, w = torch.randn(7, dim), torch.randn(dim)
    torch.testing.assert_close(k.rms(x, w, 1e-6), F.rms_norm(x, (dim,), w, 1e-6))
    gate, up = torch.randn(7, dim) * 30, torch.randn(7, dim)
    torch.testing.assert_close(k.gate(gate.clone(), up), F.silu(gate) * up)
    if dim % 2:
        return
    q, cos, sin, at = torch.randn(7, 3, dim), torch.randn(20, dim), torch.randn(20, dim), torch.randint(0, 20, (7,))
    normed = F.rms_norm(q, (dim,), w, 1e-6)
    wanted = normed * cos[at].unsqueeze(1) + normed.roll(dim // 2, -1) * sin[at].unsqueeze(1)
    k.rotate(q, w, cos, sin, at, 1e-6)
    torch.testing.assert_close(q, wanted)


@compiled
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3", "mistral", "gemma2", "deepseek-v3", "phi3"])
def test_kernels_and_torch_operations_give_the_same_samples(name: str) -> None:
    model = tiny_model(name)
    rng = np.random.default_rng(3)
    asked = [
        Request(i, rng.integers(3, VOCAB, length).tolist(), Sampling(max_tokens=40, temperature=0.7 * (i % 3)), n=2)
        for i, length in enumerate([1, 16, 30, 33, 5])
    ]
    with_kernels = NativeEngine(model, eos_ids=[2], max_seqs=7, max_len=96)
    assert with_kernels.kernels is not None
    wanted = roll(NativeEngine(model, eos_ids=[2], max_seqs=7, max_len=96, kernels=False), asked)
    for key, completion in roll(with_kernels, asked).items():
        assert completion.tokens == wanted[key].tokens
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=2e-5)


@compiled
@pytest.mark.parametrize("vocab", [3, 16, 1000])
def test_drawing_equals_the_torch_draw(vocab: int) -> None:
    rows = 300
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab) * 3
    key = np.array([stream_key(1, 2, i) for i in range(rows)], np.int64)
    position = np.arange(rows)
    temperature = np.where(np.arange(rows) % 2, 1.0, 0.5).astype(np.float32)
    greedy = np.arange(rows) % 5 == 0
    wanted = draw(
        logits, Draw(*map(torch.from_numpy, (key, position)), torch.from_numpy(temperature), torch.from_numpy(greedy))
    )
    tokens, logprobs = loaded().draw(logits, temperature, uniform_array(key, position), greedy)
    assert (tokens == wanted.tokens.numpy()).mean() > 0.99  # a cumulative sum may round to the other side
    same = tokens == wanted.tokens.numpy()
    np.testing.assert_allclose(logprobs[same], wanted.logprobs.numpy()[same], atol=1e-5)


def test_numpy_and_torch_make_the_same_uniform_numbers() -> None:
    key = np.array([stream_key(seed, 3, 4) for seed in range(100)], np.int64)
    position = np.arange(100)
    u = uniform_array(key, position)
    assert (u == uniform(torch.from_numpy(key), torch.from_numpy(position)).numpy()).all()
    assert u.min() >= 0 and u.max() < 1 and 0.4 < u.mean() < 0.6


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_sources, "_compiler", lambda: None)
    assert kernels.load.__wrapped__() is None


@compiled
def test_few_rows_of_a_large_weight_give_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")  # has biases
    asked = [Request(i, [5 + i, 6, 7], Sampling(max_tokens=12, seed=3), n=2) for i in range(2)]
    wanted = roll(NativeEngine(model, eos_ids=[2], max_seqs=4, max_len=64), asked)
    monkeypatch.setattr(lean, "LARGE_WEIGHT", 1)
    found = roll(NativeEngine(model, eos_ids=[2], max_seqs=4, max_len=64), asked)
    assert {key: c.tokens for key, c in found.items()} == {key: c.tokens for key, c in wanted.items()}
    for key, completion in wanted.items():
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)
