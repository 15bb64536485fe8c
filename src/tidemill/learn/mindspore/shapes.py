"""Packed rows in few shapes: MindSpore compiles a graph for every shape it sees, which takes seconds to minutes.

Tokens lie one after another, padded at the end of the whole row. For the attention product alone they are gathered into
dense tables of queries and keys; what is not there is the row behind the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill.learn.rows.packing import PackedBatch
from tidemill.models.attention.packed import Block, Packed, SharedPrompt

Ints = npt.NDArray[np.int32]
DEAREST = 1.6  # times the work of the tightest shape: a shape that is compiled already may cost so much
STEP = 2.0**0.5  # between sizes


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of tokens, each of which sees itself and those before it, by position. -1: nothing."""

    queries: Ints  # (rows, queries) places in the packed row
    keys: Ints  # (rows, keys)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.queries.shape, self.keys.shape[1])


@dataclass(frozen=True, slots=True)
class Shape:
    tokens: int
    targets: int
    tables: tuple[tuple[int, int, int], ...]  # rows, queries, keys

    def holds(self, other: Shape) -> bool:
        if len(self.tables) != len(other.tables):
            return False
        pairs = [(self.tokens, other.tokens), (self.targets, other.targets)]
        pairs += [pair for a, b in zip(self.tables, other.tables) for pair in zip(a, b)]
        return all(a >= b for a, b in pairs)


def tables_of(packed: PackedBatch) -> list[Table]:
    context = packed.context
    if isinstance(context, Packed):
        made = [_placed(block) for block in context.blocks]
        longest = max(table.shape[1] for table in made)
        whole = np.concatenate([_widened(queries, longest) for queries in made])
        return [Table(whole, whole)]
    assert isinstance(context, SharedPrompt)
    prompts, own = _placed(context.prompts), _placed(context.responses)
    group = context.group.numpy()
    return [Table(prompts, prompts), Table(own, np.concatenate([prompts[group], own], 1))]


def _placed(block: Block) -> Ints:
    """Where the tokens of a block's sequences lie in the packed row, (count, longest)."""
    flat = np.full(block.count * max(block.longest, 1), -1, np.int32)
    if len(block.place):
        flat[block.place.numpy()] = block.tokens.numpy()
    return flat.reshape(block.count, -1)


def _widened(places: Ints, width: int) -> Ints:
    out = np.full((len(places), width), -1, np.int32)
    out[:, : places.shape[1]] = places
    return out


def rounded(n: int, least: int = 8) -> int:
    """The next of a series of sizes that grow by about 1.4."""
    size = float(least)
    while size < n:
        size *= STEP
    return -(-int(np.ceil(size)) // least) * least


@dataclass(slots=True)
class Shapes:
    """Chooses shapes: one that is compiled already where it costs little more than the tightest."""

    per_token: float  # work of everything but attention and the output layer, for a token
    per_pair: float  # of attention, for a query and a key
    per_target: float  # of the output layer
    known: list[Shape] = field(default_factory=list)

    def work(self, shape: Shape) -> float:
        pairs = sum(rows * queries * keys for rows, queries, keys in shape.tables)
        return shape.tokens * self.per_token + pairs * self.per_pair + shape.targets * self.per_target

    def choose(self, needed: Shape) -> Shape:
        tight = Shape(
            rounded(needed.tokens, 32), rounded(needed.targets, 32),
            tuple((rounded(r, 4), rounded(q), rounded(k)) for r, q, k in needed.tables),
        )  # fmt: skip
        fitting = [shape for shape in self.known if shape.holds(needed)]
        best = min(fitting, key=self.work, default=None)
        if best is not None and self.work(best) <= DEAREST * self.work(tight):
            return best
        self.known.append(tight)
        return tight


def needed(packed: PackedBatch, tables: Sequence[Table]) -> Shape:
    return Shape(len(packed.tokens), len(packed.targets), tuple(table.shape for table in tables))


def padded(packed: PackedBatch, tables: Sequence[Table], shape: Shape) -> dict[str, npt.NDArray[np.int32]]:
    """What the decoder is given: places beyond the tokens stand for nothing."""
    tokens, targets = len(packed.tokens), len(packed.targets)
    arrays = {
        "tokens": _longer(packed.tokens.numpy(), shape.tokens, 0),
        "positions": _longer(packed.positions.numpy(), shape.tokens, 0),
        "predicts": _longer(packed.predicts.numpy(), shape.targets, 0),
        "targets": _longer(packed.targets.numpy(), shape.targets, 0),
    }
    back = np.zeros(shape.tokens, np.int32)  # of each token: where it lies among all tables' queries
    first = 0
    for i, (table, (rows, queries, keys)) in enumerate(zip(tables, shape.tables)):
        asks = np.full((rows, queries), -1, np.int32)
        asks[: table.queries.shape[0], : table.queries.shape[1]] = table.queries
        seen = np.full((rows, keys), -1, np.int32)
        seen[: table.keys.shape[0], : table.keys.shape[1]] = table.keys
        is_there = asks.reshape(-1) >= 0
        back[asks.reshape(-1)[is_there]] = first + np.flatnonzero(is_there)
        first += asks.size
        arrays[f"queries.{i}"], arrays[f"keys.{i}"] = asks, seen
    assert tokens <= shape.tokens and targets <= shape.targets
    return {**arrays, "back": back}


def _longer(x: npt.NDArray[np.int64], length: int, fill: int) -> Ints:
    out = np.full(length, fill, np.int32)
    out[: len(x)] = x
    return out
