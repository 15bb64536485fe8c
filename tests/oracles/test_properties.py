"""What must hold for any step: how it is cut, how it is ordered, and what stands beside it change nothing."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from cases import batch_of, config_of, leaf, prepared, random_samples, tokens_of

from tidemill.algorithms.api import total
from tidemill.algorithms.shared.advantages import group_advantages
from tidemill.algorithms.shared.aggregate import whole
from tidemill.algorithms.shared.registry import every, get

SEEDS = st.integers(0, 10_000)
QUICK = settings(max_examples=15, deadline=None)
MORE = {"kl": {"coef": 0.1}, "entropy_coef": 0.01}
OF_DECODERS = [a for a in every() if "decoder" in a.policies]


CRITIC = "ppo critic"  # what holds for losses holds for the critic's too


def case(name: str, seed: int):
    """A random step, through the stage `advantage`."""
    name = name.removesuffix(" critic")
    algorithm = get(name)
    config = config_of(name, **({} if algorithm.input_kind != "prompts" else MORE))
    everything = random_samples(seed, pairs=algorithm.input_kind == "pairs")
    samples, batch = prepared(algorithm, everything, config)
    return algorithm, config, samples, batch


def outcome(algorithm, config, parts, is_critic=False):
    """Loss, gradients and metrics of a step that is cut into parts, each a list of samples and their batch."""
    loss_of, learned = (algorithm.value_loss, "new_values") if is_critic else (algorithm.loss, "new")
    divisor = sum(whole(batch, config) for _, batch in parts)
    losses, stats = [], []
    for samples, batch in parts:
        loss, found = loss_of(tokens_of(samples, batch, config, divisor), config)
        losses.append(loss)
        stats.append(found)
    loss = sum(losses)
    leaves = {(s["id"], t): v for samples, _ in parts for s in samples for t, v in enumerate(s[learned])}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradient = {key: 0.0 if g is None else float(g) for key, g in zip(leaves, found)}
    return loss.item(), gradient, total(stats)


@pytest.mark.parametrize("name", [*(a.name for a in OF_DECODERS), CRITIC])
@given(seed=SEEDS)
@QUICK
def test_cutting_and_reordering_a_step_change_nothing(name: str, seed: int) -> None:
    algorithm, config, samples, batch = case(name, seed)
    if not samples:
        return
    rng = random.Random(seed)
    together = algorithm.input_kind == "pairs" or config.algorithm.aggregation == "group_mean"
    units = sorted({s["group"] for s in samples}) if together else list(range(len(samples)))
    rng.shuffle(units)
    cuts = sorted(rng.sample(range(1, len(units)), min(len(units) - 1, 2))) if len(units) > 1 else []
    parts = []
    for chosen in (units[a:b] for a, b in zip([0, *cuts], [*cuts, len(units)])):
        rows = [i for u in chosen for i, s in enumerate(samples) if (s["group"] == u if together else i == u)]
        rng.shuffle(rows)
        parts.append(([samples[i] for i in rows], batch.gather(rows)))
    loss, gradient, metrics = outcome(algorithm, config, [(samples, batch)], name == CRITIC)
    cut_loss, cut_gradient, cut_metrics = outcome(algorithm, config, parts, name == CRITIC)
    assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert cut_gradient == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    assert cut_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [a.name for a in OF_DECODERS if a.input_kind == "prompts"])
@given(seed=SEEDS)
@QUICK
def test_advantages_do_not_depend_on_the_order_of_samples(name: str, seed: int) -> None:
    algorithm, config = get(name), config_of(name, covariance={"mode": "kl", "share": 0.05})
    batch = batch_of(random_samples(seed))
    order = np.random.default_rng(seed).permutation(batch.rows)
    straight, shuffled = algorithm.advantages(batch, config), algorithm.advantages(batch.gather(order), config)
    for column in straight:
        expected = straight[column].gather(order).values
        assert shuffled[column].values == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert algorithm.keep(batch.gather(order), config).tolist() == algorithm.keep(batch, config)[order].tolist()


@pytest.mark.parametrize("name", [a.name for a in OF_DECODERS if a.input_kind == "prompts"])
@given(seed=SEEDS)
@QUICK
def test_without_learning_every_ratio_is_one_and_nothing_is_clipped(name: str, seed: int) -> None:
    algorithm, config, samples, batch = case(name, seed)
    for s in samples:
        s["new"] = [leaf(v) for v in s["old"]]
    if not samples or name == "rejection":
        return
    metrics = outcome(algorithm, config, [(samples, batch)])[2]
    assert metrics["ratio_mean"] == metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert metrics["clip_share_low"] == metrics["clip_share_high"] == metrics["old_kl"] == 0.0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp_baseline"])
@given(seed=SEEDS, reward=st.floats(-10, 10, width=32), eps=st.sampled_from([0.0, 1e-6]))
@QUICK
def test_equal_rewards_give_no_advantage_and_no_nan(name: str, seed: int, reward: float, eps: float) -> None:
    samples = random_samples(seed)
    for s in samples:
        s["reward"] = reward
    config = config_of(name, std_eps=eps)
    assert not get(name).advantages(batch_of(samples), config).values("advantages").any()


@given(
    rewards=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    scale=st.sampled_from(["std", "batch_std", "none"]),
    baseline=st.sampled_from(["mean", "leave_one_out", "none"]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_advantages_are_finite_and_balanced(rewards, scale, baseline, data) -> None:
    group = [data.draw(st.integers(0, 3)) for _ in rewards]
    got = group_advantages(rewards, group, scale=scale, baseline=baseline, std_eps=1e-6)
    assert np.isfinite(got).all()
    if baseline != "none":
        for g in set(group):
            own = [float(a) for a, b in zip(got, group) if b == g]
            assert sum(own) == pytest.approx(0.0, abs=1e-3 * (1 + max(map(abs, own))))


@pytest.mark.parametrize("name", [*(a.name for a in OF_DECODERS if a.input_kind == "prompts"), CRITIC])
@given(seed=SEEDS)
@QUICK
def test_tokens_the_model_did_not_make_change_nothing(name: str, seed: int) -> None:
    algorithm = get(name.removesuffix(" critic"))
    config = config_of(algorithm.name, critic={"whiten": True}, **MORE)
    everything = random_samples(seed)
    rng = random.Random(seed)
    longer, moved = [], {}
    for s in everything:
        grown = dict(s)
        at = rng.randint(0, len(s["mask"]))  # a tool's answer between two turns, or behind the last
        moved |= {(s["id"], t): (s["id"], t + (t >= at)) for t in range(len(s["mask"]))}
        for key, value in (
            ("mask", 0),
            ("old", 0.0),
            ("ref", -90.0),
            ("teacher", -90.0),
            ("rollout", 0.0),
            ("values", 9.0),
        ):
            grown[key] = [*s[key][:at], value, *s[key][at:]]
        for key, value in (("new", -95.0), ("new_values", 3.0), ("entropy", 1.0)):
            grown[key] = [*s[key][:at], leaf(value), *s[key][at:]]
        longer.append(grown)
    results = []
    for given_samples in (everything, longer):
        samples, batch = prepared(algorithm, given_samples, config)
        if samples:
            results.append(outcome(algorithm, config, [(samples, batch)], name == CRITIC))
    if results:
        (loss, gradient, metrics), (longer_loss, longer_gradient, longer_metrics) = results
        assert longer_loss == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert {k: longer_gradient[moved[k]] for k in gradient} == pytest.approx(gradient, rel=1e-6, abs=1e-9)
        assert longer_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
