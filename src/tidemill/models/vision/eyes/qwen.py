"""The towers of Qwen2.5-VL and Qwen3-VL: patches of all tiles are one row, in which attention runs inside of windows or
of whole tiles. The modules are transformers' own; the loop over them is ours, because theirs cuts that row apart with a
kernel for every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models.attention.spans import Spans
from tidemill.models.upload import upload
from tidemill.models.vision.eyes.eyes import Ahead, Eyes, Features, TilePixels
from tidemill.models.vision.views.qwen import QwenView
from tidemill.models.vision.views.view import Size

Ints = npt.NDArray[np.int64]
Rotary = tuple[Tensor, Tensor]  # cos and sin, (patches, dim)


class QwenEyes(Eyes):
    has_axes = True
    ahead: Ahead = "never"

    def __init__(self, model: Any, view: QwenView) -> None:
        self.model, self.view = model, view
        self.levels = len(getattr(self.tower, "deepstack_merger_list", ()))
        for block in self.tower.blocks:
            block.forward = MethodType(through_block, block)

    @property
    def tower(self) -> Any:
        return self.model.model.visual

    def parts(self) -> list[nn.Module]:
        return [self.tower]

    def layers(self) -> list[nn.Module]:
        return list(self.tower.blocks)

    def features(self, tiles: TilePixels) -> Features:
        tower, device = self.tower, tiles.flat.device
        view: Any = self.view
        grids = [(h // view.patch, w // view.patch) for h, w in tiles.sizes]
        x = self._patches(tiles)
        weight = tower.patch_embed.proj.weight  # the same as its convolution: patches do not overlap
        x = F.linear(x, weight.flatten(1), tower.patch_embed.proj.bias)
        if hasattr(tower, "pos_embed"):
            x = x + self._learnt(grids, device).to(x.dtype)
        places = [_places(grid, view.merge) for grid in grids]
        cos, sin = tower.rotary_pos_emb(x, upload(np.concatenate(places), device))
        whole = Spans([h * w for h, w in grids], device)
        windows, order = whole, None
        if hasattr(tower, "window_size"):
            by_window, lengths = _windowed(grids, view.merge, tower.window_size // view.merge // view.patch)
            windows, order = Spans(lengths, device), upload(by_window, device)
            x, cos, sin = (_by_window(t, order, view.merge**2) for t in (x, cos, sin))
        deep = []
        for i, block in enumerate(tower.blocks):
            is_whole = order is None or i in tower.fullatt_block_indexes
            x = block(x, whole if is_whole else windows, (cos, sin))
            if i in getattr(tower, "deepstack_visual_indexes", ()):
                deep.append(tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(i)](x))
        rows = tower.merger(x)
        if order is not None:
            rows = rows.index_select(0, torch.argsort(order))
        return Features(rows, torch.stack(deep) if deep else None)

    def foreign(self, tiles: TilePixels, ids: Tensor) -> dict[str, Any]:
        view: Any = self.view
        grids = [[1, h // view.patch, w // view.patch] for h, w in tiles.sizes]
        return {
            "pixel_values": self._patches(tiles),
            "image_grid_thw": torch.tensor(grids, device=ids.device),
            "mm_token_type_ids": (ids == view.token).int(),
        }

    def _patches(self, tiles: TilePixels) -> Tensor:
        """(patches, 3 · 2 · patch²), those that one token stands for side by side. Every patch comes twice, as the two
        moments that the towers look at."""
        view: Any = self.view
        p, m = view.patch, view.merge
        parts: list[Tensor | None] = [None] * len(tiles.sizes)
        for which, pixels in tiles.by_size():
            n, h, w, _ = pixels.shape
            x = self.normalised(pixels).view(n, h // (p * m), m, p, w // (p * m), m, p, 3)
            x = x.permute(0, 1, 4, 2, 5, 7, 3, 6)  # (tiles, rows, columns, merge, merge, 3, patch, patch)
            x = x.reshape(n, -1, 3, 1, p, p).expand(-1, -1, -1, 2, -1, -1).reshape(n, -1, 3 * 2 * p * p)
            for i, one in zip(which, x):
                parts[i] = one
        return torch.cat([part for part in parts if part is not None])

    def _learnt(self, grids: Sequence[Size], device: torch.device) -> Tensor:
        tower, view = self.tower, self.view
        found = [_interpolated(grid, tower.num_grid_per_side, view.merge) for grid in grids]
        index, weights = (torch.cat(part).to(device) for part in zip(*found))
        return (tower.pos_embed(index) * weights[:, :, None]).sum(1)  # type: ignore[no-any-return]


def through_block(
    block: Any, x: Tensor, spans: Spans | None = None, rotary: Rotary | None = None, **theirs: Any
) -> Tensor:
    """In the place of a block's own forward pass: x (patches, width). Called as transformers does, it is that."""
    if spans is None or rotary is None:
        return type(block).forward(block, x, **theirs)  # type: ignore[no-any-return]
    a = block.attn
    q, k, v = a.qkv(block.norm1(x)).view(len(x), 3, a.num_heads, -1).unbind(1)
    q, k = _turned(q, rotary), _turned(k, rotary)
    x = x + a.proj(spans.attend(q, k, v, a.scaling).flatten(1))
    return x + block.mlp(block.norm2(x))  # type: ignore[no-any-return]


