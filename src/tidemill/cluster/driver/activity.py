"""Describes what a step is doing, in a few words, for the terminal and the page."""

from __future__ import annotations

from tidemill.dock import DockState
from tidemill.flow.records import Activity

DOING = {  # what a stage is called while it works
    "reward": "scoring",
    "reference": "scoring under the reference",
    "advantage": "comparing rewards",
    "learn": "learning",
    "old_logprobs": "scoring under the old policy",
    "teacher": "scoring under the teacher",
    "values": "computing the critic's values",
    "learn_values": "training the critic",
}


def what_it_is_at(state: DockState) -> Activity:
    rolled = state.stages.get("rollout")
    if rolled is not None and rolled.done < state.rows:
        return Activity("rolling out", rolled.done, state.rows)
    waiting = next((name for name, c in state.stages.items() if c.ready or c.leased), "learn")
    return Activity(DOING.get(waiting, waiting), state.stages[waiting].done, state.rows)
