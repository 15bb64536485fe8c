"""Search for the layout that suits a cluster: placement, parallel sizes of learner and rollout, micro-batch, cache and
concurrency, within the memory that is there.

Rollout and learning are timed apart and put together, so that a thousand layouts cost what some dozens of each do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from tidemill.check.parallel import engine_problems, size_problems
from tidemill.errors import ConfigError
from tidemill.estimate.memory import memory
from tidemill.estimate.ranks_memory import engine_share, per_rank
from tidemill.estimate.run import cache_tokens, longest, samples_per_step
from tidemill.models.shape import ModelShape
from tidemill.plan import step_estimate
from tidemill.plan.decoding import Drained
from tidemill.plan.lengths import Lengths
from tidemill.plan.step_estimate import StepEstimate
from tidemill.plan.time_model import TimeModel
from tidemill.recipe.config import Config, ParallelSettings
from tidemill.recipe.ranks import divisors
from tidemill.rollout.native.ranks.grid import Grid

Goal = Literal["throughput", "cost", "deadline"]
FITS = 0.9  # of a device's memory: graphs, workspaces and fragments take the rest
REPLICAS = (1, 2, 8, 32)  # of a mixture's engine
SAME = 0.02  # candidates nearer than this take equally long: the one that asks for less goes first


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be chosen. Sizes of ranks follow from the cluster."""

    micro: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768, 65_536)
    at_once: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    placements: tuple[str, ...] = ("colocated", "separated")
    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2, 4, 8, 16)
    cp: tuple[int, ...] = (1, 2, 4)
    most: int = 40_000  # layouts looked at


