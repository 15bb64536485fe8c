"""Ranks that learn together come to the same exchange, whatever rows come when."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidemill.batch import Batch, Column
from tidemill.cluster.worker.cut import Calls, Team
from tidemill.cluster.worker.learners import RankLearnWorker, World
from tidemill.dock import LocalDock
from tidemill.flow.tally import Tally
from tidemill.graph import Stage
from tidemill.learn.parallel.mesh import Meshes
from tidemill.recipe import load as recipe

READS = ("id", "group", "tokens")
STAGES = (Stage("learn_values", "critic", READS, scope="group"), Stage("learn", "actor", READS, scope="group"))


class Model:
    """Counts what a learner is asked for."""

    version = 0
    meshes = Meshes()

    def accumulate_own(self, batch: Batch) -> None: ...

    def forget(self) -> None: ...


class Rank(RankLearnWorker):
    learned = 0

    def _learn_share(self) -> None:
        self.learned += 1


def test_a_policy_is_not_finished_before_its_critic() -> None:
    """Else one rank may be at the critic's exchange while another is at the policy's."""
    config: Any = recipe.load("quickstart", ["algorithm=ppo"]).config
    dock = LocalDock(STAGES, lease_s=60.0, renews=True)
    alone: Any = (config, Tally(), World(), Calls(World()), Team())
    critic = Rank(dock, Model(), *alone, "learn_values")  # type: ignore[arg-type]
    learn = Rank(dock, Model(), *alone, "learn", critic)  # type: ignore[arg-type]
    ids = np.arange(4)
    tokens = Column.jagged([[1, 2]] * 4, np.int32)
    dock.put(Batch({"id": ids, "group": ids // 4, "group_size": np.full(4, 4, np.int32), "tokens": tokens}))
    for _ in range(3):
        learn.poll()
    assert (learn.learned, learn.is_done) == (0, False)
    while not critic.is_done:
        critic.poll()
    while not learn.is_done:
        learn.poll()
    assert (critic.learned, learn.learned, dock.state().rows) == (1, 1, 0)
    dock.close()
