"""The features of tiles, worked out once for each image and version of the weights, in batches as prompts are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill.models.upload import upload
from tidemill.models.vision.eyes.eyes import Eyes, Features, Seen, TilePixels
from tidemill.rollout.native.batch.sequences import Reading
from tidemill.tiles import Tile

KEPT_BYTES, ACCELERATOR_KEPT_BYTES = 1 << 28, 1 << 31
# Pixels that go through the tower at once: its activations are a few hundred bytes for each.
PIXELS, ACCELERATOR_PIXELS = 1 << 22, 1 << 24


class Looking:
    """`eyes`: None of a model that reads text alone, which sees nothing. `stays`: the tower is never learned, so new
    weights change no feature."""

    def __init__(self, eyes: Eyes | None, device: torch.device, stays: bool = False) -> None:
        self.eyes, self.device, self.stays = eyes, device, stays
        is_host = device.type == "cpu"
        self.most_bytes = KEPT_BYTES if is_host else ACCELERATOR_KEPT_BYTES
        self.most_pixels = PIXELS if is_host else ACCELERATOR_PIXELS
        self.kept: OrderedDict[bytes, Features] = OrderedDict()
        self.looks = 0  # tiles that went through the tower

    def seen(self, readings: Sequence[Reading], first: int) -> Seen | None:
        """Of a pass whose rows from `first` on are these readings', one after another."""
        wanted = list[tuple[Tile, int, int, int]]()  # a tile, which of its tokens, and where the first of them goes
        row = first
        for reading in readings:
            for tile in reading.trunk.scene.tiles if reading.trunk.scene is not None else ():
                low, high = max(tile.at, reading.first), min(tile.end, reading.last)
                if low < high:
                    wanted.append((tile, low - tile.at, high - tile.at, row + low - reading.first))
            row += reading.last - reading.first
        if not wanted or self.eyes is None:
            return None
        found = self._features(self.eyes, [tile for tile, *_ in wanted])
        rows = torch.cat([found[tile.digest].rows[low:high] for tile, low, high, _ in wanted])
        deep = None
        if self.eyes.levels:
            deep = torch.cat([found[tile.digest].deep[:, low:high] for tile, low, high, _ in wanted], 1)  # type: ignore[index]
        at = [place + i for _, low, high, place in wanted for i in range(high - low)]
        return Seen(upload(at, self.device), rows, deep)

    def _features(self, eyes: Eyes, tiles: Sequence[Tile]) -> dict[bytes, Features]:
        """By digest. What is asked for stays until it is used, however little room there is."""
        asked = {tile.digest: tile for tile in tiles}
        found = {digest: self.kept[digest] for digest in asked if digest in self.kept}
        for digest in found:
            self.kept.move_to_end(digest)
        for part in self._parts([tile for digest, tile in asked.items() if digest not in found]):
            self.looks += len(part)
            made = eyes.features(TilePixels.of(part, self.device))
            places = [tile.tokens for tile in part]
            deep = [None] * len(part) if made.deep is None else torch.split(made.deep, places, 1)
            for tile, rows, levels in zip(part, torch.split(made.rows, places), deep):
                found[tile.digest] = self.kept[tile.digest] = Features(rows, levels)
        self._make_room()
        return found

    def _parts(self, tiles: list[Tile]) -> list[list[Tile]]:
        parts, pixels = list[list[Tile]](), 0
        for tile in tiles:
            size = tile.size[0] * tile.size[1]
            if not parts or pixels + size > self.most_pixels:
                parts.append([])
                pixels = 0
            parts[-1].append(tile)
            pixels += size
        return parts

    def _make_room(self) -> None:
        held = sum(_bytes(features) for features in self.kept.values())
        while held > self.most_bytes:
            _, features = self.kept.popitem(last=False)
            held -= _bytes(features)

    def new_weights(self) -> None:
        if not self.stays:
            self.kept.clear()

    def clear(self) -> None:
        """Give the memory back."""
        self.kept.clear()


def _bytes(features: Features) -> int:
    parts: list[Tensor] = [features.rows, *([] if features.deep is None else [features.deep])]
    return sum(part.nbytes for part in parts)