@dataclass(frozen=True, slots=True)
class Candidate:
    config: Config
    step: StepEstimate
    learner_bytes: float  # of the fullest device; where rollout shares it, with rollout's part
    rollout_bytes: float
    dollars: float  # of the whole run
    kwh: float
    why: tuple[str, ...] = ()

    @property
    def hours(self) -> float:
        return self.step.seconds * self.config.train.steps / 3600

    @property
    def placement(self) -> str:
        c = self.config
        if c.cluster.executor == "local":
            return "one device" if not c.flow.is_separated else "one process, rollout apart"
        return c.cluster.placement.rollout

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of less first: ranks that talk to one another."""
        p = self.config.learn.parallel
        return (p.pp, p.tp, p.cp, p.ep, self.config.rollout.ranks, self.config.train.tokens_per_microbatch)


@dataclass(slots=True)
class Found:
    best: list[Candidate]
    as_written: Candidate | None  # the recipe's own layout, if the cluster can hold it
    looked_at: int
    too_large: int  # layouts that do not fit in memory
    nearest: str = ""  # of those, what the smallest would need


class Search:
    def __init__(self, model: TimeModel, lengths: Lengths, choices: Choices | None = None) -> None:
        self.model, self.lengths, self.choices = model, lengths, choices or Choices()
        self.own = step_estimate.drawn(model.config, lengths)
        self._rollouts: dict[Any, Drained] = {}
        self._learned: dict[Any, dict[str, float]] = {}
        self.too_large = 0
        self._least = float("inf")

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def run(self, goal: Goal = "throughput", keep: int = 5, hours: float | None = None) -> Found:
        """`hours`: with the goal deadline, how long the run may take."""
        found: list[Candidate] = []
        looked = 0
        for config in self.layouts(goal):
            looked += 1
            if looked > self.choices.most:
                break
            candidate = self.candidate(config)
            if candidate is not None:
                found.append(candidate)
        order = _ordered(found, goal, hours)
        written = None
        if self._is_there(self.model.config):
            written = self.candidate(self.model.config)
        nearest = f"{self._least / 1e9:.0f} GB" if self._least < float("inf") else ""
        best = [replace(c, why=tuple(_reasons(c, order, goal))) for c in order[:keep]]
        return Found(best, written, looked, self.too_large, nearest)

    def _is_there(self, config: Config) -> bool:
        return self.model.again(config).devices <= self.model.machines.devices

    # Layouts

    def layouts(self, goal: Goal) -> Iterator[Config]:
        whole = self.model.machines.devices
        counts = [whole] if goal == "throughput" else [n for n in (whole, *_halves(whole)) if n]
        for count in counts:
            if count == 1:
                yield from self._local()
                continue
            for placement in self.choices.placements:
                yield from self._colocated(count) if placement == "colocated" else self._separated(count)

    def _local(self) -> Iterator[Config]:
        """One device: one process does everything."""
        base = _with(
            self.model.config, cluster={"executor": "local"}, rollout=_sizes(Grid()), parallel=ParallelSettings()
        )
        yield from self._works(base, list(self._at_once(base, 1)))

    def _colocated(self, count: int) -> Iterator[Config]:
        if self.model.config.flow.schedule == "async":
            return  # rollout that is ahead works beside learning
        for parallel in self._parallel(count):
            for grid in self._grids(count):
                base = _with(
                    self.model.config,
                    cluster=self._cluster(count, 1, "colocated"),
                    rollout=_sizes(grid),
                    parallel=parallel,
                    flow={"schedule": "sync"},
                )
                yield from self._works(base, self._at_once(base, count // grid.ranks))

    def _separated(self, count: int) -> Iterator[Config]:
        schedules = ("async",) if self.model.config.flow.schedule == "async" else ("streamed", "sync")
        for learners in _splits(count, self.model.machines.per_node):
            for grid in self._grids(count - learners):
                engines = (count - learners) // grid.ranks
                for parallel, schedule in product(self._parallel(learners), schedules):
                    base = _with(
                        self.model.config,
                        cluster=self._cluster(learners, engines, "separated"),
                        rollout=_sizes(grid),
                        parallel=parallel,
                        flow={"schedule": schedule},
                    )
                    yield from self._works(base, self._at_once(base, engines))

    def _cluster(self, learners: int, engines: int, placement: str) -> dict[str, Any]:
        before = self.model.config.cluster
        fits = self.model.machines.devices <= self.model.machines.per_node and before.executor != "ray"
        placements = before.placement.model_copy(update={"rollout": placement})
        return {
            "executor": "processes" if fits else "ray",
            "learners": 1,
            "rollouts": engines,
            "placement": placements,
        }

    def _works(self, base: Config, at_once: Sequence[int]) -> Iterator[Config]:
        """Micro-batches, recompute and concurrency of one layout."""
        micros = self._micros(base)
        known = base.learn.recompute
        recomputes = [
            r for r in self.choices.recompute if r in ("none", "full") or r == known or not self.shape.experts
        ]
        for micro, recompute, rows in product(micros, recomputes, at_once):
            yield _with(
                base,
                train={"tokens_per_microbatch": micro},
                learn={"recompute": recompute},
                rollout={"concurrent": rows},
            )

    def _micros(self, base: Config) -> list[int]:
        """Budgets that make a difference: the largest is the first that takes all that one team has."""
        p = base.learn.parallel
        teams = max(1, p.replicate * p.fsdp)
        whole = sum(prompt + sum(made) for prompt, made in self.own) / teams / base.train.updates_per_step / p.cp
        found = []
        for micro in sorted(self.choices.micro):
            found.append(micro)
            if micro > whole:
                break
        return found

    def _at_once(self, base: Config, engines: int) -> list[int]:
        most = -(-samples_per_step(base) // max(1, engines)) * (2 if base.flow.schedule == "async" else 1)
        found = [n for n in self.choices.at_once if n < most]
        larger = [n for n in self.choices.at_once if n >= most]
        return [*found, *larger[:1]]

    def _parallel(self, ranks: int) -> list[ParallelSettings]:
        """Cuts of a learner over so many ranks, those that the model allows."""
        node = self.model.machines.per_node
        found = []
        long = longest(self.model.config) > 16_384
        eps = [n for n in divisors(self.shape.experts) if n <= 64] if self.shape.experts else [1]
        for tp, pp, cp in product(self.choices.tp, self.choices.pp, self.choices.cp if long else (1,)):
            inner = tp * pp * cp
            if tp > node or ranks % inner:
                continue
            shards = ranks // inner
            for fsdp in {shards, _inside(shards, node // tp)}:
                for ep in eps:
                    if (fsdp * cp) % ep or (ep == 1 and len(eps) > 1 and fsdp * cp >= 8 and self.shape.experts > 32):
                        continue
                    made = ParallelSettings(replicate=shards // fsdp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep)
                    if not any(size_problems(made, self.shape)):
                        found.append(made)
        return found

    def _grids(self, devices: int) -> list[Grid]:
        """Engines that the model allows: ranks of a node share a layer, and replicas of a mixture its experts."""
        node = self.model.machines.per_node
        grids = (Grid(tp, dp) for tp in self.choices.tp for dp in (REPLICAS if self.shape.experts else (1,)))
        return [
            grid
            for grid in grids
            if grid.tp <= node
            and devices % grid.ranks == 0
            and (grid.ranks == 1 or not any(engine_problems(grid, self.shape)))
        ]

    # One of them

    def candidate(self, config: Config) -> Candidate | None:
        """Time and memory of a layout; None where a device has not so much memory."""
        model = self.model.again(config)
        have = FITS * model.machines.sheet.memory_bytes
        fitted = self._fitted(model, have)
        if fitted is None:
            self.too_large += 1
            return None
        config, learner_bytes, rollout_bytes = fitted
        model = self.model.again(config)
        step = self._timed(model)
        sheet, seconds = model.machines.sheet, step.seconds * config.train.steps
        devices = model.devices
        return Candidate(
            config,
            step,
            learner_bytes,
            rollout_bytes,
            dollars=devices * sheet.price_per_hour * seconds / 3600,
            kwh=devices * seconds / 3.6e6 * (sheet.idle_watts + (sheet.watts - sheet.idle_watts) * step.busy),
        )

    def _timed(self, model: TimeModel) -> StepEstimate:
        c = model.config
        engine = (model.engines, model.engine_grid, c.rollout.concurrent, c.rollout.cache_tokens, c.flow.schedule)
        if engine not in self._rollouts:
            self._rollouts[engine] = step_estimate.rollout_of(model, self.own)
        learner = (c.learn.parallel, model.learners, c.train.tokens_per_microbatch, c.learn.recompute)
        if learner not in self._learned:
            self._learned[learner] = step_estimate.learning_parts(model, self.own)
        return step_estimate.put_together(model, self.own, self._rollouts[engine], self._learned[learner])

    def _fitted(self, model: TimeModel, have: float) -> tuple[Config, float, float] | None:
        """With a cache as large as concurrency asks for, or as what is left of the memory allows."""
        config = model.config
        learner, engine, token = held_bytes(model)
        wanted = cache_tokens(config)
        shares = model.is_colocated
        room = (have - (learner + engine if shares else engine)) / token
        least = 2 * longest(config)
        self._least = min(self._least, max(learner + (engine + least * token if shares else 0), engine))
        if learner > have or room < min(wanted, least):
            return None
        if room < wanted:
            if config.rollout.concurrent > 2 * room / longest(config):
                return None  # another layout with fewer at once is as good
            wanted = int(room) // 64 * 64
            config = _with(config, rollout={"cache_tokens": wanted})
        cache = wanted * token
        return (config, learner + engine + cache, 0.0) if shares else (config, learner, engine + cache)


def held_bytes(model: TimeModel) -> tuple[float, float, float]:
    """Bytes of the fullest learner's device without rollout, of an engine's without its cache, of one token there."""
    config, shape = model.config, model.shape
    is_device = model.machines.sheet.kind != "cpu"
    grid = model.engine_grid
    copy, cache = engine_share(config, shape, grid)
    token = cache / cache_tokens(config)
    if config.rollout.cache_dtype != "auto":
        token /= model.width
    if config.learn.parallel.ranks > 1:
        learner: float = per_rank(config, shape, on_accelerator=is_device).total
    else:
        needed = memory(config, shape, shape.total, on_accelerator=is_device)
        assert needed is not None
        learner = needed.total - needed.cache - needed.copies
    shares_tensors = model.is_colocated and config.learn.parallel.ranks == 1
    copies = 0 if shares_tensors else 2 if config.flow.schedule == "async" else 1
    work = 64e6 + config.rollout.concurrent * shape.vocabulary / grid.stage * 6
    return learner, copies * copy + work, token


def _sizes(grid: Grid) -> dict[str, int]:
    return {"tp": grid.tp, "dp": grid.dp, "pp": grid.pp}


def _with(config: Config, parallel: ParallelSettings | None = None, **sections: dict[str, Any]) -> Config:
    made: dict[str, Any] = {}
    if parallel is not None:
        sections["learn"] = {**sections.get("learn", {}), "parallel": parallel}
    for name, update in sections.items():
        made[name] = getattr(config, name).model_copy(update=update)
    return config.model_copy(update=made)


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


def _splits(count: int, node: int) -> list[int]:
    """How many of the devices may learn: whole nodes where there are several, else powers of two and their rest."""
    if count > 2 * node:
        nodes = count // node
        shares = sorted({max(1, round(nodes * share)) for share in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)})
        return [n * node for n in shares if n < nodes]
    found = {n for n in (1, 2, 4, 6, 8, 12) if n < count} | {count // 2}
    return sorted(n for n in found if 0 < n < count)


def _inside(shards: int, room: int) -> int:
    """The largest part of the shards that one node holds."""
    return max(n for n in divisors(shards) if n <= max(1, room))


def _ordered(found: list[Candidate], goal: Goal, hours: float | None) -> list[Candidate]:
    """The best first; of those that come to nearly the same, the one that asks for less."""
    if goal == "deadline":
        if hours is None:
            raise ConfigError("the goal deadline needs the hours that a run may take", "for example 8")
        late = [c for c in found if c.hours > hours]
        found = [c for c in found if c.hours <= hours] or sorted(late, key=lambda c: c.hours)[:5]

    def worth(c: Candidate) -> float:
        return _worth(c, goal)

    found = sorted(found, key=lambda c: (worth(c), c.sizes))
    if not found:
        return []
    least = worth(found[0])
    near = [c for c in found if worth(c) <= least * (1 + SAME)]
    near.sort(key=lambda c: (c.sizes, worth(c)))
    return _distinct([*near, *found[len(near) :]])


def _distinct(order: list[Candidate]) -> list[Candidate]:
    """Of layouts that differ in micro-batch, recompute or concurrency alone, the best."""
    seen: set[Any] = set()
    first: list[Candidate] = []
    rest: list[Candidate] = []
    for c in order:
        p = c.config
        key = (p.learn.parallel, c.placement, p.cluster.rollouts, Grid.of(p.rollout), p.flow.schedule)
        (rest if key in seen else first).append(c)
        seen.add(key)
    return first + rest


SIDES: dict[str, Callable[[Candidate], object]] = {
    "placement": lambda c: c.placement,
    "schedule": lambda c: c.config.flow.schedule,
    "learner": lambda c: words_of(c.config.learn.parallel),
    "engine": lambda c: str(Grid.of(c.config.rollout)),
    "micro-batch": lambda c: c.config.train.tokens_per_microbatch,
    "recompute": lambda c: c.config.learn.recompute,
    "at once": lambda c: c.config.rollout.concurrent,
}


def _worth(c: Candidate, goal: Goal) -> float:
    return c.step.seconds if goal == "throughput" else c.dollars


def _reasons(best: Candidate, order: Sequence[Candidate], goal: Goal) -> Iterator[str]:
    """Say what the nearest other choice in each respect would come to."""
    what = "the time" if goal == "throughput" else "the cost"
    for name, of in SIDES.items():
        others = [c for c in order if of(c) != of(best)]
        if not others:
            continue
        other = min(others, key=lambda c: _worth(c, goal))
        ratio = _worth(other, goal) / max(1e-9, _worth(best, goal))
        yield f"{name} {of(best)}: the best with another, {of(other)}, takes {ratio:.2f} × {what}"


def words_of(p: ParallelSettings) -> str:
    sizes = {"replicate": p.replicate, "fsdp": p.fsdp, "tp": p.tp, "cp": p.cp, "pp": p.pp, "ep": p.ep}
    return " ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "1 rank"


def overrides(config: Config) -> dict[str, Any]:
    """What of a layout a recipe must say."""
    p, c = config.learn.parallel, config.cluster
    found: dict[str, Any] = {
        "cluster": {"executor": c.executor},
        "flow": {"schedule": config.flow.schedule},
        "learn": {"recompute": config.learn.recompute},
        "train": {"tokens_per_microbatch": config.train.tokens_per_microbatch},
        "rollout": {"concurrent": config.rollout.concurrent, **_sizes(Grid.of(config.rollout))},
    }
    if c.executor != "local":
        found["cluster"] |= {"rollouts": c.rollouts, "learners": 1, "placement": {"rollout": c.placement.rollout}}
        sizes = ("replicate", "fsdp", "tp", "cp", "ep", "pp")
        found["learn"]["parallel"] = {name: getattr(p, name) for name in sizes}
    if config.rollout.cache_tokens is not None:
        found["rollout"]["cache_tokens"] = config.rollout.cache_tokens
    return found
