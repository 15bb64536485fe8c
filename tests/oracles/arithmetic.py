"""The same arithmetic once more, in the plainest form: float64, loops, no vectorisation, nothing shared with src/.

A sample is a dict: group, id, reward, correct, finish, mask, and lists per token (old, ref, values, …). `new` and
`new_values` are lists of 0-dim float64 tensors that carry gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Sample = dict[str, Any]
ZERO = torch.zeros((), dtype=torch.float64)


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def members(samples: list[Sample], group: int) -> list[Sample]:
    return [s for s in samples if s["group"] == group]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float], bias: str) -> float:
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - (1 if bias == "sample" else 0)))


def kl(k: Any, new: Any, ref: float) -> Any:
    d = bounded(new - ref, k.clamp_log_ratio)
    exp = torch.exp if isinstance(d, Tensor) else math.exp
    if k.estimator == "k1":
        return bounded(d, k.clamp)
    if k.estimator == "k2":
        return bounded(d * d / 2, k.clamp)
    if k.estimator == "abs":
        return bounded(abs(d), k.clamp)
    return bounded(exp(-d) - 1 + d, k.clamp)


def bounded(value: Any, most: float | None) -> Any:
    """Within ±most, where there is no gradient beyond it."""
    plain = value.item() if isinstance(value, Tensor) else value
    if most is None or abs(plain) <= most:
        return value
    edge = math.copysign(most, plain)
    return constant(edge) if isinstance(value, Tensor) else edge


def shaped_reward(s: Sample, a: Any, longest: int) -> float:
    reward = s["reward"]
    if a.overlong.buffer:
        over = len(s["mask"]) - (longest - a.overlong.buffer)
        reward -= a.overlong.penalty * min(1.0, max(0.0, over / a.overlong.buffer))
    return float(reward)


def kl_at(s: Sample, t: int, a: Any) -> float:
    if a.kl.place != "reward" or a.kl.coef == 0 or not s["mask"][t]:
        return 0.0
    return float(a.kl.coef * kl(a.kl, s["old"][t], s["ref"][t]))


def total_reward(s: Sample, a: Any, longest: int) -> float:
    return shaped_reward(s, a, longest) - sum(kl_at(s, t, a) for t in range(len(s["mask"])))


def group_advantage(s: Sample, samples: list[Sample], a: Any, longest: int) -> float:
    mine = total_reward(s, a, longest)
    rewards = [total_reward(m, a, longest) for m in members(samples, s["group"])]
    if a.baseline == "none":
        centred = mine
    elif len(rewards) == 1:
        return mine if a.group_of_one == "reward" else 0.0
    elif max(rewards) == min(rewards):
        centred = 0.0
    elif a.baseline == "mean":
        centred = mine - mean(rewards)
    else:
        centred = mine - (math.fsum(rewards) - mine) / (len(rewards) - 1)
    if a.advantage_scale == "none":
        return centred
    if a.advantage_scale == "batch_std":
        rewards = [total_reward(m, a, longest) for m in samples]
    spread = std(rewards, a.std_bias)
    return centred if spread == 0 else centred / (spread + a.std_eps)


def token_rewards(s: Sample, a: Any, longest: int) -> list[float]:
    rewards = [-kl_at(s, t, a) for t in range(len(s["mask"]))]
    made = [t for t in range(len(s["mask"])) if s["mask"][t]]
    if made:
        rewards[made[-1]] += shaped_reward(s, a, longest)
    return rewards


def whiten(rows: list[list[float]], masks: list[list[int]], eps: float) -> list[list[float]]:
    values = [v for row, mask in zip(rows, masks) for v, m in zip(row, mask) if m]
    centre, spread = mean(values), std(values, "population")
    same = max(values) == min(values)
    return [
        [0.0 if same or not m else (v - centre) / (spread + eps) for v, m in zip(row, mask)]
        for row, mask in zip(rows, masks)
    ]


def gae(s: Sample, rewards: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """From the definition: A_t = Σ_k (γλ)^k δ_{t+k}, over the tokens the model made."""
    made = [t for t in range(len(s["mask"])) if s["mask"][t]]
    advantages, returns = [0.0] * len(s["mask"]), [0.0] * len(s["mask"])
    deltas = []
    for k, t in enumerate(made):
        end = made[k + 1] if k + 1 < len(made) else len(s["mask"])
        start = 0 if k == 0 else t
        reward = sum(rewards[start:end])
        following = s["values"][made[k + 1]] if k + 1 < len(made) else 0.0
        deltas.append(reward + gamma * following - s["values"][t])
    for k, t in enumerate(made):
        advantages[t] = sum((gamma * lam) ** j * deltas[k + j] for j in range(len(made) - k))
        returns[t] = advantages[t] + s["values"][t]
    return advantages, returns


def advantages(name: str, samples: list[Sample], a: Any, longest: int) -> list[list[float]]:
    """Per sample, per token (0 where the model made nothing is not required of per-sample advantages)."""
    masks = [s["mask"] for s in samples]
    if name == "reinforce_pp":
        rows = []
        for s in samples:
            rewards = token_rewards(s, a, longest)
            rows.append([sum(rewards[t:]) for t in range(len(rewards))])
        return whiten(rows, masks, a.std_eps)
    if name == "reinforce_pp_baseline":
        plain = a.model_copy(update={"advantage_scale": "none"})
        rows = [[group_advantage(s, samples, plain, longest)] * len(s["mask"]) for s in samples]
        return whiten(rows, masks, a.std_eps)
    if name == "remax":
        rows = []
        for s in samples:
            base = [total_reward(m, a, longest) for m in members(samples, s["group"]) if m["greedy"]]
            own = 0.0 if s["greedy"] else total_reward(s, a, longest) - mean(base)
            rows.append([own] * len(s["mask"]))
        return rows
    if name == "ppo":
        rows = []
        for s in samples:
            c, made = a.critic, sum(s["mask"])
            lam = c.lam if c.length_alpha is None or made == 0 else max(0.0, 1 - 1 / (c.length_alpha * made))
            rows.append(gae(s, token_rewards(s, a, longest), c.gamma, lam)[0])
        return whiten(rows, masks, 1e-8) if a.critic.whiten else rows
    if name == "distill":
        rows = [[(q - p) if m else 0.0 for q, p, m in zip(s["teacher"], s["old"], s["mask"])] for s in samples]
        return [[gap - kl_at(s, t, a) for t, gap in enumerate(row)] for s, row in zip(samples, rows)]
    if name == "rejection":
        return [[1.0] * len(s["mask"]) for s in samples]
    return [[group_advantage(s, samples, a, longest)] * len(s["mask"]) for s in samples]


def aggregate(samples: list[Sample], a: Any, longest: int, value: Callable[[Sample, int], Tensor]) -> Tensor:
    """The mean that the recipe names, of a value per model-made token."""
    per_sample = [[value(s, t) for t in range(len(s["mask"])) if s["mask"][t]] for s in samples]
    if a.aggregation == "token_mean":
        return sum((v for row in per_sample for v in row), ZERO) / sum(len(row) for row in per_sample)
    if a.aggregation == "sample_mean":
        return sum((sum(row, ZERO) / max(1, len(row)) for row in per_sample), ZERO) / len(samples)
    if a.aggregation == "constant":
        return sum((sum(row, ZERO) for row in per_sample), ZERO) / (len(samples) * (a.constant_length or longest))
    groups = sorted({s["group"] for s in samples})
    total = ZERO
    for g in groups:
        rows = [row for s, row in zip(samples, per_sample) if s["group"] == g]
        total = total + sum((sum(row, ZERO) for row in rows), ZERO) / max(1, sum(len(row) for row in rows))
    return total / len(groups)


def clipped(ratio: Tensor, advantage: float, a: Any) -> Tensor:
    """The negative of PPO's objective, case by case."""
    low, high = 1 - a.clip_low, 1 + a.clip_high
    bounded = ratio if low <= ratio.item() <= high else constant(low if ratio.item() < low else high)
    free = constant(a.ratio_cap) if a.ratio_cap is not None and ratio.item() > a.ratio_cap else ratio
    objective = free * advantage if (free * advantage).item() <= (bounded * advantage).item() else bounded * advantage
    if a.dual_clip is not None and advantage < 0 and objective.item() < a.dual_clip * advantage:
        objective = constant(a.dual_clip * advantage)
    return -objective


