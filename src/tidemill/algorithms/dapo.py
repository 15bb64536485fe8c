"""DAPO (Yu et al. 2025, arXiv:2503.14476): four changes to GRPO, each a setting.

clip_high 0.28 (clip-higher), aggregation token_mean (token-level loss), overlong.buffer (soft overlong penalty), and
dynamic_sampling: groups whose rewards are all equal teach nothing, so they are dropped and new prompts follow.
"""

from tidemill.algorithms.grpo import GRPO


class DAPO(GRPO):
    name = "dapo"
    about = "GRPO with clip-higher, token-level loss, overlong shaping, dynamic sampling"
    paper = {"aggregation": "token_mean", "clip_high": 0.28, "dynamic_sampling": True}
