"""GRPO (Shao et al. 2024, arXiv:2402.03300): a group's own rewards are its baseline, PPO's clipped ratio is its loss.

A_i = (r_i − mean(r)) / std(r), the same for every token of the response; loss per token −min(ρA, clip(ρ)A) + β·KL,
averaged over each response and then over responses.
"""

from tidemill.algorithms.policy import GroupPolicy


class GRPO(GroupPolicy):
    name = "grpo"
    about = "group-relative advantages, clipped ratio per token"