def _turned(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (t.unsqueeze(1).float() for t in rotary)
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def _by_window(x: Tensor, order: Tensor, together: int) -> Tensor:
    return x.view(len(order), together, -1).index_select(0, order).flatten(0, 1)


@lru_cache(maxsize=256)
def _places(grid: Size, merge: int) -> Ints:
    """(patches, 2) row and column of each, those that one token stands for side by side."""
    h, w = grid
    where = np.stack(np.meshgrid(np.arange(h), np.arange(w), indexing="ij"), -1)
    return where.reshape(h // merge, merge, w // merge, merge, 2).swapaxes(1, 2).reshape(-1, 2)


@lru_cache(maxsize=256)
def _interpolated(grid: Size, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Which of a square of learnt positions each patch takes, and how much of each: bilinear, corners on corners,
    patches in the order in which they are merged."""
    rows, columns = (_taps(count, side) for count in grid)
    order = torch.arange(grid[0] * grid[1]).view(grid[0] // merge, merge, grid[1] // merge, merge)
    order = order.transpose(1, 2).reshape(-1)
    row, column = order // grid[1], order % grid[1]
    indices = rows[0][row][:, :, None] * side + columns[0][column][:, None, :]
    weights = rows[1][row][:, :, None] * columns[1][column][:, None, :]
    return indices.reshape(-1, 4), weights.reshape(-1, 4)


def _taps(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Of each of `count` places along one side, the two learnt positions around it, and the share of each."""
    at = torch.arange(count, dtype=torch.float32) * ((side - 1) / max(count - 1, 1))
    low = at.floor()
    share = at - low
    return torch.stack([low.long(), (low.long() + 1).clamp(max=side - 1)], 1), torch.stack([1 - share, share], 1)


@lru_cache(maxsize=256)
def _windows(grid: Size, merge: int, side: int) -> tuple[Ints, tuple[int, ...]]:
    """Tokens of a tile window by window, and how many patches each window has. Those at the edges are smaller."""
    rows, columns = grid[0] // merge, grid[1] // merge
    index = np.arange(rows * columns).reshape(rows, columns)
    parts = [
        index[r : r + side, c : c + side].reshape(-1) for r in range(0, rows, side) for c in range(0, columns, side)
    ]
    return np.concatenate(parts), tuple(len(part) * merge**2 for part in parts)


def _windowed(grids: Sequence[Size], merge: int, side: int) -> tuple[Ints, list[int]]:
    order, lengths, first = [], list[int](), 0
    for grid in grids:
        own, sizes = _windows(grid, merge, side)
        order.append(own + first)
        lengths += sizes
        first += len(own)
    return np.concatenate(order), lengths
