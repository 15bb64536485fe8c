"""Masks select: whatever stands at a token that the model did not make changes no loss, gradient or statistic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.algorithms.api import TokenBatch, total
from tidemill.algorithms.shared.losses import ratio_stats
from tidemill.algorithms.shared.registry import get
from tidemill.recipe.config import Config

NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "ppo", "reinforce_pp", "rejection", "sft", "dpo", "kto")
BAD = (float("nan"), float("inf"), float("-inf"))


def tokens_of(seed: int) -> TokenBatch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 7, 4)
    row = torch.from_numpy(np.repeat(np.arange(4), lengths))
    mask = torch.from_numpy((rng.random(len(row)) < 0.7).astype(np.float32))
    mask[torch.searchsorted(row, torch.arange(4))] = 1.0  # every sample has a token

    def drawn() -> Tensor:
        return torch.from_numpy(rng.normal(-2, 0.5, len(row)).astype(np.float32))

    side = torch.tensor([1.0, 0.0, 1.0, 0.0])[row]
    return TokenBatch(
        logprobs=drawn().requires_grad_(),
        entropy=drawn().requires_grad_(),
        old_logprobs=drawn(),
        rollout_logprobs=drawn(),
        ref_logprobs=drawn(),
        advantages=drawn(),
        weights=mask.clone(),
        mask=mask,
        row=row,
        rows=4,
        values=drawn().requires_grad_(),
        group=torch.tensor([0, 0, 1, 1]),
        columns={"values": drawn(), "returns": drawn(), "chosen": side},
    )


def spoiled(tokens: TokenBatch, value: float) -> TokenBatch:
    """The same with `value` at every token that the model did not make."""

    def spoil(x: Tensor) -> Tensor:
        return torch.where(tokens.mask > 0, x.detach(), torch.full_like(x, value)).requires_grad_(x.requires_grad)

    names = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values")
    columns = {**tokens.columns, **{n: spoil(tokens.columns[n]) for n in ("values", "returns")}}
    return replace(tokens, **{n: spoil(getattr(tokens, n)) for n in names}, columns=columns)


def outcome(name: str, tokens: TokenBatch, config: Config, which: str = "loss") -> tuple[float, dict[str, float], Any]:
    loss, stats = getattr(get(name), which)(tokens, config)
    loss.backward()
    grads = [x.grad for x in (tokens.logprobs, tokens.entropy, tokens.values) if x is not None and x.grad is not None]
    return loss.item(), total([stats]), grads


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", NAMES)
def test_what_stands_at_a_masked_token_changes_nothing(name: str, value: float) -> None:
    settings = {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "old_logprobs": "recompute", "rollout_correction": "token"}
    config = Config.model_validate({"algorithm": {"name": name, **settings}})
    for seed in range(5):
        plain = outcome(name, tokens_of(seed), config)
        other = outcome(name, spoiled(tokens_of(seed), value), config)
        assert math.isfinite(plain[0]) and other[0] == plain[0], seed
        assert other[1] == plain[1], seed
        assert all(torch.equal(a, b) for a, b in zip(plain[2], other[2], strict=True)), seed


@pytest.mark.parametrize("value", BAD)
def test_what_stands_at_a_masked_token_changes_no_value_loss(value: float) -> None:
    config = Config.model_validate({"algorithm": {"name": "ppo", "critic": {"value_clip": 0.2}}})
    plain = outcome("ppo", tokens_of(3), config, "value_loss")
    other = outcome("ppo", spoiled(tokens_of(3), value), config, "value_loss")
    assert math.isfinite(plain[0]) and other[:2] == plain[:2]
    assert all(torch.equal(a, b) for a, b in zip(plain[2], other[2], strict=True))


def test_extremes_of_the_ratio_are_of_tokens_that_the_model_made() -> None:
    config = Config()
    tokens = tokens_of(0)
    mask = torch.ones_like(tokens.mask)
    mask[0] = 0.0
    ratios = total([ratio_stats(torch.full_like(mask, 0.5).log(), replace(tokens, mask=mask), config.algorithm)])
    assert ratios["ratio_min"] == ratios["ratio_max"] == pytest.approx(0.5)
    none = total([ratio_stats(torch.zeros_like(mask), replace(tokens, mask=0 * mask), config.algorithm)])
    assert "ratio_min" not in none and "ratio_max" not in none
