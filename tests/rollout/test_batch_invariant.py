"""In the batch-invariant mode rollout and learner agree bit for bit, and a sample's numbers do not depend on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.learn.test_meter import run
from tests.rollout.tiny import VOCAB, as_batch, roll, tiny_model

from tidemill.device import compiled
from tidemill.learn.engine import score
from tidemill.models.layers import rowwise
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.engine import NativeEngine

pytestmark = pytest.mark.skipif(compiled.library(rowwise.SOURCE) is None, reason="no C compiler here")


def completions(model: Any, how: Sampling, **engine: Any) -> list[Completion]:
    rng = np.random.default_rng(3)
    asked = [Request(i, rng.integers(3, VOCAB, 2 + 7 * i).tolist(), how, n=3) for i in range(5)]
    options = {"max_seqs": 6, "max_len": 64, "page_size": 4, "cache_tokens": 160, "step_tokens": 24, **engine}
    done = roll(NativeEngine(model, eos_ids=[2], batch_invariant=True, **options), asked)
    return [done[key] for key in sorted(done)]


def learner_logprobs(model: Any, done: list[Completion], temperature: float, share: bool, budget: int) -> np.ndarray:
    settings = {
        "algorithm": "grpo",
        "rollout": {"temperature": temperature, "batch_invariant": True},
        "learn": {"share_prompts": share},
        "train": {"tokens_per_microbatch": budget},
    }
    return score(model, as_batch(done), Config.model_validate(settings)).values


@pytest.mark.parametrize("share, budget", [(False, 90), (True, 90), (True, 10_000)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2"])
def test_rollout_and_learner_differ_in_no_bit(name: str, temperature: float, share: bool, budget: int) -> None:
    model = tiny_model(name)
    done = completions(model, Sampling(max_tokens=20, seed=11, temperature=temperature))
    ours = np.concatenate([completion.logprobs for completion in done]).astype(np.float32)
    assert ours.size > 150
    np.testing.assert_array_equal(ours, learner_logprobs(model, done, temperature, share, budget))


def test_the_ordinary_mode_is_near_but_not_equal() -> None:
    """The comparison above can fail."""
    model = tiny_model("qwen3")
    done = completions(model, Sampling(max_tokens=20, seed=11))
    ours = np.concatenate([completion.logprobs for completion in done]).astype(np.float32)
    plain = NativeEngine(model, eos_ids=[2], max_seqs=6, max_len=64)
    again = roll(plain, [Request(c.request.id, c.request.prompt, c.request.sampling, n=3) for c in done[::3]])
    theirs = np.concatenate([again[c.request.id, c.index].logprobs for c in done]).astype(np.float32)
    assert (ours != theirs).any() and np.abs(ours - theirs).max() < 1e-4


def test_a_sample_is_the_same_in_any_batch() -> None:
    model = tiny_model("qwen3")
    how = Sampling(max_tokens=20, seed=11)
    few = completions(model, how, max_seqs=1, cache_tokens=None, step_tokens=8)
    many = completions(model, how, max_seqs=15, page_size=16, cache_tokens=None, step_tokens=512)
    assert [(c.tokens, c.logprobs) for c in few] == [(c.tokens, c.logprobs) for c in many]


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 33])
@pytest.mark.parametrize("k, n", [(5, 3), (16, 8), (40, 97), (128, 33)])
def test_the_product_is_the_plain_one_and_each_row_its_own(rows: int, k: int, n: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    whole = rowwise.linear(x, weight, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(whole[i : i + 1], rowwise.linear(x[i : i + 1], weight, bias)) for i in range(rows))


def test_gradients_are_those_of_the_ordinary_mode() -> None:
    from tidemill.learn.forward import forward
    from tidemill.learn.model import attention_of
    from tidemill.learn.rows.packing import pack
    from tidemill.models.attention.contexts import choose

    model = tiny_model("qwen3")
    done = completions(model, Sampling(max_tokens=6, seed=1))
    found = []
    for is_invariant in (False, True):
        config = Config.model_validate({"algorithm": "grpo", "rollout": {"batch_invariant": is_invariant}})
        packed = pack(as_batch(done), torch.device("cpu"), True, choose(model, attention_of(config)))
        model.zero_grad()
        forward(model, packed, config)[0].sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    for plain, invariant in zip(*found):
        torch.testing.assert_close(invariant, plain, atol=1e-3, rtol=1e-3)


def test_a_run_logs_a_gap_of_zero_until_the_end(tmp_path: Path) -> None:
    for metrics in run(tmp_path, 4, batch_invariant=True, top_p=0.9):
        assert metrics["mismatch/native/max"] == 0.0 and metrics["mismatch/native/ratio_mean"] == 1.0
