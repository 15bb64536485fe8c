"""A learner's model and an engine's copy of it in one process, joined as a run joins them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tidemill.cluster.assignment import OneProcess, WeightLink
from tidemill.cluster.worker.weights import WeightPort
from tidemill.flow.tally import Tally
from tidemill.recipe.config import Config
from tidemill.reshard.layouts.layout import merge

AHEAD = Config.model_validate({"flow": {"schedule": "async", "max_staleness": 1}})


def _state(model: Any, engine: Any = None, learner: Any = None) -> Any:
    return SimpleNamespace(
        config=AHEAD, tally=Tally(), device=torch.device("cpu"), loaded=SimpleNamespace(model=model), learner=learner,
        is_cut=False, engine=engine, lead=None, follower=None, turns=None, is_shared=False, shares_tensors=False,
    )  # fmt: skip


class Copy:
    """Rollout's own copy of what a learner has: the next version is written aside, and taken up."""

    def __init__(self, learned: Any, served: Any, engine: Any) -> None:
        learner = SimpleNamespace(publish=lambda: None)
        sender, self.port = WeightPort(_state(learned, learner=learner)), WeightPort(_state(served, engine))
        assert self.port.writes_aside
        told = [port.describe(0, ()) for port in (sender, self.port)]
        source, target = (merge(each) for each in zip(*told, strict=True))
        link = WeightLink("here", source, target, (0,), verify="all", one_process=OneProcess())
        for port in (sender, self.port):
            port.link(link, 0)

    @property
    def wire(self) -> Any:
        assert self.port._carrier is not None
        return self.port._carrier

    def publish(self, version: int) -> None:
        self.port.receive(version)

    def take_up(self, version: int) -> None:
        self.port.take_up(version)
