"""What a model looks with: its tower, and how the features of tiles come into the places of tokens.

Rollout and learner use the same: `features` of tiles, `Seen` as the features of some tokens of one pass, and `inputs`
as the arguments with which the decoder is called. A model that reads text alone has none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.batch import Array
from tidemill.errors import ModelError
from tidemill.models.parts import decoder_of
from tidemill.models.upload import upload
from tidemill.models.vision.views.view import Size, View
from tidemill.tiles import Tile

AXES = 4  # rows of positions of a model that turns by time, height and width: a token's place in its sample goes first
Ahead = Literal["never", "always", "windows"]


@dataclass(frozen=True, slots=True)
class TilePixels:
    """Tiles on the device, one after another."""

    flat: Tensor  # uint8
    sizes: tuple[Size, ...]

    @staticmethod
    def of(tiles: Sequence[Tile], device: torch.device) -> TilePixels:
        flat = np.concatenate([tile.pixels.reshape(-1) for tile in tiles])
        return TilePixels(upload(flat, device, np.uint8), tuple(tile.size for tile in tiles))

    @staticmethod
    def blank(size: Size, device: torch.device) -> TilePixels:
        return TilePixels(torch.zeros(size[0] * size[1] * 3, dtype=torch.uint8, device=device), (size,))

    def by_size(self) -> Iterator[tuple[list[int], Tensor]]:
        """Tiles of one size together: which they are, and (count, height, width, 3)."""
        lengths = [h * w * 3 for h, w in self.sizes]
        ends = np.cumsum(lengths).tolist()
        for size in dict.fromkeys(self.sizes):
            own = [i for i, one in enumerate(self.sizes) if one == size]
            if len(own) == len(self.sizes):
                yield own, self.flat.view(len(own), *size, 3)
            else:
                yield own, torch.stack([self.flat[ends[i] - lengths[i] : ends[i]].view(*size, 3) for i in own])


@dataclass(frozen=True, slots=True)
class Features:
    """Of some tiles, one after another."""

    rows: Tensor  # (tokens, width)
    deep: Tensor | None = None  # (levels, tokens, width): added to the stream behind the first layers


@dataclass(frozen=True, slots=True)
class Seen:
    """Features in the places of some tokens of one pass."""

    at: Tensor  # (seen,) which tokens of the pass
    rows: Tensor  # (seen, width)
    deep: Tensor | None = None  # (levels, seen, width)


class Eyes(Protocol):
    """One implementation for each kind of tower. It keeps the model it was made for."""

    model: Any
    view: View
    has_axes: bool  # positions are (4, tokens): place in the sample, time, height, width
    levels: int  # of `deep`
    ahead: (
        Ahead  # whether an image's tokens see those behind them in the same image: in no layer, all, or windowed ones
    )

    @abstractmethod
    def features(self, tiles: TilePixels) -> Features: ...

    @abstractmethod
    def parts(self) -> list[nn.Module]:
        """Tower and projector."""

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Of the tower."""

    @abstractmethod
    def foreign(self, tiles: TilePixels, ids: Tensor) -> dict[str, Any]:
        """What transformers' own forward pass takes for a prompt (1, tokens) with these tiles: for comparison."""

    def inputs(self, ids: Tensor, positions: Tensor, seen: Seen | None) -> dict[str, Any]:
        """What the decoder is called with for tokens (tokens,)."""
        x = self.embedded(ids, seen)
        more: dict[str, Any] = {}
        if seen is not None and seen.deep is not None:
            mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            mask[0, seen.at] = True
            more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(seen.deep.unbind(0))}
        return {"inputs_embeds": x, "position_ids": self.placed(positions, seen is not None), **more}

    def embedded(self, ids: Tensor, seen: Seen | None) -> Tensor:
        """(1, tokens, width)"""
        words = decoder_of(self.model).get_input_embeddings()
        x: Tensor = words(ids[None] if seen is None else self.readable(ids)[None])
        return x if seen is None else x.index_copy(1, seen.at, seen.rows.to(x.dtype)[None])

    def readable(self, ids: Tensor) -> Tensor:
        """Tokens that the embedding knows: that of an image may lie beyond its end."""
        return ids

    def placed(self, positions: Tensor, has_seen: bool) -> Tensor:
        """Positions as the decoder takes them: (1, tokens), or (4, 1, tokens)."""
        kind = type(self.model).__name__
        if not self.has_axes:
            if positions.ndim != 1:
                raise ModelError(f"{kind} takes one position for each token, not {tuple(positions.shape)}")
            return positions[None]
        if positions.ndim == 1:
            if has_seen:
                raise ModelError(
                    f"{kind} turns images by time, height and width: one position for each token is not enough"
                )
            positions = positions.expand(AXES, -1)
        if positions.shape[0] != AXES:
            raise ModelError(
                f"{kind} was given {positions.shape[0]} rows of positions; it takes {AXES}: place, time, height, width"
            )
        return positions[:, None]

    def normalised(self, pixels: Tensor) -> Tensor:
        """(count, height, width, 3) of bytes as the tower takes them, in its own dtype."""
        normal, dtype = self.view.normal, next(self.parts()[0].parameters()).dtype
        mean, std = (
            torch.tensor(list(x), dtype=torch.float32, device=pixels.device) for x in (normal.mean, normal.std)
        )
        return ((pixels.float() / 255 - mean) / std).to(dtype)


def of(model: Any) -> Eyes | None:
    """The eyes that a model was given when it was loaded; None for one that reads text alone."""
    found: Eyes | None = getattr(model, "eyes", None)
    return found


def see(eyes: Eyes, tiles: TilePixels, at: Tensor, which: Tensor) -> Seen:
    """Tokens `at` of a pass take rows `which` of the tiles' features."""
    made = eyes.features(tiles)
    deep = None if made.deep is None else made.deep.index_select(1, which)
    return Seen(at, made.rows.index_select(0, which), deep)


def positions(tokens: int, tiles: Sequence[Tile], view: View) -> Array:
    """(4, tokens) of one sample. Words go on from one more than the largest position before them; the tokens of a tile
    keep that as their time, and add to it their row and their column."""
    made = np.zeros((AXES, tokens), np.int64)
    made[0] = np.arange(tokens)
    place = done = 0
    for tile in tiles:
        made[1:, done : tile.at] = place + np.arange(tile.at - done)
        place += tile.at - done
        rows, columns = view.grid(tile.size)
        own = slice(tile.at, tile.end)
        made[1, own] = place
        made[2, own] = place + np.repeat(np.arange(rows), columns)
        made[3, own] = place + np.tile(np.arange(columns), rows)
        place, done = place + max(rows, columns), tile.end
    made[1:, done:] = place + np.arange(tokens - done)
    return made


def until(tokens: int, tiles: Sequence[Tile]) -> Array:
    """(tokens,) one more than the last place that each sees where tokens of an image see all of it. Tiles that touch
    are one image."""
    ends = np.arange(1, tokens + 1)
    last = begins = -1  # of the image behind
    for tile in reversed(tiles):
        last = last if tile.end == begins else tile.end
        ends[tile.at : tile.end] = last
        begins = tile.at
    return ends
