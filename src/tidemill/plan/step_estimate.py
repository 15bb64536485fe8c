"""A step without simulating it: seconds of each part, what they come to under a schedule, and what limits it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tidemill.estimate.run import samples_per_step
from tidemill.plan.decoding import Drained, drain
from tidemill.plan.lengths import Lengths
from tidemill.plan.time_model import TimeModel
from tidemill.recipe.config import Config

STEPS_AHEAD = 8  # more than so many steps in the engines at once change nothing: their slots are full


@dataclass(frozen=True, slots=True)
class StepEstimate:
    seconds: float
    rollout_s: float  # of the engine that takes longest
    learn_s: float  # learning, old log-probabilities, the critic, the reference, where the learners do them
    publish_s: float
    reward_s: float
    other_s: float
    tokens: float  # prompt and response tokens of a step
    made_tokens: float
    devices: int
    limit: str  # in words
    parts: dict[str, float] = field(default_factory=dict)
    rollout_share: float = 1.0  # of the devices, that roll out
    learn_share: float = 1.0
    flop: float = 0.0  # that the step's tokens ask for: 2·N a token made, 6·N a token learned

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def busy(self) -> float:
        """Share of its time in which a device works, over all devices."""
        work = self.rollout_s * self.rollout_share + self.learn_s * self.learn_share
        return min(1.0, work / self.seconds) if self.seconds else 0.0

    def mfu(self, peak: float) -> float:
        return self.flop / (self.seconds * self.devices * peak)


Groups = Sequence[tuple[int, Sequence[int]]]  # prompt and responses of each


def estimate(model: TimeModel, lengths: Lengths, seed: int = 0) -> StepEstimate:
    """Of one step, with lengths drawn once."""
    own = drawn(model.config, lengths, seed)
    return put_together(model, own, rollout_of(model, own), learning_parts(model, own))


def drawn(config: Config, lengths: Lengths, seed: int = 0) -> Groups:
    """The groups of one step."""
    groups, each = config.train.prompts_per_step, config.train.samples_per_prompt
    prompts = lengths.draw_prompts(groups, seed).tolist()
    responses = lengths.draw(groups * each, seed).reshape(groups, each).tolist()
    return list(zip(prompts, responses, strict=True))


def put_together(model: TimeModel, own: Groups, rollout: Drained, learn: dict[str, float]) -> StepEstimate:
    config = model.config
    each = config.train.samples_per_prompt
    tokens = float(sum(p * each + sum(r) for p, r in own))
    made = float(sum(sum(r) for _, r in own))
    reward = model.reward_s * samples_per_step(config) / max(1, config.cluster.rewards)
    over = model.overheads
    publish = model.publish_s + 3 * over.command_s
    rows = samples_per_step(config) * over.row_s
    other = over.feed_s + rows + model.hand_over_s() + 6 * over.command_s + 4 * over.dock_s * len(model.graph.stages)
    learn_s = sum(learn.values())
    seconds, limit = together(model, rollout, learn, publish, min(reward, 0.2 * rollout.seconds), other)
    known = model.shape.total if not model.shape.experts else _active(model)
    return StepEstimate(
        seconds=seconds,
        rollout_s=rollout.seconds,
        learn_s=learn_s,
        publish_s=publish,
        reward_s=reward,
        other_s=other,
        tokens=tokens,
        made_tokens=made,
        devices=model.devices,
        limit=limit,
        parts={"rollout": rollout.seconds, **learn, "publish": publish, "reward": reward, "other": other},
        rollout_share=1.0 if model.is_colocated else model.engines * model.engine_grid.ranks / model.devices,
        learn_share=model.learners / model.devices,
        flop=known * (2 * made + 6 * tokens),
    )


def _active(model: TimeModel) -> float:
    """Parameters that one token goes through."""
    shape = model.shape
    asleep = shape.moe_layers * shape.expert_parameters * (1 - shape.experts_per_token / shape.experts)
    return shape.total - asleep


def rollout_of(model: TimeModel, own: Groups) -> Drained:
    """A step of the engine that has most to do. Under async it holds the tail of one step and the steps ahead together,
    and this is their mean."""
    flow = model.config.flow
    ahead = min(1 + flow.max_staleness, STEPS_AHEAD) if flow.schedule == "async" else 1
    if ahead == 1:
        return _rollout_of(model, own)
    several = _rollout_of(model, [*own] * ahead)
    ends = tuple(end / ahead for end in several.ends)
    return Drained(several.seconds / ahead, several.tokens / ahead, ends, several.rows)


def _rollout_of(model: TimeModel, own: Groups) -> Drained:
    """Of the engine that has most to do: groups are dealt out as engines have room."""
    engines = min(model.engines, len(own))
    share = -(-len(own) // engines)
    dealt, loads = _deal(own, [sum(responses) for _, responses in own], engines, share)
    slots = model.config.rollout.concurrent
    busiest = sorted(range(engines), key=lambda i: (-max(max(g[1]) for g in dealt[i]), -loads[i]))[:2]
    chosen = {*busiest, int(np.argmax(loads))}
    return max((drain(model, dealt[i], slots, model.cache_capacity()) for i in chosen), key=lambda d: d.seconds)


def _deal(groups: Groups, loads: Sequence[float], count: int, most: int) -> tuple[list[Groups], list[float]]:
    """Give each group in turn to the one that has least to do and fewer than `most` groups."""
    dealt: list[list[tuple[int, Sequence[int]]]] = [[] for _ in range(count)]
    given = [0.0] * count
    free = [(0.0, i) for i in range(count)]
    for group, load in zip(groups, loads, strict=True):
        _, i = free[0]
        dealt[i].append(group)
        given[i] += load
        if len(dealt[i]) < most:
            heapq.heapreplace(free, (given[i], i))
        else:
            heapq.heappop(free)
    return list(dealt), given


def learning_parts(model: TimeModel, own: Sequence[tuple[int, Sequence[int]]]) -> dict[str, float]:
    """Seconds of each stage that the learners do, of the team with most tokens."""
    config = model.config
    teams = max(1, model.teams)
    order = sorted(own, key=lambda g: -sum(g[1]))
    dealt, loads = _deal(order, [prompt + sum(responses) for prompt, responses in order], teams, len(order))
    most = dealt[int(np.argmax(loads))]
    updates = config.train.updates_per_step
    found: dict[str, float] = {}
    for stage in model.graph.stages:
        if stage.name in ("old_logprobs", "reference", "teacher", "values"):
            found[stage.name] = model.team_s(model.passes(*_columns(most), trains=False))
        elif stage.name in ("learn", "learn_values"):
            parts = [most[i::updates] for i in range(updates)]
            spent = sum(model.team_s(model.passes(*_columns(part))) for part in parts if part)
            found[stage.name] = config.train.passes_per_step * (spent + updates * model.update_s)
    pulled = sum(p + sum(r) for p, r in most)
    found["learn"] = found.get("learn", 0.0) + (model.pull_s(pulled) if config.cluster.executor != "local" else 0.0)
    return found


def _columns(groups: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[int], list[Sequence[int]]]:
    return [g[0] for g in groups], [g[1] for g in groups]


def together(
    model: TimeModel, rollout: Drained, learn: dict[str, float], publish: float, reward: float, other: float
) -> tuple[float, str]:
    """What the parts come to, and which of them a faster device would shorten."""
    spent, schedule = sum(learn.values()), model.config.flow.schedule
    if schedule == "sync" or (model.is_colocated and schedule != "async"):
        seconds = rollout.seconds + reward + spent + publish + other
    elif schedule == "streamed":  # learning goes on behind the tail, from the first full micro-batch on
        seconds = max(rollout.seconds, _behind(model, rollout, spent)) + publish + other + reward / 4
    else:
        seconds = max(rollout.seconds, spent + publish) + other
    return seconds, limit_of(model, rollout, learn, publish, seconds)


def _behind(model: TimeModel, rollout: Drained, spent: float) -> float:
    """When learning is over that begins with the first samples and takes each share as it comes."""
    ends, at = rollout.ends, 0.0
    cuts = 16
    for i in range(cuts):
        ready = ends[min(len(ends) - 1, (i + 1) * len(ends) // cuts - 1)] if ends else 0.0
        at = max(at, ready) + spent / cuts
    return at


def limit_of(model: TimeModel, rollout: Drained, learn: dict[str, float], publish: float, seconds: float) -> str:
    parts = {"rollout": rollout.seconds, "learning": sum(learn.values()), "publishing": publish}
    name = max(parts, key=lambda key: parts[key])
    if name == "rollout":
        tail = rollout.seconds - (rollout.ends[len(rollout.ends) // 2] if rollout.ends else 0.0)
        mean = max(1, round(rollout.rows))
        reads = model.step_s(1) / model.step_s(mean)
        if tail > 0.5 * rollout.seconds:
            return "rollout: its longest responses"
        if reads > 0.6:
            return "rollout: reading weights for few sequences"
        return "rollout: decoding"
    if name == "learning":
        return "learning: exchanges between ranks" if _exchanges(model) else "learning: arithmetic"
    return "publishing weights"


def _exchanges(model: TimeModel) -> bool:
    """Whether a typical pass takes longer for its exchanges than for itself."""
    lengths = [[model.config.rollout.max_new_tokens // 2] * model.config.train.samples_per_prompt]
    work = model.passes([model.config.data.max_prompt_tokens // 2], lengths)[0]
    return model.pass_s(work) > 2 * model.pass_s(work, exchanges=False)
