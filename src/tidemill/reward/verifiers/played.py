"""The reward `environment`: what the environment itself gave during the conversation."""

from __future__ import annotations

from tidemill.reward.api import Reward, Sample


def environment(sample: Sample) -> Reward:
    """The sum of all turns' rewards. A conversation whose environment failed has what it had until then."""
    solved = sample.played.get("is_solved")
    return Reward(float(sample.played.get("reward", 0.0)), correct=None if solved is None else bool(solved))
