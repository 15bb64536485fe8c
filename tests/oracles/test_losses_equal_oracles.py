"""Every advantage, loss and gradient against the float64 loops of arithmetic.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import arithmetic as oracle
from cases import LONGEST, batch_of, config_of, prepared, random_samples, tokens_of

from tidemill.algorithms.shared.registry import every, get

SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "kl k3 in loss": {"kl": {"coef": 0.1}, "entropy_coef": 0.02},
    "kl k1 in reward": {"kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}, "std_bias": "population"},
    "kl k2 in loss, dual clip": {"kl": {"coef": 0.1, "estimator": "k2"}, "dual_clip": 1.2, "clip_low": 0.1},
    "kl abs in reward, ratio cap": {"kl": {"coef": 0.1, "estimator": "abs", "place": "reward"}, "ratio_cap": 1.3},
    "group mean, overlong": {"aggregation": "group_mean", "overlong": {"buffer": 6}, "group_of_one": "reward"},
    "constant, leave one out": {"aggregation": "constant", "constant_length": 9, "baseline": "leave_one_out"},
    "no baseline, batch std": {"baseline": "none", "advantage_scale": "batch_std", "std_eps": 0.0},
    "token correction": {"rollout_correction": "token", "rollout_correction_cap": 1.1},
    "sequence correction": {"rollout_correction": "sequence", "aggregation": "sample_mean"},
    "token mask": {
        "rollout_correction": "token",
        "rollout_correction_outside": "mask",
        "rollout_correction_floor": 0.9,
        "rollout_correction_cap": 1.15,
    },
    "sequence mask": {
        "rollout_correction": "sequence",
        "rollout_correction_outside": "mask",
        "rollout_correction_floor": 0.6,
        "rollout_correction_cap": 1.6,
    },
    "keep all": {"dynamic_sampling": False},
    "clamped k3 in loss": {"kl": {"coef": 0.1, "clamp_log_ratio": 0.3, "clamp": 0.04}},
    "clamped k1 in reward": {"kl": {"coef": 0.1, "estimator": "k1", "place": "reward", "clamp": 0.2}},
    "length-adaptive": {"critic": {"length_alpha": 0.3, "gamma": 0.98, "whiten": False}},
}


def gradients(
    loss: torch.Tensor, samples: list, names: tuple[str, ...] = ("new", "entropy", "new_values")
) -> list[float]:
    leaves = [v for s in samples for n in names for v in s[n]]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [0.0 if g is None else float(g) for g in found]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.replace(" ", "-"))
@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies and a.input_kind == "prompts"])
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_loss_and_gradient_of_online_algorithms(name: str, settings: str, seed: int) -> None:
    algorithm, config = get(name), config_of(name, old_logprobs="recompute", **SETTINGS[settings])
    everything = random_samples(seed)
    expected = oracle.advantages(name, everything, config.algorithm, LONGEST)
    given = algorithm.advantages(batch_of(everything), config)["advantages"]
    for i, s in enumerate(everything):
        got = np.broadcast_to(given[i], len(s["mask"])) * np.array(s["mask"])
        assert got == pytest.approx(np.array(expected[i]) * s["mask"], rel=1e-6, abs=1e-6)

    samples, batch = prepared(algorithm, everything, config)
    spread = [np.broadcast_to(batch["advantages"][i], len(s["mask"])).tolist() for i, s in enumerate(samples)]
    loss, _ = algorithm.loss(tokens_of(samples, batch, config), config)
    reference = oracle.policy_loss(name, samples, spread, config.algorithm, LONGEST)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-9, abs=1e-12)
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", ["clip", "kl"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "reinforce_pp", "ppo", "distill"])
def test_tokens_held_back_for_their_covariance(name: str, mode: str) -> None:
    covariance = {"mode": mode, "share": 0.1, "low": 0.05, "high": 0.6, "kl_coef": 0.7}
    algorithm, config = get(name), config_of(name, old_logprobs="recompute", covariance=covariance)
    samples = random_samples(8)
    batch = batch_of(samples)
    batch = batch.merge(algorithm.advantages(batch, config))
    spread = [np.broadcast_to(batch["advantages"][i], len(s["mask"])).tolist() for i, s in enumerate(samples)]
    of = oracle.covariances(samples, spread)
    cov = {(s["id"], t): of[i][t] for i, s in enumerate(samples) for t in range(len(s["mask"])) if s["mask"][t]}
    held = [batch["held_back"][i] for i in range(len(samples))]
    marked = frozenset((s["id"], t) for i, s in enumerate(samples) for t in np.flatnonzero(held[i]).tolist())
    count = max(1, int(0.1 * len(cov)))
    if mode == "kl":  # the largest
        assert marked == frozenset(sorted(cov, key=lambda token: -cov[token])[:count])
    else:  # some of those between the bounds
        eligible = {token for token in cov if 0.05 < cov[token] < 0.6}
        assert marked <= eligible and len(marked) == min(count, len(eligible)) > 0
    loss, _ = algorithm.loss(tokens_of(samples, batch, config), config)
    reference = oracle.policy_loss(name, samples, spread, config.algorithm, LONGEST, marked)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-9, abs=1e-12)
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples), rel=1e-9, abs=1e-12)


def test_decoupled_ppo_is_plain_importance_sampling_where_nothing_is_clipped() -> None:
    """w · ρ = (π_proximal / π_behaviour) · (π / π_proximal): the proximal policy cancels, and only bounds the step."""
    wide = {"clip_low": 1.0, "clip_high": 1e9, "rollout_correction_cap": 1e9}
    config = config_of("grpo", old_logprobs="recompute", rollout_correction="token", **wide)
    samples, batch = prepared(get("grpo"), random_samples(3), config)
    loss, _ = get("grpo").loss(tokens_of(samples, batch, config), config)

    def value(s: dict[str, Any], t: int) -> torch.Tensor:
        advantage = float(batch.values("advantages")[samples.index(s)])
        return -torch.exp(s["new"][t] - s["rollout"][t]) * advantage

    reference = oracle.aggregate(samples, config.algorithm, LONGEST, value)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-9)
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples), rel=1e-9, abs=1e-12)


def test_a_mask_reports_the_share_it_held_back() -> None:
    settings = {"rollout_correction": "token", "rollout_correction_outside": "mask", "rollout_correction_cap": 1.0}
    config = config_of("grpo", old_logprobs="recompute", **settings)
    samples, batch = prepared(get("grpo"), random_samples(4), config)
    _, stats = get("grpo").loss(tokens_of(samples, batch, config), config)
    made = [(s, t) for s in samples for t in range(len(s["mask"])) if s["mask"][t]]
    above = sum(s["old"][t] > s["rollout"][t] for s, t in made)
    share = stats["rollout_masked_share"]
    assert 0 < above < len(made) and float(share.value / share.count) == pytest.approx(above / len(made))


@pytest.mark.parametrize(
    "critic", [{}, {"value_clip": None}, {"lam": 0.9, "value_lam": 1.0}, {"length_alpha": 0.3, "gamma": 0.98}]
)
def test_critic_targets_loss_and_gradient(critic: dict[str, Any]) -> None:
    algorithm, config = get("ppo"), config_of("ppo", critic={**critic, "whiten": False})
    everything = random_samples(5)
    samples, batch = prepared(algorithm, everything, config)
    c = config.algorithm.critic
    returns = []
    for s in samples:
        lam = c.lam if c.value_lam is None else c.value_lam
        rewards = oracle.token_rewards(s, config.algorithm, LONGEST)
        returns.append(oracle.gae(s, rewards, c.gamma, lam)[1])
    for i in range(len(samples)):
        assert batch["returns"][i] == pytest.approx(returns[i], rel=1e-5, abs=1e-6)
    loss, _ = algorithm.value_loss(tokens_of(samples, batch, config), config)
    given = [batch["returns"][i].astype(float).tolist() for i in range(len(samples))]
    reference = oracle.value_loss(samples, given, config.algorithm, LONGEST)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-9)
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples), rel=1e-9, abs=1e-12)


PAIR_SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "margin": 0.3, "sft_coef": 0.2, "centre_coef": 0.01},
    {"beta": 0.7},
]


@pytest.mark.parametrize("preference", PAIR_SETTINGS)
@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies and a.input_kind == "pairs"])
def test_loss_and_gradient_of_pairs(name: str, preference: dict[str, Any]) -> None:
    algorithm, config = get(name), config_of(name, preference=preference)
    samples = random_samples(3, pairs=True)
    np.random.default_rng(0).shuffle(samples)
    loss, _ = algorithm.loss(tokens_of(samples, batch_of(samples), config), config)
    reference = oracle.pair_loss(name, samples, config.algorithm)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-9)
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("preference", [{}, {"good_weight": 1.3, "bad_weight": 0.7, "beta": 0.5}])
def test_loss_and_gradient_of_kto(preference: dict[str, Any]) -> None:
    algorithm, config = get("kto"), config_of("kto", preference=preference)
    everything = random_samples(14)
    for s in everything:
        s["ref"] = [v - 0.25 for v in s["ref"]] if s["mismatched"] else s["ref"]  # a divergence above 0
    samples, batch = prepared(algorithm, everything, config)
    assert 0 < len(samples) < len(everything)
    assert batch.values("advantages")[0] > 0
    loss, _ = algorithm.loss(tokens_of(samples, batch, config), config)
    reference = oracle.kto_loss(everything, config.algorithm)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples), rel=1e-6, abs=1e-9)


def test_sft_is_the_mean_negative_log_probability() -> None:
    config = config_of("sft")
    samples = random_samples(6)
    loss, stats = get("sft").loss(tokens_of(samples, batch_of(samples), config), config)
    reference = oracle.aggregate(samples, config.algorithm, LONGEST, lambda s, t: -s["new"][t])
    assert (
        loss.item() == pytest.approx(reference.item()) == pytest.approx(float(stats["nll"].value / stats["nll"].count))
    )
    assert gradients(loss, samples) == pytest.approx(gradients(reference, samples))
