"""A learner over ranks on this machine, seen from the process that runs the loop.

The model of this process lies in shared memory. Ranks write the weights of a new version straight into it, each its own
pieces, and rollout reads them there. Batches and metrics go through pipes; weights, gradients and optimizer never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.batch import Batch, Column
from tidemill.cluster.start.ranks import Ranks
from tidemill.device import determinism, host
from tidemill.errors import ConfigError
from tidemill.flow.handover import LearningState, optimizer_tensors
from tidemill.learn.parallel.build import RankPlace
from tidemill.learn.parallel.build import critic as build_critic
from tidemill.learn.parallel.build import learner as build_learner
from tidemill.learn.parallel.build import reference as build_reference
from tidemill.learn.parallel.checkpoint import open_checkpoint
from tidemill.learn.parallel.learner import ParallelLearner
from tidemill.models import routing
from tidemill.models.buffers import carried
from tidemill.recipe.config import Config

RANKS_OWN = (
    "model.",
    "adapter.",
    "ema.",
    "averaged.",
    "optimizer.",
    "critic.",
    "routers.",
    "rng",
)  # tensors of a checkpoint that ranks write and read
PATIENCE_S = 86_400.0  # a step may take long: ranks watch each other, and a dead one is seen at once


class RankedLearner:
    """As `learn.engine.Learner`; every call runs on all ranks."""

    def __init__(self, model: Any, config: Config, updates: int, path: Path | None) -> None:
        self.model, self.config, self.path = model, config, path
        parallel, kind = config.learn.parallel, next(model.parameters()).device.type
        check_here(parallel.ranks, kind)
        threads = max(1, (config.threads or host.cores()) // parallel.ranks)
        self.ranks = Ranks(
            parallel.ranks,
            kind=kind,
            timeout_s=parallel.timeout_s,
            threads=threads,
            preload=["tidemill.cluster.start.ranked"],
        )
        self.version, self.skipped = 0, 0
        routing.make_room(model, config.learn.moe)
        self.shared = shared_tensors(model)
        try:
            self._call(_start, config, updates, path, self.shared, kind)
        except BaseException:
            self.ranks.close()
            raise

    def _call(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks.call(work, *args, wait_s=PATIENCE_S)

    def logprobs(self, batch: Batch) -> Column:
        found: Column = self._call(_logprobs, batch)[0]
        return found

    def accumulate(self, batch: Batch) -> None:
        self._call(_accumulate, batch)

    def update(self) -> dict[str, float]:
        metrics: dict[str, float] = self._call(_update)[0]
        self.version += 1
        return metrics

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights of this process are their running mean, where one is kept."""
        if not self.config.learn.ema:
            yield
            return
        self._call(_average)
        try:
            self.publish()
            yield
        finally:
            self._call(_average_no_more)
            self.publish()

    def publish(self) -> None:
        """The model of this process is as the ranks' weights are now."""
        self._call(_publish)
        bring_over(self.model, self.shared)

    def out(self) -> int:
        """The optimizers' state leaves the ranks' devices, for rollout to work; how many bytes."""
        return sum(self._call(_out))

    def back(self) -> None:
        self._call(_back)

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], more: Mapping[str, Tensor], wait: bool, **marks: Any
    ) -> None:
        """Begin a checkpoint, `more` tensors included; with `wait`, come back when it is on disk."""
        self._call(_save, folder, step, dict(state), dict(more), wait, marks)

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Take up a checkpoint on all ranks; gives what is not theirs of it."""
        self.version, self.skipped = self._call(_load, path)[0]
        source, state = open_checkpoint(path)
        with source:
            return {name: source.read(name) for name in source.pieces if not name.startswith(RANKS_OWN)}, state

    def reference(self, path: Path | None) -> RankedReference:
        """The frozen policy on the same ranks."""
        self._call(_start_reference, self.config, path)
        return RankedReference(self.ranks)

    def critic(self, updates: int) -> RankedCritic:
        """A value model on the same ranks. It is saved and loaded with the learner."""
        self._call(_start_critic, self.config, updates, self.path)
        return RankedCritic(self.ranks)

    def close(self) -> None:
        try:
            if self.ranks.is_alive:
                self._call(_close)
        finally:
            self.ranks.close()


class RankedReference:
    """Scores samples under weights that never change."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def logprobs(self, batch: Batch) -> Column:
        found: Column = self.ranks.call(_reference_logprobs, batch, wait_s=PATIENCE_S)[0]
        return found


