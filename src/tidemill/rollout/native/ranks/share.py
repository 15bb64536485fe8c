"""A rank's share of the parameters of an engine over ranks: which boxes of which tensors it holds, as a layout.

The layout says it all: `cut` leaves a rank what its layout lists, the weight flow brings new weights by it, `gathered`
puts a whole model together from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tidemill.errors import ModelError, either
from tidemill.models.buffers import carried, persistent
from tidemill.models.layers import stages
from tidemill.models.mixture import experts, routing
from tidemill.models.parts import layers_of
from tidemill.recipe.ranks import divisors
from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Part, Place, Replicate, Shape, Shard
from tidemill.reshard.move import BufferRing, GroupWire, Job, move
from tidemill.reshard.plan import plan
from tidemill.rollout.native.ranks.grid import Grid

ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head")  # a rank makes some of the outputs
KEYS = ("k_proj", "v_proj")  # the same, in whole heads, which several ranks hold where there are fewer than ranks
COLUMNS = ("o_proj", "down_proj")  # a rank takes some of the inputs
LAYER = re.compile(r"\.layers\.(\d+)\.")
WHOLE = Replicate()


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a layout must know of one tensor, as it is in the whole model."""

    shape: Shape
    dtype: str
    stages: tuple[int, ...]
    place: Place = WHOLE  # over tp
    on_first: bool = False  # parts are summed over tp, so only the first rank has what is added to the sum
    experts: str = ""  # the module of the experts whose stack it is
    width: int | None = None  # of a stack: the dimension along which each expert is cut; None: it is added to a sum
    is_halved: bool = False  # gate and up lie one behind the other along `width`


@dataclass(slots=True)
class Share:
    """How a model lies over an engine's ranks. `slots`: of each module of experts, which expert lies in each place of
    its stacks, rank after rank."""

    grid: Grid
    rank: int
    tensors: Mapping[str, Tensors]
    vocabulary: int
    slots: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def layout(self, ranks: Sequence[int] | None = None) -> Layout:
        """Of the whole engine, whose ranks have these numbers."""
        numbers = range(self.grid.ranks) if ranks is None else ranks
        return Layout(tuple(e for name, t in self.tensors.items() for e in self._entries(name, t, numbers)))

    def _entries(self, name: str, t: Tensors, numbers: Sequence[int]) -> Iterator[LayoutEntry]:
        grid = self.grid
        for stage in t.stages:
            ranks = tuple(numbers[grid.rank(stage, dp, tp)] for dp in range(grid.dp) for tp in range(grid.tp))
            if t.experts:
                yield from self._stacked(name, t, ranks)
            elif t.on_first:
                yield LayoutEntry(name, t.shape, t.dtype, Mesh(("dp",), (grid.dp,), ranks[:: grid.tp]), (WHOLE,))
            else:
                mesh = Mesh(("dp", "tp"), (grid.dp, grid.tp), ranks)
                yield LayoutEntry(name, t.shape, t.dtype, mesh, (WHOLE, t.place))

    def _stacked(self, name: str, t: Tensors, ranks: tuple[int, ...]) -> Iterator[LayoutEntry]:
        """Experts in the order of their places; each run of neighbours is one entry, or one for gate and one for up."""
        grid, slots = self.grid, self.slots[t.experts]
        places: tuple[Place, ...]
        copies, widths = len(ranks) // (grid.ep * grid.widths), grid.widths
        if t.width is None:
            mesh, places = Mesh(("copy", "ep"), (copies, grid.ep), ranks[::widths]), (WHOLE, Shard(0))
        else:
            mesh = Mesh(("copy", "ep", "width"), (copies, grid.ep, widths), ranks)
            places = (WHOLE, Shard(0), Shard(t.width) if widths > 1 else WHOLE)
        halves = 2 if t.is_halved and widths > 1 else 1
        for place, first, count in runs(slots):
            for half in range(halves):
                extent = [count, *t.shape[1:]]
                start, at, whole = ([0] * len(extent) for _ in range(3))
                start[0], at[0], whole[:] = first, place, [len(slots), *t.shape[1:]]
                ahead: Shape = ()
                if halves == 2:
                    assert t.width is not None
                    size = t.shape[t.width] // 2
                    extent[t.width] = whole[t.width] = size
                    start[t.width] = half * size
                    ahead = tuple(half * size // widths if i == t.width else 0 for i in range(len(extent)))
                part = Part(tuple(start), tuple(extent), tuple(at), tuple(whole))
                yield LayoutEntry(name, t.shape, t.dtype, mesh, places, part=part, ahead=ahead)


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Places of neighbours: (first place, its expert, how many)."""
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield start, slots[start], i - start
            start = i


def of(model: Any) -> Share:
    """The share that `cut` left."""
    found: Share = model.__dict__["tide_share"]
    return found


def check_divides(model: Any, grid: Grid) -> None:
    """Heads, widths and experts must be cut evenly; of the vocabulary the last rank may have less."""
    config = model.config.get_text_config()
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    cuts = {"heads": (heads, "tp", grid.tp)}
    if max(keys, grid.tp) % min(keys, grid.tp):
        raise ModelError(
            f"rollout.tp {grid.tp} neither divides the model's {keys} key/value heads nor is divided by them",
            f"{either([n for n in divisors(heads) if max(keys, n) % min(keys, n) == 0])} would do",
        )
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "down_proj" and isinstance(module, nn.Linear):
            cuts["MLP width"] = (module.in_features, "tp", grid.tp)
        elif experts.is_gated(module):
            stack = module.down_proj
            cuts["experts"] = (stack.shape[0], "ep", grid.ep)
            width = stack.shape[1 if module.is_transposed else 2]
            cuts["width of an expert"] = (width, "tp / rollout.ep", grid.widths)
    for what, (size, key, ranks) in cuts.items():
        if size % ranks:
            raise ModelError(
                f"rollout.{key} {ranks} does not divide the model's {what}, {size}",
                f"{either(divisors(size))} would do",
            )
    if problem := grid.problem() if any(what == "experts" for what in cuts) else "":
        raise ModelError(problem)
    if grid.pp > config.num_hidden_layers:
        raise ModelError(
            f"rollout.pp {grid.pp} is more than the model's {config.num_hidden_layers} layers",
            f"at most {config.num_hidden_layers} would do",
        )


def describe(model: Any, grid: Grid) -> dict[str, Tensors]:
    """Every tensor of a whole model, and how ranks cut it. An output layer that is the embedding is not cut."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    stacks = {name: m for name, m in model.named_modules() if experts.is_gated(m)}
    kv_heads = model.config.get_text_config().num_key_value_heads
    keys = Shard(0, parts=kv_heads if kv_heads < grid.tp else 0)
    tied = model.get_input_embeddings().weight
    buffers = persistent(model)
    found: dict[str, Tensors] = {}
    for name, tensor in carried(model).items():
        where, _, kind = name.rpartition(".")
        last = where.rpartition(".")[2]
        facts = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), _stages(model, name, grid)
        if where in stacks:
            found[name] = Tensors(*facts, **_of_stack(stacks[where], where, kind))
        elif name not in buffers and kind == "sinks":
            found[name] = Tensors(*facts, place=Shard(0))
        elif where not in linears or linears[where].weight is tied:
            found[name] = Tensors(*facts)
        elif last in COLUMNS and kind == "bias":
            found[name] = Tensors(*facts, on_first=True)
        else:
            place = Shard(0) if last in ROWS else keys if last in KEYS else Shard(1) if last in COLUMNS else WHOLE
            found[name] = Tensors(*facts, place=place)
    return found


