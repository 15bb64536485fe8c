"""Checkpoints as a worker writes and reads them: of a whole learner, of one over ranks of its own, of a rank's part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tidemill.cluster.worker.state import others, restore_others
from tidemill.cluster.worker.worker_state import CutLearner, WorkerState
from tidemill.learn import checkpoint
from tidemill.learn.parallel.model import ParallelModel


class Checkpoints(Protocol):
    def save(self, folder: Path, step: int, state: dict[str, Any], wait: bool, marks: dict[str, Any]) -> None:
        """`state`: what is not the learner's. Some write while training goes on; with `wait`, come back when it is on
        disk."""

    def load(self, path: Path) -> dict[str, Any]: ...


def checkpoints_of(state: WorkerState) -> Checkpoints:
    if state.cut is not None:
        return CutCheckpoints(state, state.cut)
    return RankedCheckpoints(state) if state.away is not None else WholeCheckpoints(state)


@dataclass(frozen=True, slots=True)
class WholeCheckpoints:
    worker: WorkerState

    def save(self, folder: Path, step: int, state: dict[str, Any], wait: bool, marks: dict[str, Any]) -> None:
        tensors, learner = self.worker.learner.state()
        more, of_others = others(self.worker.critic, self.worker.keeper)
        checkpoint.save(folder, step, tensors | more, {"learner": learner} | of_others | state, **marks)

    def load(self, path: Path) -> dict[str, Any]:
        tensors, state = checkpoint.load(path)
        self.worker.learner.restore(tensors, state["learner"])
        restore_others(self.worker.critic, self.worker.keeper, tensors, state)
        return state


@dataclass(frozen=True, slots=True)
class RankedCheckpoints:
    """Ranks that this process started write their own pieces."""

    worker: WorkerState

    def save(self, folder: Path, step: int, state: dict[str, Any], wait: bool, marks: dict[str, Any]) -> None:
        more, of_others = others(self.worker.critic, self.worker.keeper)
        self.worker.learner.save(folder, step, {"learner": {}} | of_others | state, more, wait, **marks)

    def load(self, path: Path) -> dict[str, Any]:
        tensors, state = self.worker.learner.load(path)
        restore_others(self.worker.critic, self.worker.keeper, tensors, state)
        whole: dict[str, Any] = state
        return whole


@dataclass(frozen=True, slots=True)
class CutCheckpoints:
    """This process is a rank, and writes its own piece."""

    worker: WorkerState
    part: CutLearner

    def save(self, folder: Path, step: int, state: dict[str, Any], wait: bool, marks: dict[str, Any]) -> None:
        own = {} if self.worker.keeper is None else {"kl": self.worker.keeper.state()[1]}
        part = self.part
        part.learner.save(folder, step, own | state, critic=part.critic, reference=self._moving_reference(), **marks)
        if wait:
            part.learner.saver.wait()

    def load(self, path: Path) -> dict[str, Any]:
        state = self.part.learner.load(path, self.part.critic, self._moving_reference())
        if self.worker.keeper is not None:
            self.worker.keeper.restore({}, state["kl"])
        return state

    def _moving_reference(self) -> ParallelModel | None:
        return self.part.reference if self.worker.config.algorithm.kl.reset_every else None
