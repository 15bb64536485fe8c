"""What the native engine says of its tokens is what the packed learner says of them, so rollout's log-probabilities can
serve as the old policy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, as_batch, roll, tiny_model

from tidemill.learn.engine import score
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.hf import _plain
from tidemill.rollout.mismatch import measure
from tidemill.rollout.native.engine import NativeEngine

CLOSE = 1e-4  # nats, in float32


def completions(model: Any, how: Sampling) -> list[Completion]:
    rng = np.random.default_rng(3)
    asked = [Request(i, rng.integers(3, VOCAB, 2 + 7 * i).tolist(), how, n=3) for i in range(5)]
    # Few slots, small pages and a small cache: samples wait, share pages and are read again.
    engine = NativeEngine(
        model, eos_ids=[2], max_seqs=6, max_len=64, page_size=4, cache_tokens=160, step_tokens=24, kernels=False
    )
    done = roll(engine, asked)
    assert all(completion.finish in ("stop", "length") for completion in done.values())
    return [done[key] for key in sorted(done)]


def learner_logprobs(model: Any, done: list[Completion], temperature: float, share: bool) -> np.ndarray:
    settings = {
        "algorithm": "grpo",
        "rollout": {"temperature": temperature},
        "learn": {"share_prompts": share},
        "train": {"tokens_per_microbatch": 90},
    }
    return score(model, as_batch(done), Config.model_validate(settings)).values


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.7}])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_rollout_and_learner_give_the_same_logprobs(name: str, how: dict[str, float], share: bool) -> None:
    model = tiny_model(name)
    done = completions(model, Sampling(max_tokens=20, seed=11, **how))
    ours = np.concatenate([completion.logprobs for completion in done])
    gap = measure(ours, learner_logprobs(model, done, how["temperature"], share))
    assert gap.tokens > 200
    assert gap.max < CLOSE
    assert abs(gap.ratio_mean - 1) < CLOSE


def test_a_learner_at_another_temperature_does_not_agree() -> None:
    """The comparison above can fail."""
    model = tiny_model("qwen3")
    done = completions(model, Sampling(max_tokens=20, seed=11, temperature=0.6))
    ours = np.concatenate([completion.logprobs for completion in done])
    assert measure(ours, learner_logprobs(model, done, 1.0, False)).mean > 0.05


def nucleus_mass(logits: torch.Tensor, top_p: float) -> tuple[set[int], float]:
    """The fewest most likely tokens that reach `top_p` together, and their probability: written the long way."""
    probability = logits.double().softmax(-1)
    inside: set[int] = set()
    mass = 0.0
    for token in probability.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        inside.add(token)
        mass += float(probability[token])
    return inside, mass


def test_the_kept_mass_is_that_of_the_nucleus_each_token_was_drawn_from() -> None:
    model, temperature, top_p = tiny_model("qwen3"), 0.8, 0.6
    done = completions(model, Sampling(max_tokens=20, seed=11, temperature=temperature, top_p=top_p))
    narrow = 0
    for completion in done:
        start = len(completion.request.prompt)
        tokens = torch.tensor([[*completion.request.prompt, *completion.tokens]])
        with torch.no_grad(), _plain(model):
            logits = model(tokens, use_cache=False).logits[0, start - 1 : -1] / temperature
        assert completion.kept is not None and len(completion.kept) == len(completion.tokens)
        for token, kept, row in zip(completion.tokens, completion.kept, logits):
            inside, mass = nucleus_mass(row, top_p)
            assert token in inside
            assert abs(kept - np.log(mass)) < CLOSE
            narrow += mass < 0.95
    assert narrow > 100