class RankedCritic:
    """As `learn.critic.ValueLearner`; every call runs on all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.version, self.skipped = ranks, 0, 0

    def values(self, batch: Batch) -> Column:
        found: Column = self.ranks.call(_values, batch, wait_s=PATIENCE_S)[0]
        return found

    def accumulate(self, batch: Batch) -> None:
        self.ranks.call(_accumulate, batch, "critic", wait_s=PATIENCE_S)

    def update(self) -> dict[str, float]:
        metrics: dict[str, float] = self.ranks.call(_update, "critic", wait_s=PATIENCE_S)[0]
        self.version, self.skipped = self.version + 1, int(metrics["skipped_updates"])
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors are the ranks' to write."""
        return {}, {"version": self.version, "skipped": self.skipped}

    def restore(self, _: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.version, self.skipped = int(state["version"]), int(state["skipped"])


def check_here(ranks: int, kind: str) -> None:
    """One rank a device; on processor cores as many as are asked for."""
    if kind != "cpu" and ranks > (count := torch.accelerator.device_count()):
        raise ConfigError(
            f"learn.parallel asks for {ranks} ranks, but this machine has {count} devices",
            f"sizes whose product is at most {count} would do, or device=cpu to try the layout on processor cores",
        )


def shared_tensors(model: Any) -> dict[str, Tensor]:
    """Where ranks write the weights: the model itself on a processor, a copy in the host's memory beside a device."""
    if next(model.parameters()).device.type == "cpu":
        model.share_memory()
        return carried(model)
    return {n: torch.empty_like(p, device="cpu").share_memory_() for n, p in carried(model).items()}  # type: ignore[no-untyped-call]


@torch.no_grad()
def bring_over(model: Any, shared: Mapping[str, Tensor]) -> None:
    """From the host's memory to the device, where they are not the same."""
    for name, p in carried(model).items():
        if p.device.type != "cpu":
            p.copy_(shared[name], non_blocking=True)


# On the ranks: each process has one learner

_held: dict[str, Any] = {}


def _learner() -> ParallelLearner:
    found: ParallelLearner = _held["learner"]
    return found


def _start(config: Config, updates: int, path: Path | None, shared: dict[str, Tensor], kind: str) -> None:
    place = RankPlace(kind, torch.device("cpu") if kind == "cpu" else torch.device(kind, dist.get_rank()))
    if kind != "cpu":
        torch.accelerator.set_device_index(dist.get_rank())
    if config.deterministic:
        determinism.demand()
    _held.update(learner=build_learner(config, updates, path, place), shared=shared, place=place)


def _logprobs(batch: Batch) -> Column | None:
    found = _learner().logprobs(batch)
    return found if dist.get_rank() == 0 else None


def _start_reference(config: Config, path: Path | None) -> None:
    _held["reference"] = build_reference(config, path, _held["place"])


def _reference_logprobs(batch: Batch) -> Column | None:
    found: Column = _held["reference"].logprobs(batch)
    return found if dist.get_rank() == 0 else None


def _start_critic(config: Config, updates: int, path: Path | None) -> None:
    _held["critic"] = build_critic(config, updates, path, _held["place"])


def _values(batch: Batch) -> Column | None:
    found: Column = _held["critic"].values(batch)
    return found if dist.get_rank() == 0 else None


def _accumulate(batch: Batch, role: str = "learner") -> None:
    _held[role].accumulate(batch)


def _update(role: str = "learner") -> dict[str, float]:
    metrics: dict[str, float] = _held[role].update()
    return metrics


def _publish() -> None:
    learner, rank = _learner(), dist.get_rank()
    layout, own = learner.layout(), learner.tensors()
    with torch.no_grad():
        for name, target in _held["shared"].items():
            for piece in layout.pieces(name) if name in layout.by_name else ():
                if piece.rank == rank:
                    target[tuple(slice(*b) for b in piece.box)] = own[f"model.{name}"]
    dist.barrier()


def _out() -> int:
    away: LearningState = _held.setdefault("away", LearningState(_held["place"].device, _optimizers))
    return away.out()


def _back() -> None:
    _held["away"].back()


def _optimizers() -> list[Tensor]:
    kind = _held["place"].kind
    roles = [_held[role] for role in ("learner", "critic") if role in _held]
    return [t for role in roles for t in optimizer_tensors(role.optimizer) if t.device.type == kind]


def _average() -> None:
    _held["averaged"] = stack = ExitStack()
    stack.enter_context(_learner().averaged())


def _average_no_more() -> None:
    _held.pop("averaged").close()


def _save(
    folder: Path, step: int, state: dict[str, Any], more: dict[str, Tensor], wait: bool, marks: dict[str, Any]
) -> None:
    learner = _learner()
    learner.save(folder, step, state, more=more, critic=_held.get("critic"), **marks)
    if wait:
        learner.saver.wait()


def _load(path: Path) -> tuple[int, int]:
    learner = _learner()
    learner.load(path, _held.get("critic"))
    return learner.version, learner.skipped


def _close() -> None:
    for role in ("learner", "reference", "critic"):
        if role in _held:
            _held.pop(role).close()