def _of_stack(module: Any, where: str, kind: str) -> dict[str, Any]:
    is_first, is_bias = kind.startswith("gate_up"), kind.endswith("_bias")
    if is_bias:
        width = 1 if is_first else None
    else:
        width = 1 if is_first != module.is_transposed else 2
    return {"experts": where, "width": width, "is_halved": is_first and module.is_concatenated}


def _stages(model: Any, name: str, grid: Grid) -> tuple[int, ...]:
    layers = len(layers_of(model))
    if found := LAYER.search(name):
        return (stages.stage_of(int(found[1]), layers, grid.pp),)
    if "embed_tokens" in name:
        return tuple(sorted({0, grid.pp - 1})) if stages.is_tied(model) else (0,)
    return (grid.pp - 1,)


@torch.no_grad()
def cut(model: Any, grid: Grid, rank: int, spare: int = 0) -> Share:
    """Leave a rank's share of a whole model, in memory of its own. On the meta device, before there is any memory.
    `spare`: further places for experts on each rank, which copies of the first ones take until loads are known."""
    check_divides(model, grid)
    tensors = describe(model, grid)
    named = dict(model.named_modules())
    slots = {t.experts: named[t.experts].down_proj.shape[0] for t in tensors.values() if t.experts}
    output = model.get_output_embeddings()
    share = Share(
        grid, rank, tensors, int(output.weight.shape[0]), {k: spread(n, grid.ep, spare) for k, n in slots.items()}
    )
    layout = share.layout()
    routing.detach(model)
    own, whole, embedding = layout.homes(rank), carried(model), model.get_input_embeddings().weight
    stages.split(model, grid.place(rank).pp, grid.pp)
    for name, module in model.named_modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            full = f"{name}.{kind}" if name else kind
            if parameter is embedding:
                continue
            if full not in own:
                setattr(module, kind, None)
            elif isinstance(tensors[full].place, Shard) or tensors[full].experts:
                cut_out = torch.empty(own[full][0], dtype=parameter.dtype, device=parameter.device)
                _fill(cut_out, layout, full, rank, whole[full])
                setattr(module, kind, nn.Parameter(cut_out, requires_grad=parameter.requires_grad))
    model.__dict__["tide_share"] = share
    return share


def spread(count: int, parts: int, spare: int) -> tuple[int, ...]:
    """Experts one after the other over the parts, each with `spare` more places."""
    each = count // parts
    return tuple((part * each + i) % count for part in range(parts) for i in range(each + spare))


def _fill(out: Tensor, layout: Layout, name: str, rank: int, whole: Tensor) -> None:
    for piece in layout.pieces(name):
        if piece.rank == rank:
            region, box = out, whole
            for dim, (low, high) in enumerate(piece.box):
                region = region.narrow(dim, piece.at[dim], high - low)
                box = box.narrow(dim, low, high - low)
            region.copy_(box)


def gathered(model: Any, group: Any) -> dict[str, Tensor]:
    """The whole model in the host's memory of the first rank; nothing on the others. All ranks of an engine call it."""
    share = of(model)
    names = {name: t for name, t in share.tensors.items() if not name.endswith(f".{routing.GIVEN}")}
    one = Mesh(("one",), (1,), (0,))
    target = Layout(tuple(LayoutEntry(n, t.shape, t.dtype, one, (WHOLE,)) for n, t in names.items()))
    whole = {}
    if share.rank == 0:
        whole = {n: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for n, t in names.items()}
    own = {name: tensor.detach() for name, tensor in carried(model).items()}
    ring = BufferRing(device=next(iter(own.values())).device)
    move(Job(plan(share.layout(), target), share.rank, own, whole, version=1), GroupWire(ring, group))
    return whole
