"""Describes what a step is doing, in a few words, for the terminal and the page."""

from __future__ import annotations

from tidemill.dock import DockState
from tidemill.flow.records import Activity

DOING = {  # what a stage is called while it works
    "rollout": "rolling out",
    "reward": "scoring",
    "reference": "scoring under the reference",
    "advantage": "comparing rewards",
    "learn": "learning",
    "old_logprobs": "scoring under the old policy",
    "teacher": "scoring under the teacher",
    "values": "computing the critic's values",
    "learn_values": "training the critic",
}


def what_it_is_at(state: DockState, rows: int) -> Activity:
    """Say which stage works and how far it is. `rows`: a step's; learned ones have left the dock."""
    waiting = next((name for name, c in state.stages.items() if c.ready or c.leased), "learn")
    if (rolled := state.stages.get("rollout")) is not None and rolled.pending:
        waiting = "rollout"
    total = max(rows, state.rows)  # more: rows of later steps are there too
    return Activity(DOING.get(waiting, waiting), max(0, total - state.stages[waiting].pending), total)
