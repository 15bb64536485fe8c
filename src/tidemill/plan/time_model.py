"""The model of time: seconds of every stage of a recipe on a described cluster, worked out without running anything.

Arithmetic by the roofline of a device and its calibration; exchanges by the topology's links. One object answers for
the estimate of a step, the search and the simulator, so that the three never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tidemill.algorithms.shared import registry
from tidemill.errors import ConfigError
from tidemill.estimate.memory import adapter_parameters, optimizer_bytes
from tidemill.estimate.ranks_memory import engine_share, parameters_per_rank
from tidemill.estimate.run import BYTES, cache_tokens
from tidemill.graph import Graph
from tidemill.models import published
from tidemill.models.shape import ModelShape, shape_of
from tidemill.plan import calibration as calibrations
from tidemill.plan import features, links
from tidemill.plan.calibration import Calibration
from tidemill.plan.features import Cut, Pass
from tidemill.plan.hardware import SHEETS, DeviceSheet, Machines
from tidemill.recipe.config import Config
from tidemill.recipe.load import model_of
from tidemill.rollout.native.ranks.grid import Grid

OVERLAP = 0.8  # share of the layers' arithmetic behind which weights are gathered and gradients reduced
REWARD_S = 0.00015  # of one sample, where the rewards are rules
SAMPLE_BYTES = 13  # of a token in the dock: itself, log-probability, version, mask
THREADS_GAIN = 0.8  # of each thread that computes beside others, until they are measured together
REMEMBERED = 4096  # prompts' reading times: groups of one length come again and again
REFERENCE_DEVICE = "H200"  # whose efficiencies other devices borrow


@dataclass(frozen=True, slots=True)
class Overheads:
    """What moving work between processes takes, by executor: measured on processes of one machine."""

    command_s: float = 0.0012  # the driver's word to a worker, and the answer
    dock_s: float = 0.0007  # one call of the dock
    publish_s: float = 0.01  # of a publish, whatever its size
    feed_s: float = 0.002  # of a step's rows
    row_s: float = 0.00002  # of each row that enters or is judged, on the host
    start_s: float = 5.0  # a worker that comes (back)


HERE = Overheads(0.00005, 0.0001, 0.001, 0.002, 0.00002, 0.0)


class TimeModel:
    """Of one recipe on one cluster."""

    def __init__(
        self,
        config: Config,
        machines: Machines,
        shape: ModelShape | None = None,
        made: Calibration | None = None,
        overheads: Overheads | None = None,
        reward_s: float = REWARD_S,
    ) -> None:
        self.config, self.machines, self.reward_s = config, machines, reward_s
        model = model_of(config)
        found = shape or shape_of(model) or published.shape_of(model)
        if found is None:
            raise ConfigError(
                "the recipe's model is not there yet, so its sizes are not known",
                "name one with model.path=FOLDER or a published name such as qwen2.5-7b",
            )
        self.shape = found
        is_local = config.cluster.executor == "local"
        threads = (config.threads or machines.cores or 1) if is_local and machines.sheet.kind == "cpu" else 1
        self._given = made
        self.made = made or calibration_for(machines.sheet, threads)
        self.width = BYTES[config.model.dtype]
        self.overheads = overheads or (HERE if is_local else Overheads())
        self._steps: dict[int, float] = {}
        self._prefills: dict[tuple[float, float, float], float] = {}

    def again(self, config: Config) -> TimeModel:
        """Keep machines, calibration and overheads under another recipe of the same model."""
        same = config.cluster.executor == self.config.cluster.executor
        return TimeModel(
            config, self.machines, self.shape, self._given, self.overheads if same else None, self.reward_s
        )

    def batch_s(self, tokens: float, rows: int, trains: bool) -> float | None:
        """Return the seconds of a batch where they were measured; None: the model works them out."""
        return None

    # Where

    @property
    def parallel(self) -> Cut:
        p = self.config.learn.parallel
        return Cut(tp=p.tp, pp=p.pp, ep=p.ep, cp=p.cp)

    @cached_property
    def engine_grid(self) -> Grid:
        return Grid() if self.config.cluster.executor == "local" else Grid.of(self.config.rollout)

    @property
    def engine_cut(self) -> Cut:
        """All layers are gone through one after the other, however many stages share them. `tp` ranks share each
        product, those of experts too; `ep` replicas share one set of experts."""
        grid = self.engine_grid
        return Cut(tp=grid.tp, ep=grid.joined if self.shape.experts else 1)

    @property
    def learners(self) -> int:
        c = self.config
        return 1 if c.cluster.executor == "local" else max(c.cluster.learners, c.learn.parallel.ranks)

    @property
    def teams(self) -> int:
        """Of learners, those that work on samples of their own."""
        p = self.config.learn.parallel
        return p.replicate * p.fsdp if p.ranks > 1 else self.learners

    @property
    def is_colocated(self) -> bool:
        c = self.config
        return not c.flow.is_separated if c.cluster.executor == "local" else c.cluster.placement.rollout == "colocated"

    @property
    def engines(self) -> int:
        c = self.config
        if c.cluster.executor == "local":
            return 1
        return max(1, self.learners // c.rollout.ranks) if self.is_colocated else c.cluster.rollouts

    @property
    def devices(self) -> int:
        """That the recipe's workers with models ask for."""
        return self.learners + (0 if self.is_colocated else self.engines * self.engine_grid.ranks)

    # Rollout

    def step_s(self, rows: int) -> float:
        """A decoding step, its rows shared out by replicas, without what reading the cache takes."""
        known = self._steps.get(rows)
        if known is None:
            each = -(-rows // self.engine_grid.dp)
            cost = features.decode(self.made, self.shape, each, 0.0, self.width, self.engine_cut)
            known = self._steps[rows] = self.made.seconds(cost) + self._engine_exchange_s(each)
        return known

    @cached_property
    def token_read_s(self) -> float:
        """Reading one token of the cache, all layers, in every step: each replica reads its share of the tokens."""
        width = 1 if self.config.rollout.cache_dtype != "auto" else self.width
        read = features.cache_bytes(self.shape, width, self.engine_cut.tp) / self.made.bytes_per_s
        return read * self.made.coefficients.get("decode.attention", 1.3) / self.engine_grid.dp

    def prefill_s(self, tokens: float, pairs: float, ends: float) -> float:
        """Reading so many prompt tokens, beside what else the engine does."""
        if tokens <= 0:
            return 0.0
        asked = tokens, pairs, ends
        if (known := self._prefills.get(asked)) is not None:
            return known
        if len(self._prefills) >= REMEMBERED:
            self._prefills.clear()
        found = self._prefills[asked] = self._prefill_s(*asked)
        return found

    def _prefill_s(self, tokens: float, pairs: float, ends: float) -> float:
        tokens, pairs, ends = (n / self.engine_grid.dp for n in (tokens, pairs, ends))
        cost = features.prefill(self.made, self.shape, tokens, pairs, ends, self.width, self.engine_cut)
        return self.made.seconds(cost) + self._engine_exchange_s(tokens)

    def _engine_exchange_s(self, tokens: float) -> float:
        """Of the ranks of one engine: two sums a layer, and rows to the experts of other replicas and back."""
        grid, topology = self.engine_grid, self.machines.topology
        size, spent = tokens * self.shape.hidden * self.width, 0.0
        if grid.tp > 1:
            spent += 2 * self.shape.layers * links.all_reduce_s(topology, range(grid.tp), size)
        if grid.joined > 1 and self.shape.experts:
            rows, ranks = size * self.shape.experts_per_token / grid.tp, range(0, grid.ep, grid.tp)
            spent += 2 * self.shape.moe_layers * links.all_to_all_s(topology, ranks, rows)
        return spent

    def cache_capacity(self) -> float:
        """Tokens that one engine's cache may hold."""
        return float(cache_tokens(self.config))

    # Learning

    def pass_s(self, work: Pass, exchanges: bool = True) -> float:
        """One micro-batch on one team's ranks."""
        alone = self.made.seconds(features.learn(self.made, self.shape, work, self.width, self.parallel))
        return self.with_exchanges(alone, work) if exchanges else alone

    def with_exchanges(self, alone: float, work: Pass) -> float:
        p, topology = self.config.learn.parallel, self.machines.topology
        if p.ranks == 1:
            return alone
        h, w, tokens = self.shape.hidden, self.width, work.tokens / p.cp
        times = 2 if work.trains else 1
        layers = self.shape.layers / p.pp
        spent = alone
        if p.tp > 1:  # two blocks a layer, in and out
            size = tokens * h * w
            spent += times * 4 * layers * links.all_gather_s(topology, self.ranks_of("tp"), size)
        if p.cp > 1:
            heads = 2 * self.shape.heads + 2 * self.shape.kv_heads
            size = tokens / p.cp * w * heads * self.shape.head_dim / p.tp
            spent += times * layers * links.all_to_all_s(topology, self.ranks_of("cp"), size)
        if p.ep > 1 and self.shape.experts:
            size = tokens * self.shape.experts_per_token * h * w
            spent += times * 2 * self.shape.moe_layers / p.pp * links.all_to_all_s(topology, self.ranks_of("ep"), size)
        if p.fsdp * p.cp > 1:
            spent += max(0.0, self._gather_s(work.trains) - OVERLAP * alone)
        return spent

    def _gather_s(self, trains: bool) -> float:
        """Weights gathered for one pass, and gradients reduced after it."""
        p, topology = self.config.learn.parallel, self.machines.topology
        experts = self.shape.moe_layers * self.shape.expert_parameters
        held = (self.shape.total - experts) / (p.tp * p.pp) + experts / (p.tp * p.pp * p.ep)
        reduce = {"same": self.width, "float32": 4, "bfloat16": 2}[self.config.learn.reduce_dtype]
        size = held * (self.width * (2 + 0) + reduce if trains else self.width)
        return links.all_gather_s(topology, self.ranks_of("fsdp"), size)

    def ranks_of(self, name: str) -> list[int]:
        """The ranks of the group that rank 0 is in: pp outermost, tp innermost."""
        p = self.config.learn.parallel
        stride = {
            "tp": 1,
            "cp": p.tp,
            "fsdp": p.tp,
            "ep": p.tp,
            "replicate": p.tp * p.cp * p.fsdp,
            "pp": self.learners // p.pp,
        }
        count = {"tp": p.tp, "cp": p.cp, "fsdp": p.fsdp * p.cp, "ep": p.ep, "replicate": p.replicate, "pp": p.pp}
        last = self.machines.devices - 1
        return [min(last, i * stride[name]) for i in range(count[name])]

    def passes(self, prompts: Sequence[float], responses: Sequence[Sequence[float]], trains: bool = True) -> list[Pass]:
        """How one team cuts its groups into micro-batches: as even as they come, none above the budget."""
        if not prompts:
            return []
        whole = features.pass_of(self.config, prompts, responses)
        budget = self.config.train.tokens_per_microbatch * self.config.learn.parallel.cp
        number = max(1, math.ceil(whole.tokens / budget - 1e-9))
        part = replace(
            whole,
            tokens=whole.tokens / number,
            targets=whole.targets / number,
            pairs=whole.pairs / number,
            shared=whole.shared / number,
            trains=trains,
        )
        return [part] * number

    def team_s(self, work: Sequence[Pass]) -> float:
        """Of one team's micro-batches, pipeline bubbles included."""
        if not work:
            return 0.0
        p = self.config.learn.parallel
        each = self.pass_s(work[0])
        bubble = (p.pp - 1) / (p.pp_chunks if p.pp_schedule == "interleaved" else 1)
        hand_on = 0.0
        if p.pp > 1:
            size = work[0].tokens * self.shape.hidden * self.width / p.tp
            hand_on = 2 * links.message_s(self.machines.topology, self.ranks_of("pp"), size)
        return (len(work) + bubble) * each + hand_on * (len(work) + p.pp)

    @cached_property
    def update_s(self) -> float:
        """The optimizer's step, and gradients of copies added up."""
        c, p = self.config, self.config.learn.parallel
        adapters = adapter_parameters(self.shape, c.learn)
        held = adapters / max(1, p.fsdp * p.cp * p.pp) if adapters else parameters_per_rank(self.shape, p)
        state = optimizer_bytes(c.learn, self.width)
        each = 3 * self.width + 2 * state
        on_host = 2 * state * held if c.learn.optimizer_on_host else 0.0
        cost = features.update(self.made, held, each, on_host, self.machines.sheet.host_bytes_per_s)
        copies = max(p.replicate, self.learners if p.ranks == 1 else 1)
        exchange = 0.0
        if copies > 1:
            reduce = {"same": self.width, "float32": 4, "bfloat16": 2}[c.learn.reduce_dtype]
            ranks = self.ranks_of("replicate") if p.ranks > 1 else list(range(min(copies, self.machines.devices)))
            exchange = links.all_reduce_s(self.machines.topology, ranks, held * reduce)
        return self.made.seconds(cost) + exchange

    # Weights, samples, rewards

    @cached_property
    def publish_s(self) -> float:
        """From the learners' layout to the engines': what the busiest device receives, and what leaves the sources."""
        if self.is_colocated and self.config.learn.parallel.ranks == 1:
            return self.overheads.publish_s / 10
        share, _ = engine_share(self.config, self.shape, self.engine_grid)
        whole = self.shape.total * self.width
        topology = self.machines.topology
        node = topology.levels[0] if topology.levels[-1].name == "node" else topology.levels[-1]
        inner = topology.levels[0].link
        spans = self.devices > self.machines.per_node
        per_node = min(self.machines.per_node, max(1, self.engines * self.engine_grid.ranks))
        received = share / (inner.gb_per_s * 1e9)
        if spans:  # each node fetches every byte once, over all of its devices' links
            received += min(whole, share * per_node) / (node.link.gb_per_s * 1e9 * per_node)
        nodes = math.ceil(self.engines * self.engine_grid.ranks / self.machines.per_node)
        sent = (
            whole
            * (nodes if spans else 1)
            / (self.learners * (node if spans else topology.levels[0]).link.gb_per_s * 1e9)
        )
        packed = 3 * whole / max(1, self.learners) / self.made.bytes_per_s
        return self.overheads.publish_s + max(received, sent) + packed

    def hand_over_s(self) -> float:
        """Both ways, where rollout and learning take turns with the memory of one device."""
        if not self.is_colocated or self.config.flow.schedule != "sync":
            return 0.0
        if self.config.flow.hand_over in ("never", "cache", "auto"):
            return 0.0 if self.config.flow.hand_over != "cache" else 0.02
        held = parameters_per_rank(self.shape, self.config.learn.parallel)
        return 2 * held * optimizer_bytes(self.config.learn, self.width) / self.machines.sheet.host_bytes_per_s

    def pull_s(self, tokens: float) -> float:
        """Samples of so many tokens, read by one team from elsewhere."""
        link = self.machines.topology.levels[-1].link
        return tokens * SAMPLE_BYTES / (link.gb_per_s * 1e9) + link.us * 1e-6

    @cached_property
    def graph(self) -> Graph:
        return registry.graph_of(self.config)


def calibration_for(sheet: DeviceSheet, threads: int = 1) -> Calibration:
    """This device's own, or the reference device's efficiencies at this one's rates."""
    own = calibrations.find(sheet.name, sheet.kind, threads)
    if own is not None:
        return own
    if threads > 1 and (single := calibrations.find(sheet.name, sheet.kind)) is not None:
        many = THREADS_GAIN * threads
        several = single.for_device(sheet.name, single.flops, single.bytes_per_s, (many, min(many, 2.0)))
        return replace(several, source=f"one thread's figures for {threads} (tidemill calibrate measures them)")
    base = calibrations.find(REFERENCE_DEVICE, "cuda")
    if base is None:
        raise ConfigError(f"there is no calibration for {sheet.name}", "take one there with `tidemill calibrate`")
    theirs = SHEETS[REFERENCE_DEVICE]
    ratio = base.flops / theirs.flops, base.bytes_per_s / theirs.bytes_per_s
    made = base.for_device(sheet.name, sheet.flops, sheet.bytes_per_s, ratio)
    return replace(made, flops8=sheet.flops8 * ratio[0])
