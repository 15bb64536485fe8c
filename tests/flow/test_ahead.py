"""Whose rows are in the dock, and what a role's idle time is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidemill.batch import Batch
from tidemill.flow.ahead import Ahead
from tidemill.flow.schedule import staleness_limit
from tidemill.flow.tally import idle
from tidemill.recipe.config import Config


class Rows:
    """A feed that counts groups, and a dock that remembers what was put under which tag."""

    def state(self):
        return {}

    def __init__(self, prompts: int) -> None:
        self.prompts, self.groups = prompts, 0
        self.puts: list[tuple[str, list[int]]] = []

    def rows(self, prompts: int | None = None) -> Batch:
        count = prompts or self.prompts
        self.groups += count
        return Batch({"group": np.arange(self.groups - count, self.groups)})

    def put(self, rows: Batch, tag: str = "") -> None:
        self.puts.append((tag, rows.values("group").tolist()))


def ahead(schedule: str = "async", **flow: Any) -> tuple[Ahead, Rows]:
    config = Config(
        train={"steps": 6, "prompts_per_step": 2, "updates_per_step": 2, "passes_per_step": 3},
        flow={"schedule": schedule, **flow},
        algorithm={"name": "dapo", "dynamic_sampling_rounds": 1},
    )
    rows = Rows(2)
    return Ahead(rows, rows, config), rows  # type: ignore[arg-type]


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_a_step_enters_once_the_one_that_its_age_allows_is_learned(lead: int) -> None:
    made, rows = ahead(max_staleness=lead)
    for step in range(1, 7):
        assert made.begin(step).first_group == 2 * (step - 1)
        entered = len(rows.puts)
        assert entered == min(step + lead, 6), "none beyond the last step"
        alive = [rows.puts[s - 1][0] for s in range(step, entered + 1)]
        assert len(set(alive)) == len(alive), "steps in the dock at once have tags of their own"
    assert len({tag for tag, _ in rows.puts}) <= lead + 1
    assert [g for _, groups in rows.puts for g in groups] == list(range(12))


@pytest.mark.parametrize("schedule", ["sync", "streamed"])
def test_other_schedules_have_one_step_in_the_dock_and_no_tags(schedule: str) -> None:
    made, rows = ahead(schedule, max_staleness=3)
    for step in range(1, 4):
        made.begin(step)
        assert len(rows.puts) == step and made.tag(step) is None
    assert staleness_limit(made.config) is None


def test_staleness_counts_in_updates_of_the_weights() -> None:
    assert staleness_limit(ahead(max_staleness=2)[0].config) == 2 * 2 * 3


def test_refills_belong_to_the_step_that_is_learned_and_are_bounded() -> None:
    made, rows = ahead(max_staleness=1)
    made.begin(1)
    assert made.refill(1) == 1 and rows.puts[-1] == (made.tag(1), [4])
    assert made.refill(5) == 1, "as many again as the step had, and no more"
    assert made.refill(1) == 0
    assert made.begin(2).first_group == 2
    assert made.refill(1, made.tag(3)) == 1 and rows.puts[-1][0] == made.tag(3), "a later step's, if it is told so"


def test_idle_is_the_share_of_a_step_without_work() -> None:
    measured = {"time/rollout": 1.0, "time/learn": 2.0, "time/old_logprobs": 1.0, "time/step": 99.0}
    assert idle(measured, 4.0) == {"idle/rollout": 0.75, "idle/actor": 0.25}
