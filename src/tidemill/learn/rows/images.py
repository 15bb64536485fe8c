"""The images of a packed row: which tiles it shows, which of its tokens take which of their features, where its tokens
turn, and which of them see ahead. A tile that several samples show is looked at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill import tiles
from tidemill.batch import Array, Batch
from tidemill.errors import DataError
from tidemill.models.attention.ahead import Run, SeesAhead
from tidemill.models.attention.registry import Context
from tidemill.models.upload import upload
from tidemill.models.vision.eyes.eyes import Eyes, TilePixels, positions, until
from tidemill.tiles import Tile, Tiles

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Places `first` to `last` of a sample lie in the packed row from `start` on; where they are a response behind a
    shared prompt, that lies from `prompt` on."""

    row: int
    first: int
    last: int
    start: int
    prompt: int = 0

    def place(self, at: Ints) -> Ints:
        """Where places of the sample are in the packed row."""
        return np.where(at < self.first, self.prompt + at, self.start + at - self.first)


@dataclass(frozen=True, slots=True)
class Look:
    """Of one packed row, or of a rank's part of it."""

    tiles: TilePixels
    at: Tensor  # (seen,) tokens of the row
    which: Tensor  # (seen,) rows of the tiles' features

    def of(self, own: Tensor, tokens: int) -> Look:
        """Of a rank that has the tokens `own` of a row of `tokens`."""
        place = torch.full((tokens,), -1, dtype=torch.int64, device=own.device)
        place[own] = torch.arange(len(own), device=own.device)
        at = place[self.at]
        kept = torch.nonzero(at >= 0)[:, 0]
        return replace(self, at=at[kept], which=self.which[kept])


@dataclass(frozen=True, slots=True)
class Shown:
    """What the samples of a batch show, sample by sample, to a model that looks."""

    eyes: Eyes
    rows: Sequence[Tiles]
    lengths: Ints  # tokens of each sample

    @staticmethod
    def of(batch: Batch, eyes: Eyes | None) -> Shown | None:
        if eyes is None:
            return None
        shown = Shown(eyes, tiles.of_batch(batch), batch["tokens"].lengths)
        for row in range(batch.rows):
            shown._refuse_misplaced(batch, row)
        return shown

    def _refuse_misplaced(self, batch: Batch, row: int) -> None:
        """An image that is lost gives numbers as any other does. Of places that a model wrote nothing is asked."""
        tokens, prompt = np.asarray(batch["tokens"][row]), int(batch.values("prompt_length")[row])
        taken = np.zeros(len(tokens), np.bool_)
        for tile in self.rows[row]:
            taken[tile.at : tile.end] = True
        is_place = tokens == self.eyes.view.token
        is_made = np.asarray(batch["mask"][row]) != 0 if "mask" in batch else ~taken[prompt:]
        is_place[prompt:] &= ~is_made
        if not np.array_equal(is_place, taken):
            raise DataError(
                f"a sample has {int(is_place.sum())} places for images, and its tiles take {int(taken.sum())}",
                "its images were lost on the way, or belong to other rows",
            )

    def positions(self, parts: Sequence[Part]) -> Array:
        """(inputs,), or (4, inputs) of a model that turns by time, height and width."""
        made = [self._positions(part.row)[..., part.first : part.last] for part in parts]
        return np.concatenate(made, -1)

    def _positions(self, row: int) -> Array:
        count = int(self.lengths[row])
        return positions(count, self.rows[row], self.eyes.view) if self.eyes.has_axes else np.arange(count)

    def look(self, parts: Sequence[Part], device: torch.device) -> Look | None:
        first_of: dict[int, int] = {}  # of each tile, its first row of features; a group's rows share the objects
        kept: list[Tile] = []
        at, which, done = list[Ints](), list[Ints](), 0
        for part in parts:
            for tile in self.rows[part.row]:
                own = np.arange(max(tile.at, part.first), min(tile.end, part.last))
                if not len(own):
                    continue
                if id(tile) not in first_of:
                    first_of[id(tile)] = done
                    kept.append(tile)
                    done += tile.tokens
                at.append(part.place(own))
                which.append(first_of[id(tile)] + own - tile.at)
        if not kept:
            return None
        places = (upload(np.concatenate(x), device) for x in (at, which))
        return Look(TilePixels.of(kept, device), *places)

    def context(self, context: Context, parts: Sequence[Part], device: torch.device) -> Context:
        """As it is, or around it one in which images are seen whole."""
        if self.eyes.ahead == "never":
            return context
        runs = [run for part in parts for run in self._runs(part)]
        return SeesAhead(context, runs, self.eyes.ahead == "windows", device) if runs else context

    def _runs(self, part: Part) -> Iterator[Run]:
        ends = until(int(self.lengths[part.row]), self.rows[part.row])
        for end in np.unique(ends[ends > np.arange(len(ends)) + 1]).tolist():
            own = np.flatnonzero(ends == end)
            if part.first <= own[0] and end <= part.last:
                yield Run(part.place(own), part.place(np.arange(end)))