def sequence_ratio(s: Sample, is_mean: bool) -> Tensor:
    made = [t for t in range(len(s["mask"])) if s["mask"][t]]
    total = sum((s["new"][t] - s["old"][t] for t in made), ZERO)
    return torch.exp(total / max(1, len(made)) if is_mean else total)


def correction(s: Sample, t: int, a: Any) -> float:
    if a.rollout_correction == "none":
        return 1.0
    made = [u for u in range(len(s["mask"])) if s["mask"][u]]
    chosen = made if a.rollout_correction == "sequence" else [t]
    weight = math.exp(sum(s["old"][u] - s["rollout"][u] for u in chosen))
    if a.rollout_correction_outside == "truncate":
        return min(a.rollout_correction_cap, weight)
    return weight if a.rollout_correction_floor <= weight <= a.rollout_correction_cap else 0.0


def covariances(samples: list[Sample], given: list[list[float]]) -> list[list[float]]:
    """(log π − mean)(A − mean) at every token, the means over all tokens that the model made."""
    made = [(s["old"][t], row[t]) for s, row in zip(samples, given) for t in range(len(row)) if s["mask"][t]]
    logprob, advantage = mean([p for p, _ in made]), mean([a for _, a in made])
    return [[(s["old"][t] - logprob) * (row[t] - advantage) for t in range(len(row))] for s, row in zip(samples, given)]


