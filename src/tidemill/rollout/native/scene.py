"""What a run of tokens shows: its tiles, the positions that follow from them, and what tells it from runs of the same
tokens that show something else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tidemill.batch import Array
from tidemill.models.vision.eyes.eyes import Eyes, positions, until
from tidemill.tiles import Tile, Tiles

IDENTITIES = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    tiles: Tiles
    identity: Array  # (tokens,) equal where token and image are
    positions: Array | None  # (4, tokens), for a model that turns by time, height and width
    until: Array | None  # (tokens,) one more than the last place each sees, where an image is seen whole

    @property
    def shift(self) -> int:
        """From the place of a token that comes later to its position."""
        return 0 if self.positions is None else int(self.positions[1:, -1].max()) + 1 - len(self.identity)

    def whole(self, first: int, count: int) -> int:
        """How many tokens from `first` can be read at once, of `count`: none that is seen by one before it may come
        later. More than `count` where an image alone is longer."""
        last = first + count
        if self.until is None or self.until[last - 1] <= last:
            return count
        ends = np.flatnonzero(self.until[first:last] <= np.arange(first + 1, last + 1))
        return int(ends[-1]) + 1 if len(ends) else int(self.until[last - 1]) - first


def scene_of(tokens: Array, tiles: Sequence[Tile], eyes: Eyes | None) -> Scene | None:
    """None where there is nothing but text."""
    if eyes is None or not tiles:
        return None
    sees_ahead = eyes.ahead != "never"
    return Scene(
        tuple(tiles),
        _identity(tokens, tiles, sees_ahead),
        positions(len(tokens), tiles, eyes.view) if eyes.has_axes else None,
        until(len(tokens), tiles) if sees_ahead else None,
    )


def _identity(tokens: Array, tiles: Sequence[Tile], joins: bool) -> Array:
    """Tokens are numbers from 0; places of an image are numbers below, made of its content."""
    made = tokens.astype(np.int64)
    for run in _runs(tiles) if joins else ([tile] for tile in tiles):
        digest = hashlib.blake2b(b"".join(tile.digest for tile in run), digest_size=8).digest()
        first, last = run[0].at, run[-1].end
        made[first:last] = -1 - (int.from_bytes(digest, "big") + np.arange(last - first, dtype=object)) % IDENTITIES
    return made


def _runs(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Tiles that touch, together."""
    before = np.cumsum([0, *(tile.tokens for tile in tiles[:-1])]).tolist()
    for _, run in groupby(zip(tiles, before), key=lambda pair: pair[0].at - pair[1]):
        yield [tile for tile, _ in run]
