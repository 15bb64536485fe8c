"""The reward of reasoning-gym's tasks: each task's own verifier, wrapped, for some raise on odd answers."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tidemill.errors import MissingExtra
from tidemill.reward.api import Reward, Sample
from tidemill.reward.verifiers.answers import final_answer


def reasoning_gym(sample: Sample, final: str = "all") -> Reward:
    """The verifier's score of the final answer, 0 to 1; an answer it cannot judge scores 0."""
    if "reasoning_gym" not in sample.meta:
        raise ValueError("the row does not come from data.source reasoning_gym:TASK")
    task, seed = sample.meta["reasoning_gym"], int(sample.meta["seed"])
    dataset, entry = problem(task, seed, json.dumps(sample.meta.get("args", {}), sort_keys=True))
    answer = final_answer(sample.response, final)
    try:
        score = float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:  # a verifier's own mistake on an answer it did not expect
        score = 0.0
    score = min(max(score, 0.0), 1.0)
    return Reward(score, correct=score >= 1.0)


@lru_cache(maxsize=4096)
def problem(task: str, seed: int, args: str) -> tuple[Any, Any]:
    """Made again from its seed, so nothing but the seed travels with a sample."""
    try:
        import reasoning_gym as gym
    except ImportError:
        raise MissingExtra("the reward reasoning_gym", "reasoning-gym", "rewards") from None
    dataset = gym.create_dataset(task, size=1, seed=seed, **json.loads(args))
    return dataset, dataset[0]
