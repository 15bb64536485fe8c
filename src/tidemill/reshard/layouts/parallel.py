"""Layouts of a decoder from its shapes and a word such as `tp4,dp4`: the learner's forms and an engine's.

A stage's ranks form one grid on which dense tensors are cut by (dp, fsdp, tp) and experts by (rest, ep): expert
parallelism lies over the same ranks, innermost first, as engines and learners have it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemill.errors import ReshardError, did_you_mean
from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Place, Replicate, Shape, Shard

AXES = ("pp", "dp", "fsdp", "tp", "ep")
VOCABULARY_STEP = 64  # engines pad the vocabulary to a multiple of this before cutting it
LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Model:
    """What a layout must know of a decoder: logical tensors (experts stacked), heads, layers."""

    name: str
    shapes: Mapping[str, Shape]
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    tied: bool = False  # the output layer is the embedding
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks share out what. `ep` lies over the other axes' ranks and multiplies nothing."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        return self.dp * self.fsdp * self.tp

    def __str__(self) -> str:
        return "·".join(f"{a}{n}" for a in AXES if (n := getattr(self, a)) > 1) or "one rank"


def parse(word: str) -> ParallelSizes:
    """`tp8,dp2` or `pp2·tp2`; an axis that is not said is 1."""
    found: dict[str, int] = {}
    for part in filter(None, re.split(r"[,·x\s]+", word.strip().lower())):
        axis = part.rstrip("0123456789")
        digits = part[len(axis) :]
        if axis not in AXES or not digits or int(digits) < 1:
            raise ReshardError(
                f"{part!r} in layout {word!r} is not an axis and its size{did_you_mean(axis, AXES)}",
                f"axes are {', '.join(AXES)}: for example tp8,dp2",
            )
        if axis in found:
            raise ReshardError(f"layout {word!r} says {axis} twice")
        found[axis] = int(digits)
    parallel = ParallelSizes(**found)
    if parallel.stage_size % parallel.ep:
        raise ReshardError(
            f"layout {word!r}: ep{parallel.ep} does not divide the {parallel.stage_size} ranks of a stage",
            "expert parallelism lies over the ranks of dp, fsdp and tp together",
        )
    return parallel


def learner(model: Model, parallel: ParallelSizes, *, first: int = 0, dtype: str = "") -> Layout:
    """FSDP cuts the first dimension after tensor parallelism has cut its own; stages own runs of layers; the output
    layer of a tied model lies with the last stage too."""
    _check(model, parallel)
    entries = []
    for name, shape in model.shapes.items():
        for stage in _stages(model, name, parallel.pp):
            entries.append(_learner_entry(model, parallel, name, shape, _stage_ranks(parallel, stage, first)))
    return Layout(tuple(entries)).astype(dtype or model.dtype)


def engine(
    model: Model,
    parallel: ParallelSizes,
    *,
    first: int = 0,
    dtype: str = "",
    fused: bool = True,
    expert_module: str = "",
) -> Layout:
    """An inference engine's tensors as vLLM names and fuses them: `qkv_proj`, `gate_up_proj`, `fused_qkv_a_proj`, and
    stacked experts `w13_weight` and `w2_weight`, cut first and fused after. `expert_module`: a module inside `experts`
    that holds those; newer vLLM has `routed_experts`."""
    _check(model, parallel)
    entries: list[LayoutEntry] = []
    for name, shape in model.shapes.items():
        for stage in _stages(model, name, parallel.pp):
            ranks = _stage_ranks(parallel, stage, first)
            entry = _engine_entry(model, parallel, name, shape, ranks)
            entries.append(_fuse(entry, model.shapes, expert_module) if fused else entry)
    return Layout(tuple(entries)).astype(dtype or model.dtype)


# Cuts


def _learner_entry(model: Model, parallel: ParallelSizes, name: str, shape: Shape, ranks: Sequence[int]) -> LayoutEntry:
    if is_expert(name):
        rest = len(ranks) // parallel.ep
        grid = Mesh(("efsdp", "ep"), (rest, parallel.ep), tuple(ranks))
        # Experts go round the expert ranks; what is left of the ranks cuts each expert's rows, or copies them.
        outer: Place = Shard(1) if parallel.fsdp > 1 and rest > 1 else Replicate()
        return LayoutEntry(name, shape, model.dtype, grid, (outer, Shard(0)))
    grid = _grid(parallel, ranks)
    sharded: Place = Shard(0) if parallel.fsdp > 1 else Replicate()
    tensor = _tensor_cut(model, name, parallel.tp) if parallel.tp > 1 else Replicate()
    return LayoutEntry(name, shape, model.dtype, grid, (Replicate(), sharded, tensor), order=(0, 2, 1))


def _engine_entry(model: Model, parallel: ParallelSizes, name: str, shape: Shape, ranks: Sequence[int]) -> LayoutEntry:
    if is_expert(name) and parallel.ep > 1:
        # An engine's expert group is tp wide at least; inside it experts are whole.
        grid = Mesh(("replica", "ep"), (len(ranks) // parallel.ep, parallel.ep), tuple(ranks))
        return LayoutEntry(name, shape, model.dtype, grid, (Replicate(), Shard(0)))
    sharded: Place = Shard(0) if parallel.fsdp > 1 else Replicate()
    tensor = _tensor_cut(model, name, parallel.tp, padded=True) if parallel.tp > 1 else Replicate()
    return LayoutEntry(
        name, shape, model.dtype, _grid(parallel, ranks), (Replicate(), sharded, tensor), order=(0, 2, 1)
    )


def _grid(parallel: ParallelSizes, ranks: Sequence[int]) -> Mesh:
    return Mesh(("dp", "fsdp", "tp"), (parallel.dp, parallel.fsdp, parallel.tp), tuple(ranks))


COLUMNS = ("q_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")  # cut by output
ROWS = ("o_proj", "down_proj")  # cut by input
KEYS = ("k_proj", "v_proj")  # cut by output, whole heads only
VOCABULARY = ("embed_tokens", "lm_head")


def is_expert(name: str) -> bool:
    return ".experts." in name


def _tensor_cut(model: Model, name: str, tp: int, *, padded: bool = False) -> Place:
    """How tensor parallelism cuts a tensor, by the name of its module."""
    module, kind = name.split(".")[-2:]
    lead = 1 if is_expert(name) else 0
    if module in COLUMNS:
        return Shard(lead)
    if module in ROWS:
        return Shard(lead + 1) if kind == "weight" else Replicate()
    if module in KEYS:
        return Shard(0, parts=model.kv_heads if model.kv_heads < tp else 0)
    if module in VOCABULARY:
        size = -(-model.shapes[name][0] // VOCABULARY_STEP) * VOCABULARY_STEP
        return Shard(0, step=-(-size // tp)) if padded else Shard(0)
    return Replicate()


# Fused tensors: the parts of one home in the order in which they lie

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),  # low-rank attention: held whole by every rank
}
STACKED = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}


def _fuse(entry: LayoutEntry, shapes: Mapping[str, Shape], expert_module: str = "") -> LayoutEntry:
    place, _, kind = entry.name.rpartition(".")
    before, _, module = place.rpartition(".")
    if is_expert(entry.name):
        ahead = (0, _local_rows(entry, 1), 0) if module == "up_proj" else ()
        inside = f"{before}.{expert_module}" if expert_module else before
        return replace(entry, home=f"{inside}.{STACKED[module]}", ahead=ahead)
    for home, parts in FUSED.items():
        siblings = [f"{before}.{p}.{kind}" for p in parts]
        if module in parts and all(s in shapes for s in siblings):
            rows = sum(_sibling_rows(entry, shapes[s], p) for s, p in zip(siblings, parts[: parts.index(module)]))
            return replace(entry, home=f"{before}.{home}.{kind}", ahead=(rows, *(0 for _ in entry.shape[1:])))
    return entry


def _local_rows(entry: LayoutEntry, dim: int) -> int:
    low, high = entry.home_box((0,) * len(entry.mesh.shape))[dim]
    return high - low


def _sibling_rows(entry: LayoutEntry, shape: Shape, module: str) -> int:
    """Rows that a sibling ahead has on each rank: cut as this one, except that key heads may be held by several."""
    places = tuple(replace(p, parts=0) if isinstance(p, Shard) and module == "q_proj" else p for p in entry.places)
    return _local_rows(replace(entry, shape=shape, places=places), 0)


# Stages and ranks


def _stage_ranks(parallel: ParallelSizes, stage: int, first: int) -> range:
    begin = first + stage * parallel.stage_size
    return range(begin, begin + parallel.stage_size)


def _stages(model: Model, name: str, pp: int) -> list[int]:
    """Which pipeline stages hold a tensor: layers in even runs, the embedding first, the rest last."""
    found = LAYER.search(name)
    if found:
        return [int(found[1]) * pp // model.layers]
    if "embed_tokens" in name:
        return sorted({0, pp - 1}) if model.tied else [0]
    return [pp - 1]


def _check(model: Model, parallel: ParallelSizes) -> None:
    def refuse(what: str, size: int, axis: str) -> None:
        raise ReshardError(f"{model.name}: {what} {size} cannot be cut by {axis}{getattr(parallel, axis)}")

    if parallel.pp > model.layers:
        refuse("layers", model.layers, "pp")
    if parallel.ep > 1 and (not model.experts or model.experts % parallel.ep):
        refuse("experts", model.experts, "ep")
    if model.heads % parallel.tp:
        refuse("heads", model.heads, "tp")
    if max(model.kv_heads, parallel.tp) % min(model.kv_heads, parallel.tp):
        refuse("key heads", model.kv_heads, "tp")


def decoder(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocabulary: int,
    tied: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
    experts: int = 0,
    expert_ffn: int = 0,
    dtype: str = "bfloat16",
    latent: tuple[int, int, int] | None = None,
    dense_layers: int = 0,
    shared_ffn: int = 0,
) -> Model:
    """The tensors of a decoder of the usual form, by their Hugging Face names, experts stacked.

    `latent`: ranks of queries and of keys, and the rotated part of a head, of latent attention in place of the
    grouped-query one. Of a mixture, the first `dense_layers` have an ordinary feed-forward.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}

    def usual(at: str) -> Iterable[tuple[str, Shape]]:
        for proj, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{at}.{proj}_proj.weight", (rows * head_dim, hidden)
            if bias:
                yield f"{at}.{proj}_proj.bias", (rows * head_dim,)
        if qk_norm:
            yield from ((f"{at}.{x}_norm.weight", (head_dim,)) for x in "qk")
        yield f"{at}.o_proj.weight", (hidden, heads * head_dim)

    def low_rank(at: str, q_rank: int, kv_rank: int, rotary: int) -> Iterable[tuple[str, Shape]]:
        yield f"{at}.q_a_proj.weight", (q_rank, hidden)
        yield f"{at}.q_a_layernorm.weight", (q_rank,)
        yield f"{at}.q_b_proj.weight", (heads * (head_dim + rotary), q_rank)
        yield f"{at}.kv_a_proj_with_mqa.weight", (kv_rank + rotary, hidden)
        yield f"{at}.kv_a_layernorm.weight", (kv_rank,)
        yield f"{at}.kv_b_proj.weight", (heads * 2 * head_dim, kv_rank)
        yield f"{at}.o_proj.weight", (hidden, heads * head_dim)

    def feed_forward(at: str, size: int, lead: Shape = ()) -> Iterable[tuple[str, Shape]]:
        yield f"{at}.gate_proj.weight", (*lead, size, hidden)
        yield f"{at}.up_proj.weight", (*lead, size, hidden)
        yield f"{at}.down_proj.weight", (*lead, hidden, size)

    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= dict(low_rank(f"{at}.self_attn", *latent) if latent else usual(f"{at}.self_attn"))
        shapes |= {f"{at}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        if experts and i >= dense_layers:
            shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
            shapes |= dict(feed_forward(f"{at}.mlp.experts", expert_ffn, (experts,)))
            shapes |= dict(feed_forward(f"{at}.mlp.shared_experts", shared_ffn)) if shared_ffn else {}
        else:
            shapes |= dict(feed_forward(f"{at}.mlp", ffn))
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return Model(name, shapes, layers, heads, kv_heads, experts, tied, dtype)


def count(model: Model) -> int:
    return sum(math.prod(s) for s in model.shapes.values())
