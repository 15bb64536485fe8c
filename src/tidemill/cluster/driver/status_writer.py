"""Writes a run's status, for `tidemill status`, and reads how many rollout workers are wanted."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from tidemill.cluster.driver import status
from tidemill.cluster.wiring import ROLLOUT, Post
from tidemill.dock import DockState

if TYPE_CHECKING:
    from tidemill.cluster.driver.driver import Driver

STATUS_S = 1.0


class StatusWriter:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._looked, self._told_step = 0.0, 0

    def write(self, state: DockState | None, is_over: bool) -> None:
        """Write status.json: during steps at most once a second, and when the first begins; without a `state` at
        once."""
        driver, now = self.driver, time.monotonic()
        conductor = driver.conductor
        is_first = self._told_step == 0 < conductor.number
        if now - self._looked < STATUS_S and state is not None and not is_first:
            return
        self._looked, self._told_step = now, conductor.number
        if driver.is_up:
            self._grow_or_shrink()
        found = status.RunStatus(
            step=conductor.number,
            steps=driver.config.train.steps,
            open=conductor.open,
            since=time.time() - (now - conductor.moved_at),
            written=time.time(),
            where=driver.starter.describe(),
            driver=os.getpid(),
            machine=socket.gethostname(),
            workers=tuple(status.of_member(m) for m in driver.pool.members.values()),
            stages=status.stages_of(state) if state is not None else {},
            lost=driver.pool.lost_total,
            ray=driver.starter.address,
            home=driver.starter.home[0],
            logs=str(driver.pool.logs),
            is_over=is_over,
        )
        status.write(driver.path, found)

    def _grow_or_shrink(self) -> None:
        """Add or remove rollout workers during the run, as `tidemill scale` asked."""
        driver, pool = self.driver, self.driver.pool
        group = driver.wiring.group(ROLLOUT)
        wanted = status.wanted_rollouts(driver.path)
        if group is None or wanted is None:
            return
        ranks = sorted(m.post.rank for m in pool.of(ROLLOUT, ready=False))
        most = max(wanted, 1) * group.engine_ranks
        for rank in range(most):
            if rank not in ranks:
                driver.note(f"rollout-{rank} joins")
                pool.add(Post(group, rank))
        for rank in ranks:
            if rank >= most:
                driver.note(f"rollout-{rank} leaves")
                pool.remove(f"rollout-{rank}")
