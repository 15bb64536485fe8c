"""The mismatch meter: in every run, how far the rollout engine's log-probabilities are from the learner's for the same
tokens and the same weights, and what that does to the importance ratio."""

from __future__ import annotations

from tidemill.algorithms.api import Stat, Stats, TokenBatch
from tidemill.batch import Batch
from tidemill.models.upload import upload


def mismatch(part: Batch, tokens: TokenBatch, version: int, engine: str) -> Stats:
    """Of the tokens that the weights of `version`, now scoring them, made themselves; of others the difference would
    also hold what was learned since. Nothing where there are none."""
    if "versions" not in part or tokens.rollout_logprobs is None:
        return {}
    made = part["versions"].values == version
    if not made.any():
        return {}
    ours = upload(made, tokens.mask.device).to(tokens.mask.dtype) * tokens.mask
    gap = (tokens.logprobs.detach() - tokens.rollout_logprobs) * ours
    ratio, count = gap.exp(), ours.sum()
    found = {
        "mean": Stat(gap.abs().sum(), count),
        "max": Stat(gap.abs().max(), reduce="max"),
        "ratio_mean": Stat((ratio * ours).sum(), count),
        "ratio_max": Stat(ratio.max(), reduce="max"),
    }
    return {f"mismatch/{engine}/{name}": stat for name, stat in found.items()}
