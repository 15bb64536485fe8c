"""Rollout workers that share the work: who has room takes, groups stay whole, stragglers are made up for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidemill.batch import Batch, Column
from tidemill.dock import LeaseExpired, LocalDock
from tidemill.dock.ledger.leases import LEAST_ENDED
from tidemill.flow.stages.rolling import RolloutWorker
from tidemill.flow.tally import Tally
from tidemill.graph import Stage
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Request

WRITES = ("tokens", "prompt_length", "logprobs", "versions", "mask", "finish", "version", "length")
STAGES = (Stage("rollout", "r", ("prompt",), WRITES, "group"), Stage("learn", "r", ("tokens",)))
SIZE = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Makes `speed` requests a step, all their samples at once."""

    def __init__(self, speed: int = 1) -> None:
        self.speed, self.version = speed, 0
        self.requests: list[Request] = []
        self.cancelled: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> list[Completion]:
        done, self.requests = self.requests[: self.speed], self.requests[self.speed :]
        return [Completion(r, i, [7], [0.0], [0], "stop") for r in done for i in range(r.n)]

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.requests = [r for r in self.requests if r.id != request_id]


@pytest.fixture
def config() -> Config:
    return recipe.load("quickstart", ["rollout.concurrent=1024", "flow.lease_s=1000"]).config


def shared(groups: int, clock: Clock) -> LocalDock:
    dock = LocalDock(STAGES, lease_s=1000.0, clock=clock)
    ids = np.arange(groups * SIZE)
    prompts = Column.jagged([[1, 2]] * len(ids), np.int32)
    sizes = np.full(len(ids), SIZE, np.int32)
    dock.put(Batch({"id": ids, "group": ids // SIZE, "group_size": sizes, "prompt": prompts}))
    return dock


def worker(dock: Any, config: Config, engine: Engine, peers: int = 2) -> RolloutWorker:
    made = RolloutWorker(dock, engine, config, Tally())  # type: ignore[arg-type]
    made.peers = peers
    return made


def test_who_comes_first_leaves_the_others_their_share(config: Config) -> None:
    dock = shared(24, Clock())
    engines = [Engine(speed=0) for _ in range(3)]
    for engine in engines:
        worker(dock, config, engine, peers=3).poll()
    assert [len(e.requests) for e in engines] == [8, 8, 8]
    assert all(r.n == SIZE for e in engines for r in e.requests)  # a group's samples are one request, at one worker
    assert len({r.id for e in engines for r in e.requests}) == 24


def test_who_is_faster_makes_more_and_all_is_made(config: Config) -> None:
    dock = shared(64, Clock())
    few = config.model_copy(update={"rollout": config.rollout.model_copy(update={"concurrent": 2 * SIZE})})
    slow, fast = (worker(dock, few, Engine(speed)) for speed in (1, 6))
    while dock.state().stages["learn"].ready < 64 * SIZE:
        assert slow.poll() | fast.poll()
    assert slow.finished + fast.finished == 64
    assert fast.finished > 1.5 * slow.finished


def test_one_that_is_left_alone_makes_the_rest(config: Config) -> None:
    dock = shared(16, Clock())
    left = worker(dock, config, Engine(speed=4))  # it has not heard yet that the other is gone
    while left.poll():
        pass
    assert left.finished == 16


def test_a_straggler_is_issued_once_more_and_counts_once(config: Config) -> None:
    clock = Clock()
    inner = shared(LEAST_ENDED + 2, clock)
    stuck, idle = worker(inner, config, Engine(speed=0)), worker(inner, config, Engine(speed=99))
    stuck.peers = 100
    stuck.poll()
    assert len(stuck.rolling) == 1
    idle.peers = 1
    idle.poll()
    idle.peers = 2
    assert idle.finished == LEAST_ENDED + 1 and not idle.poll()
    clock.now = 60.0
    assert idle.poll()
    assert idle.finished == LEAST_ENDED + 2 and inner.state().reissued == 1
    for rolling in stuck.rolling.values():
        with pytest.raises(LeaseExpired):  # as a thread finds out now and then
            rolling.lease.renew()
    stuck.poll()
    assert not stuck.rolling and stuck.engine.cancelled and not stuck.engine.has_work  # type: ignore[attr-defined]
    assert stuck.finished == 0 and inner.state().stages["rollout"].done == (LEAST_ENDED + 2) * SIZE
