"""Tiles: images as a model takes them, and where they stand among a sample's tokens.

An image is one tile, or is cut into several. A tile is kept as bytes of red, green and blue, resized for the model and
not normalised: a fifth to an eighth of what the model computes with. In a batch the tiles of a row are one column of
pixels and one of places, both shared by a group's rows; those that came in later turns have two of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.batch import Array, Batch, Column

PIXELS, PLACES = "tiles", "tile_places"  # of the prompt, the same for all rows of a group
TURN_PIXELS, TURN_PLACES = "turn_tiles", "turn_tile_places"  # of a sample's later turns, its own
PROMPT_COLUMNS, TURN_COLUMNS = (PIXELS, PLACES), (TURN_PIXELS, TURN_PLACES)
FIELDS = 5  # of a tile in a column of places: at, tokens, height, width, image


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    pixels: npt.NDArray[np.uint8]  # (height, width, 3)
    at: int  # place of its first token in the sample
    tokens: int  # how many follow one another there
    image: int = 0  # which of the sample's images it is, or is a part of
    _digest: list[bytes] = field(default_factory=list, repr=False)  # worked out when first asked for

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def end(self) -> int:
        return self.at + self.tokens

    @property
    def digest(self) -> bytes:
        """Of what it shows: equal for equal pixels, wherever they stand."""
        if not self._digest:
            found = hashlib.blake2b(repr(self.size).encode(), digest_size=16)
            found.update(np.ascontiguousarray(self.pixels).data)
            self._digest.append(found.digest())
        return self._digest[0]

    def moved(self, by: int, images: int = 0) -> Tile:
        """The same tile so many tokens further on, behind so many more images."""
        return replace(self, at=self.at + by, image=self.image + images)


Tiles = tuple[Tile, ...]


def columns(rows: Sequence[Sequence[Tile]], names: tuple[str, str] = PROMPT_COLUMNS) -> dict[str, Column]:
    """The tiles of each row as two columns."""
    pixels = [_joined([tile.pixels.reshape(-1) for tile in row]) for row in rows]
    places = [[n for t in row for n in (t.at, t.tokens, *t.size, t.image)] for row in rows]
    return {names[0]: Column.jagged(pixels, np.uint8), names[1]: Column.jagged(places, np.int32)}


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _cut(pixels: Array, places: Array) -> Iterator[Tile]:
    first = 0
    for at, tokens, height, width, image in places.reshape(-1, FIELDS).tolist():
        last = first + height * width * 3
        yield Tile(pixels[first:last].reshape(height, width, 3), at, tokens, image)
        first = last


def of_batch(batch: Batch) -> list[Tiles]:
    """All tiles of every row, prompt and turns. Rows of a group share the objects of their prompt."""
    if PLACES not in batch:
        return [()] * batch.rows
    pixels, places = batch[PIXELS], batch[PLACES]
    own: list[Any] = list(range(batch.rows)) if places.index is None else places.index.tolist()
    shared = {key: tuple(_cut(pixels[row], places[row])) for row, key in reversed(list(enumerate(own)))}
    found = [shared[key] for key in own]
    if TURN_PLACES not in batch:
        return found
    later, turn_places = batch[TURN_PIXELS], batch[TURN_PLACES]
    return [tiles + tuple(_cut(later[row], turn_places[row])) for row, tiles in enumerate(found)]


def kept(tiles: Tiles) -> Tiles:
    """The same with pixels of their own: those of a batch may lie in memory that is used again."""
    return tuple(replace(tile, pixels=tile.pixels.copy()) for tile in tiles)


def images(tiles: Sequence[Tile]) -> list[npt.NDArray[np.uint8]]:
    """One picture for each image, as people look at it: of one that was cut, the whole at a lower resolution, which is
    its last tile."""
    return [tile.pixels for tile, after in zip(tiles, [*tiles[1:], None]) if after is None or after.image != tile.image]
