"""What a step is at, in a few words, for whoever watches a run."""

from __future__ import annotations

from tidemill.dock import DockState
from tidemill.flow.records import Activity

DOING = {  # what a stage is called while it works
    "reward": "scoring", "reference": "asking the reference", "advantage": "comparing rewards", "learn": "learning",
    "old_logprobs": "scoring under the old policy", "teacher": "asking the teacher", "values": "asking the critic",
    "learn_values": "teaching the critic",
}  # fmt: skip


def what_it_is_at(state: DockState) -> Activity:
    rolled = state.stages.get("rollout")
    if rolled is not None and rolled.done < state.rows:
        return Activity("rolling out", rolled.done, state.rows)
    waiting = next((name for name, c in state.stages.items() if c.ready or c.leased), "learn")
    return Activity(DOING.get(waiting, waiting), state.stages[waiting].done, state.rows)
