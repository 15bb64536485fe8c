"""What a model's images become: sizes, tiles, and the text that stands for them. One implementation for each kind.

Resizing follows transformers' own image processors for PIL, pixel for pixel, without their rounding to floats: tests
hold the two together. A plan is made from an image's width and height alone, so prompts can be measured unopened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tidemill.tiles import Tile

Image = Any  # PIL.Image.Image, in RGB
Size = tuple[int, int]  # height, width
BICUBIC, BILINEAR, LANCZOS = 3, 2, 1  # as PIL numbers them
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class CannotPlan(ValueError):
    """Why an image of some size cannot be used, as the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How an image is cut."""

    tiles: tuple[Size, ...]
    tokens: tuple[int, ...]  # of each tile
    rows: int = 0  # of the grid it is cut into beside the whole; 0: it is not cut
    columns: int = 0
    resized: tuple[Size, ...] = ()  # one size after another, before it is cut

    @property
    def total(self) -> int:
        return sum(self.tokens)


@dataclass(frozen=True, slots=True)
class Normal:
    """What a model computes with: (pixel / 255 - mean) / std."""

    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF


class View(Protocol):
    """Of one model."""

    @property
    def token(self) -> int:
        """Whose places in a prompt are taken by features."""

    @property
    def mark(self) -> str:
        """What a chat template writes where an image stands, before it is written out."""

    @property
    def normal(self) -> Normal: ...

    def plan(self, height: int, width: int) -> Plan: ...

    def written(self, plan: Plan) -> str:
        """The text in the place of the mark."""

    def cut(self, image: Image, plan: Plan) -> list[npt.NDArray[np.uint8]]:
        """The pixels of each tile, (height, width, 3)."""

    def grid(self, size: Size) -> Size:
        """Rows and columns of a tile's features."""

    def within(self, tokens: int) -> View:
        """The same with at most so many tokens an image."""

    def processor(self) -> dict[str, Any]:
        """preprocessor_config.json, with which transformers does the same."""


def resized(image: Image, size: Size, resample: int) -> Image:
    return image.resize((size[1], size[0]), resample=resample)


def pixels(image: Image) -> npt.NDArray[np.uint8]:
    return np.asarray(image, np.uint8)


def too_few(tokens: int, least: int, what: str) -> CannotPlan:
    return CannotPlan(f"data.images.max_tokens is {tokens}, but {what} takes {least} tokens an image at least")


def misplaced(tokens: Sequence[int], tiles: Sequence[Tile], view: View, strays: int = 0) -> str | None:
    """What is wrong with where tiles stand among a prompt's tokens, or None: an image that is lost, or looked at in the
    wrong place, gives numbers as any other does. `strays`: places that a model wrote and nobody fills."""
    places = np.flatnonzero(np.asarray(tokens) == view.token)
    last = 0
    for tile in tiles:
        rows, columns = view.grid(tile.size)
        if tile.tokens != rows * columns:
            return f"a tile of {tile.size[1]} × {tile.size[0]} pixels has {rows * columns} tokens, not {tile.tokens}"
        if tile.at < last or tile.end > len(tokens):
            return f"tiles overlap, or one ends at token {tile.end} of {len(tokens)}"
        last = tile.end
    taken = np.concatenate([np.arange(tile.at, tile.end) for tile in tiles]) if tiles else places[:0]
    if len(places) != len(taken) + strays or not np.isin(taken, places).all():
        return f"the prompt has {len(places)} places for images, and the tiles given to it take {len(taken)}, or others"
    return None
