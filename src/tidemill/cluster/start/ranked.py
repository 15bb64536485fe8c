"""A learner over ranks of this machine, as seen by the process that runs the loop. This process's model lies in shared
memory. Ranks write the weights of a new version straight into it, each its own pieces, and rollout reads them there.
Batches and metrics go through pipes; weights, gradients and optimizer never do."""

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
from tidemill.flow.handover import Leaving
from tidemill.learn import build
from tidemill.learn.notes import Noted
from tidemill.models.buffers import carried
from tidemill.models.mixture import routing
from tidemill.recipe.config import Config

PATIENCE_S = 86_400.0  # a step may take long: ranks watch each other, and a dead one is noticed at once
LEARNER, CRITIC, REFERENCE = "learner", "critic", "reference"
BUILD = {LEARNER: build.learner, CRITIC: build.critic}


class RankedRole:
    """A model over all ranks, with the interface of `learn.engine.Learner`: every call runs on all of them."""

    def __init__(self, ranks: Ranks, role: str) -> None:
        self.ranks, self.role = ranks, role
        self.version, self.skipped = 0, 0

    def _call(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks.call(work, *args, wait_s=PATIENCE_S)

    def logprobs(self, batch: Batch) -> Column:
        found: Column = self._call(_logprobs, self.role, batch)[0]
        return found

    def accumulate(self, batch: Batch) -> None:
        self._call(_accumulate, self.role, batch)

    def update(self) -> dict[str, float]:
        metrics: dict[str, float] = self._call(_update, self.role)[0]
        self.version, self.skipped = self.version + 1, int(metrics["skipped_updates"])
        return metrics

    def held(self) -> list[Tensor]:
        """Return nothing: ranks swap their own tensors."""
        return []


class RankedLearner(RankedRole):
    """Starts the ranks, and publishes their weights in this process's `model`."""

    show: Any = None  # ranks only have pieces of what a dump would show

    def __init__(self, model: Any, config: Config, updates: int, path: Path | None) -> None:
        self.model, self.path, self._config = model, path, config
        parallel, kind = config.learn.parallel, next(model.parameters()).device.type
        check_here(parallel.ranks, kind)
        threads = max(1, (config.threads or host.cores()) // parallel.ranks)
        preload = ["tidemill.cluster.start.ranked"]
        super().__init__(
            Ranks(parallel.ranks, kind=kind, timeout_s=parallel.timeout_s, threads=threads, preload=preload), LEARNER
        )
        routing.make_room(model, config.learn.moe)
        self.shared = shared_tensors(model)
        try:
            self._call(_join, config, self.shared, kind)
            self._call(_start, LEARNER, config, updates, path)
        except BaseException:
            self.ranks.close()
            raise

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        """Give the ranks a changed config."""
        self._config = config
        self._call(_configure, config)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the context, this process's weights are their running mean, where one is kept."""
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

    def noted(self, shown: list[int]) -> list[Noted]:
        """Collect what the ranks noted; those with the same samples noted the same."""
        found = {record["id"]: (record, images) for own in self._call(_noted, shown) for record, images in own}
        return [found[id] for id in sorted(found)]

    def publish(self) -> None:
        """Write the ranks' current weights into this process's model."""
        self._call(_publish)
        bring_over(self.model, self.shared)

    def out(self) -> int:
        """Move what learning holds off the ranks' devices for rollout; return the bytes."""
        return sum(self._call(_out))

    def back(self) -> None:
        self._call(_back)

    def save(
        self, folder: Path, step: int, state: Mapping[str, Any], *, keep: int, best: bool = False,
        metric: float | None = None, more: Mapping[str, Tensor] | None = None, critic: Any = None, wait: bool = False,
    ) -> None:  # fmt: skip
        """Save like `learn.engine.Learner.save`. The critic is the ranks' own."""
        marks = {"keep": keep, "best": best, "metric": metric, "more": more, "wait": wait}
        self._call(_save, folder, step, dict(state), marks)

    def load(self, path: Path, critic: RankedRole | None = None) -> dict[str, Any]:
        """Load a checkpoint on all ranks, with a critic's part of it; return its state."""
        state: dict[str, Any] = self._call(_load, path)[0]
        for role, own in ((self, state["learner"]), (critic, state.get("critic"))):
            if role is not None and own is not None:
                role.version, role.skipped = int(own["version"]), int(own["skipped"])
        return state

    def settle(self) -> None:
        self._call(_settle)

    def reference(self, path: Path | None) -> RankedRole:
        """Make the frozen policy on the same ranks."""
        self._call(_start_reference, self.config, path)
        return RankedRole(self.ranks, REFERENCE)

    def critic(self, updates: int) -> RankedRole:
        """Make a value model on the same ranks. It is saved and loaded with the learner."""
        self._call(_start, CRITIC, self.config, updates, self.path)
        return RankedRole(self.ranks, CRITIC)

    def close(self) -> None:
        try:
            if self.ranks.is_alive:
                self._call(_close)
        finally:
            self.ranks.close()


def check_here(ranks: int, kind: str) -> None:
    """Choose devices: one rank per device; on CPU cores, as many ranks as are asked for."""
    if kind != "cpu" and ranks > (count := torch.accelerator.device_count()):
        raise ConfigError(
            f"learn.parallel asks for {ranks} ranks, but this machine has {count} devices",
            f"sizes whose product is at most {count} would do, or device=cpu to try the layout on processor cores",
        )


def shared_tensors(model: Any) -> dict[str, Tensor]:
    """Return the memory into which ranks write the weights: the model itself on a CPU, a host copy beside a device."""
    if next(model.parameters()).device.type == "cpu":
        model.share_memory()
        return carried(model)
    return {n: torch.empty_like(p, device="cpu").share_memory_() for n, p in carried(model).items()}  # type: ignore[no-untyped-call]


@torch.no_grad()
def bring_over(model: Any, shared: Mapping[str, Tensor]) -> None:
    """Copy the weights from host memory to the device, where they are not the same."""
    for name, p in carried(model).items():
        if p.device.type != "cpu":
            p.copy_(shared[name], non_blocking=True)


# On the ranks: each process has one model of each role

_held: dict[str, Any] = {}


def _join(config: Config, shared: dict[str, Tensor], kind: str) -> None:
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, dist.get_rank())
    if kind != "cpu":
        torch.accelerator.set_device_index(dist.get_rank())
    if config.deterministic:
        determinism.demand()
    _held.update(shared=shared, place=build.RankPlace(kind, device))


def _start(role: str, config: Config, updates: int, path: Path | None) -> None:
    _held[role] = BUILD[role](config, updates, path, _held["place"])


def _start_reference(config: Config, path: Path | None) -> None:
    _held[REFERENCE] = build.reference(config, path, _held["place"])


def _configure(config: Config) -> None:
    _held[LEARNER].config = config


def _logprobs(role: str, batch: Batch) -> Column | None:
    found: Column = _held[role].logprobs(batch)
    return found if dist.get_rank() == 0 else None


def _accumulate(role: str, batch: Batch) -> None:
    _held[role].accumulate(batch)


def _update(role: str) -> dict[str, float]:
    metrics: dict[str, float] = _held[role].update()
    return metrics


def _noted(shown: list[int]) -> list[Noted]:
    found: list[Noted] = _held[LEARNER].noted(shown)
    return found


def _publish() -> None:
    _back()
    learner, rank = _held[LEARNER], dist.get_rank()
    layout, own = learner.layout(), learner.pieces()
    with torch.no_grad():
        for name, target in _held["shared"].items():
            for piece in layout.pieces(name) if name in layout.by_name else ():
                if piece.rank == rank:
                    target[tuple(slice(*b) for b in piece.box)] = own[name]
    dist.barrier()


def _out() -> int:
    away: Leaving = _held.setdefault("away", Leaving(_held["place"].device, _learning_tensors))
    return away.out()


def _back() -> None:
    if "away" in _held and _held["away"].swap.is_out:
        _held["away"].back()


def _learning_tensors() -> list[Tensor]:
    kind = _held["place"].kind
    roles = [_held[role] for role in (LEARNER, CRITIC, REFERENCE) if role in _held]
    return [t for role in roles for t in role.held() if t.device.type == kind]


def _average() -> None:
    _held["averaged"] = stack = ExitStack()
    stack.enter_context(_held[LEARNER].averaged())


def _average_no_more() -> None:
    _held.pop("averaged").close()


def _save(folder: Path, step: int, state: dict[str, Any], marks: dict[str, Any]) -> None:
    _held[LEARNER].save(folder, step, state, critic=_held.get(CRITIC), **marks)


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = _held[LEARNER].load(path, _held.get(CRITIC))
    return state


def _settle() -> None:
    _held[LEARNER].settle()


def _close() -> None:
    for role in (LEARNER, REFERENCE, CRITIC):
        if role in _held:
            _held.pop(role).close()
