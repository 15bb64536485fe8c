"""Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without the division by the group's spread and by the length.

A_i = r_i − mean(r); token losses are summed and divided by a constant, so long wrong answers are not favoured. Its
settings are all that sets it apart.
"""

from tidemill.algorithms.grpo import GRPO


class DrGRPO(GRPO):
    name = "dr_grpo"
    about = "GRPO without its two biases: no division by the spread, none by the length"
    paper = {"aggregation": "constant", "advantage_scale": "none"}