def policy_loss(
    name: str,
    samples: list[Sample],
    given: list[list[float]],
    a: Any,
    longest: int,
    marked: frozenset[tuple[int, int]] = frozenset(),
) -> Tensor:
    """`marked`: tokens, by their sample's id and place, that clip-cov or KL-cov holds back."""
    of = {s["id"]: row for s, row in zip(samples, given)}

    def value(s: Sample, t: int) -> Tensor:
        advantage = of[s["id"]][t]
        ratio = torch.exp(s["new"][t] - s["old"][t])
        if name in ("gspo", "rloo"):
            loss = clipped(sequence_ratio(s, name == "gspo"), advantage, a)
        elif name == "cispo":
            loss = -min(1 + a.clip_high, max(1 - a.clip_low, ratio.item())) * advantage * s["new"][t]
        elif name == "rejection":
            loss = -s["new"][t]
        else:
            loss = clipped(ratio, advantage, a)
        if (s["id"], t) in marked:
            moved = s["new"][t] - s["old"][t]
            loss = loss.detach() if a.covariance.mode == "clip" else loss + a.covariance.kl_coef * abs(moved)
        loss = loss * correction(s, t, a)
        if a.kl.coef and a.kl.place == "loss":
            loss = loss + a.kl.coef * kl(a.kl, s["new"][t], s["ref"][t])
        return loss - a.entropy_coef * s["entropy"][t]

    return aggregate(samples, a, longest, value)


def value_loss(samples: list[Sample], returns: list[list[float]], a: Any, longest: int) -> Tensor:
    of = {s["id"]: row for s, row in zip(samples, returns)}
    clip = a.critic.value_clip

    def value(s: Sample, t: int) -> Tensor:
        new, old, target = s["new_values"][t], s["values"][t], of[s["id"]][t]
        error = (new - target) ** 2
        if clip is not None:
            near = new if abs(new.item() - old) <= clip else constant(old + math.copysign(clip, new.item() - old))
            error = max(error, (near - target) ** 2, key=lambda e: e.item())
        return a.critic.value_coef * error

    return aggregate(samples, a, longest, value)


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def sums(s: Sample, name: str) -> Any:
    return sum((v for v, m in zip(s[name], s["mask"]) if m), ZERO)


def means(s: Sample, name: str) -> Any:
    return sums(s, name) / max(1, sum(s["mask"]))


def pair_loss(name: str, samples: list[Sample], a: Any) -> Tensor:
    """A mean over pairs; a pair is the chosen and the rejected sample of one group."""
    p, total = a.preference, ZERO
    groups = sorted({s["group"] for s in samples})
    for g in groups:
        (c,) = (s for s in members(samples, g) if s["chosen"])
        (r,) = (s for s in members(samples, g) if not s["chosen"])
        if name == "dpo":
            h = p.beta * ((sums(c, "new") - sums(c, "ref")) - (sums(r, "new") - sums(r, "ref"))) - p.margin
            loss = -(1 - p.label_smoothing) * log_sigmoid(h) - p.label_smoothing * log_sigmoid(-h)
            loss = loss - p.sft_coef * means(c, "new")
        elif name == "ipo":
            h = (means(c, "new") - means(c, "ref")) - (means(r, "new") - means(r, "ref"))
            loss = (h - 1 / (2 * p.beta)) ** 2 - p.sft_coef * means(c, "new")
        elif name == "simpo":
            h = p.beta * (means(c, "new") - means(r, "new")) - p.margin
            loss = -(1 - p.label_smoothing) * log_sigmoid(h) - p.label_smoothing * log_sigmoid(-h)
            loss = loss - p.sft_coef * means(c, "new")
        elif name == "orpo":
            odds = [means(s, "new") - torch.log(1 - torch.exp(means(s, "new"))) for s in (c, r)]
            loss = -p.sft_coef * means(c, "new") - p.beta * log_sigmoid(odds[0] - odds[1])
        else:
            reward = [s["new_values"][-1] for s in (c, r)]
            loss = -log_sigmoid(reward[0] - reward[1] - p.margin) + p.centre_coef * (reward[0] + reward[1]) ** 2
        total = total + loss
    return total / len(groups)


def kto_loss(samples: list[Sample], a: Any) -> Tensor:
    p, total = a.preference, ZERO
    shifted = [float(sums(s, "old") - sums(s, "ref")) for s in samples if s["mismatched"]]
    z = max(0.0, mean(shifted)) if shifted else 0.0
    real = [s for s in samples if not s["mismatched"]]
    for s in real:
        h = sums(s, "new") - sums(s, "ref")
        if s["chosen"]:
            total = total + p.good_weight * (1 - 1 / (1 + torch.exp(-p.beta * (h - z))))
        else:
            total = total + p.bad_weight * (1 - 1 / (1 + torch.exp(-p.beta * (z - h))))
    return total / len(real)
