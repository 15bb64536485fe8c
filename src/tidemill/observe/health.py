"""Health of a run: sentences about what its metrics show going wrong, and what to try. A pure function of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Metrics = Mapping[str, float]

GAP = 0.1  # nats; two correct computations in bfloat16 are 0.02 to 0.05 apart, a stale layer whole nats
WINDOW = 5  # steps that a sign must last, so that one odd step raises no alarm
BEGINNING, END, MOST = 4 * WINDOW, 2 * WINDOW, 20 * WINDOW  # steps that a history keeps


@dataclass(frozen=True, slots=True)
class Warning:
    """One warning. `sign` names it, so that the same one is not repeated."""

    sign: str
    sentence: str


def warnings(history: Sequence[Metrics]) -> list[str]:
    """Return warnings about the last steps, the most important first."""
    return [w.sentence for w in signs(history)]


def signs(history: Sequence[Metrics]) -> list[Warning]:
    """`history`: the metrics of every step so far, oldest first, or as `shortened` leaves them."""
    recent = history[-WINDOW:]
    if not recent:
        return []
    checks = (equal_groups, truncation, entropy_fall, divergence, clipping, spread, gap, reference, reward_errors)
    more = (environment_errors, length_growth, repetition, skipped, flat_reward, critic)
    found = [check(recent, history) for check in (*checks, *more)]
    return [w for w in found if w is not None]


def shortened(history: list[Metrics]) -> list[Metrics]:
    """What the checks need of a long history: its beginning, its end, and a step in between that earned something."""
    if len(history) <= MOST:
        return history
    earned = [step for step in history[BEGINNING:-END] if step.get("reward", 1.0) != 0.0]
    return [*history[:BEGINNING], *earned[:1], *history[-END:]]


def mean(steps: Sequence[Metrics], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return sum(values) / len(values) if values else None


def equal_groups(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    share, accuracy = mean(recent, "equal_reward_groups"), mean(recent, "accuracy") or 0.0
    if share is None or share < 0.5:
        return None
    why, remedy = (
        ("the problems are solved already", "harder problems, or data.source with a curriculum")
        if accuracy > 0.5
        else ("hardly any response is right", "easier problems, a longer warm start, or a reward with partial credit")
    )
    return Warning(
        "equal_groups",
        f"{share:.0%} of groups have equal rewards and teach nothing: {why}. Try {remedy}, more "
        f"train.samples_per_prompt, or algorithm.dynamic_sampling=true.",
    )


def truncation(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    share = mean(recent, "truncated_share")
    if share is None or share < 0.2:
        return None
    return Warning(
        "truncation",
        f"{share:.0%} of responses are cut off at rollout.max_new_tokens and never reach their answer. "
        "Try a higher rollout.max_new_tokens, algorithm.overlong.buffer, or a shorter task.",
    )


def entropy_fall(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    now, begin = mean(recent, "entropy"), mean(history[:WINDOW], "entropy")
    accuracy = mean(recent, "accuracy")
    if accuracy is None:
        return None  # no rewards: it learns from examples, and is supposed to become certain of them
    if now is None or begin is None or begin < 0.05 or now > 0.1 * begin or accuracy > 0.9:
        return None
    return Warning(
        "entropy",
        f"Entropy has fallen from {begin:.2g} to {now:.2g} while accuracy is {accuracy:.0%}: it no longer explores. "
        "Try algorithm.clip_high=0.28, algorithm.entropy_coef=1e-3, algorithm.covariance.mode=kl, or a "
        "lower learn.lr.",
    )


def divergence(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    moved = mean(recent, "old_kl")
    if moved is None or moved < 0.1:
        return None
    return Warning(
        "old_kl",
        f"Within a step, the policy moves {moved:.2g} nats per token from the one that made the samples. "
        "Try a lower learn.lr, or fewer train.updates_per_step and train.passes_per_step.",
    )


def clipping(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    share = (mean(recent, "clip_share_low") or 0.0) + (mean(recent, "clip_share_high") or 0.0)
    if share < 0.3:
        return None
    return Warning(
        "clipping",
        f"{share:.0%} of tokens are clipped and give no gradient. Try a lower learn.lr, fewer updates per step, or "
        "wider algorithm.clip_low and clip_high.",
    )


def spread(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    largest = max((step.get("ratio_max", 1.0) for step in recent), default=1.0)
    if largest < 20.0:
        return None
    return Warning(
        "ratio",
        f"A token became {largest:.3g} times as likely within one step. Try algorithm.dual_clip=3, a lower "
        "learn.lr, or algorithm.old_logprobs=recompute if rollout and learner disagree.",
    )


def gap(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    measured = [n for step in recent for n in step if n.startswith("mismatch/") and n.endswith("/mean")]
    size = mean(recent, measured[0] if measured else "gap_mean")
    if size is None or size < GAP:
        return None
    return Warning(
        "gap",
        f"Rollout and learner differ by {size:.2g} in log-probability per token. Try algorithm.old_logprobs=recompute "
        "with algorithm.rollout_correction=token, or rollout in float32.",
    )


def reference(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    distance = mean(recent, "kl")
    if distance is None or distance < 1.0:
        return None
    return Warning(
        "kl",
        f"The policy is {distance:.2g} nats per token away from the reference. Try a higher algorithm.kl.coef, a lower "
        "learn.lr, or algorithm.kl.reset_every if it is meant to move.",
    )


def reward_errors(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    errors = sum(step.get("reward_errors", 0.0) for step in recent)
    if not errors:
        return None
    return Warning(
        "reward_errors",
        f"{errors:.0f} rewards failed in the last {len(recent)} steps; samples.jsonl names them. Fix the function, "
        "raise rewards.timeout_s, or choose rewards.on_error.",
    )


def environment_errors(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    errors = sum(step.get("environment_errors", 0.0) for step in recent)
    if not errors:
        return None
    return Warning(
        "environment_errors",
        f"{errors:.0f} conversations of the last {len(recent)} steps ended because their environment failed. Fix it, "
        "raise environment.timeout_s, or find the first with environment.on_error=fail.",
    )


def length_growth(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    now, begin = mean(recent, "response_tokens"), mean(history[:WINDOW], "response_tokens")
    better = (mean(recent, "reward") or 0.0) - (mean(history[:WINDOW], "reward") or 0.0)
    if now is None or not begin or len(history) < 2 * WINDOW or now < 2 * begin or better > 0.02:
        return None
    return Warning(
        "length",
        f"Responses have grown from {begin:.0f} to {now:.0f} tokens and the reward has not. Try "
        "algorithm.aggregation=constant, algorithm.overlong.buffer, or the reward length.",
    )


def repetition(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    share = mean(recent, "repetition")
    if share is None or share < 0.3:
        return None
    return Warning(
        "repetition",
        f"{share:.0%} of word sequences repeat within their response. Try the reward repetition with a small weight, "
        "or a lower learn.lr.",
    )


def skipped(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    earlier = history[: -len(recent)]
    names = ("skipped_updates", "critic/skipped_updates")
    before, now = (sum(step.get(name, 0.0) for step in some[-1:] for name in names) for some in (earlier, recent))
    count = now - before  # counted from the run's beginning
    if count <= 0:
        return None
    told = next((_where(step) for step in reversed(recent) if "not_finite_tensors" in step), "")
    return Warning(
        "skipped",
        f"{count:.0f} updates were skipped because a gradient was not finite{told}. Try a lower learn.lr, "
        "learn.clip_norm, or float32.",
    )


def _where(step: Metrics) -> str:
    """Say where the last of them was."""
    if step["not_finite_loss"]:
        return ": the loss was not finite itself, so look at the step's rewards and log-probabilities"
    if not step["not_finite_tensors"]:
        return ": its norm is beyond float32"
    found = f" in {step['not_finite_tensors']:.0f} of {step['learned_tensors']:.0f} tensors"
    return found + (f", from layer {step['not_finite_layer']:.0f} down" if step["not_finite_layer"] >= 0 else "")


def flat_reward(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    if len(history) < 20 or any(step.get("reward", 1.0) != 0.0 for step in history):
        return None
    return Warning(
        "flat_reward",
        "No response has earned any reward yet. Try easier problems, a longer warm start, or check the reward function "
        "on a right answer by hand.",
    )


def critic(recent: Sequence[Metrics], history: Sequence[Metrics]) -> Warning | None:
    explained, spread = mean(recent, "critic/explained_variance"), mean(recent, "critic/return_std")
    if explained is None or len(history) < 4 * WINDOW or explained > 0.0 or (spread is not None and spread < 0.1):
        return None  # where nearly all returns are alike there is nothing to explain
    return Warning(
        "critic",
        f"The critic does not explain the returns (explained variance {explained:.2f}). Try "
        "algorithm.critic.warmup_steps=20, a higher algorithm.critic.lr, or algorithm.critic.lam=1.",
    )
