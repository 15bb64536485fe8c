"""What networks have in common: statistics of observations and rewards, and samples as flat tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tidemill.batch import ID, Batch, Column
from tidemill.models.network.heads import head_of
from tidemill.models.network.running import Running, moments
from tidemill.models.policy import Array, Doubles, Scores
from tidemill.models.spaces import Spaces
from tidemill.recipe.model import PolicySettings

OBSERVATIONS, ACTIONS, NEXT, STATE, ENDS = "observations", "actions", "next_observations", "state", "ends"
NOT_FLAT = (OBSERVATIONS, NEXT, STATE)
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Steps:
    """Decisions of some fragments, one after the other. `columns`: everything else that has a number per decision."""

    observations: Tensor  # (decisions, …)
    actions: Tensor  # (decisions, parts)
    columns: Mapping[str, Tensor]
    ids: Ints  # of the fragments
    lengths: Ints
    next_observations: Tensor | None = None
    state: Tensor | None = None  # (fragments, width) of a memory, before the first decision

    @property
    def count(self) -> int:
        return len(self.observations)

    def decisions(self, units: Ints, are_fragments: bool) -> Ints:
        """Which decisions some units are, ascending where the units are fragments."""
        if not are_fragments:
            return units
        starts = np.cumsum(self.lengths) - self.lengths
        own = [np.arange(starts[i], starts[i] + self.lengths[i]) for i in sorted(units.tolist())]
        return np.concatenate(own) if own else np.empty(0, np.int64)


class Network(nn.Module):
    state_width = 0

    def __init__(self, settings: PolicySettings, spaces: Spaces) -> None:
        super().__init__()
        self.settings, self.spaces = settings, spaces
        self.head: Any = head_of(settings, spaces)
        self.width = math.prod(spaces.observation)
        has = settings.normalise
        self.seen = Running(self.width - self.mask_width) if "observations" in has and not spaces.pixels else None
        self.gained = Running(1) if "rewards" in has else None

    @property
    def mask_width(self) -> int:
        """Entries of an observation that say what is legal, which no statistics change."""
        return sum(self.spaces.choices) if self.spaces.masked else 0

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def reward_scale(self) -> float:
        return 1.0 if self.gained is None else float(self.gained.scale)

    def prepared(self, observations: Tensor) -> Tensor:
        """As the layers take them."""
        if self.spaces.pixels:
            return observations
        x = observations.reshape(len(observations), self.width)
        if self.seen is None:
            return x
        cut = self.width - self.mask_width
        return torch.cat([self.seen(x[:, :cut]), x[:, cut:]], 1) if self.mask_width else self.seen(x)

    def upload(self, array: Array) -> Tensor:
        kind = np.uint8 if self.spaces.pixels else np.float32
        return torch.from_numpy(np.ascontiguousarray(array, kind)).to(self.device)

    def places(self, units: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(units, np.int64)).to(self.device)

    def moves(self, actions: Array) -> Array:
        moves: Array = self.head.moves(actions)
        return moves

    def serve(self) -> None:
        """The weights are new: rollout decides with them from now on."""

    # Learning

    def steps(self, batches: Sequence[Batch]) -> Steps | None:
        if not batches:
            return None
        batch = Batch.concat(list(batches))
        flat = {name: column.gather(np.arange(batch.rows)).values for name, column in batch.items() if _is_flat(column)}
        wanted = {name: values for name, values in flat.items() if name not in NOT_FLAT and values.ndim == 1}
        columns = {name: self._column(values) for name, values in wanted.items() if values.dtype.kind in "fu"}
        return Steps(
            observations=self.upload(flat[OBSERVATIONS]),
            actions=torch.from_numpy(np.ascontiguousarray(flat[ACTIONS])).to(self.device),
            columns=columns,
            ids=batch.values(ID).astype(np.int64),
            lengths=batch[ACTIONS].lengths.astype(np.int64),
            next_observations=self.upload(flat[NEXT]) if NEXT in flat else None,
            state=torch.from_numpy(np.array(batch.values(STATE))).to(self.device) if STATE in batch else None,
        )

    def _column(self, values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.device)

    def columns(self, steps: Steps, units: Array) -> dict[str, Tensor]:
        """Of some units' decisions, in the order of their scores."""
        chosen = self.places(steps.decisions(units, bool(self.state_width)))
        return {name: column.index_select(0, chosen) for name, column in steps.columns.items()}

    def score(self, steps: Steps, units: Array, draw: torch.Generator) -> Scores:
        raise NotImplementedError

    def learns_fused(self) -> bool:
        """Whether `fused.update` may take all gradient steps of an update."""
        return False

    def updated(self, follow: float) -> None:
        """Nothing follows."""

    def told(self, batches: Sequence[Batch]) -> Doubles:
        parts = [np.zeros(0)]
        if self.seen is not None:
            width = self.width - self.mask_width
            seen = [b.values(OBSERVATIONS).reshape(-1, self.width)[:, :width] for b in batches]
            parts.append(moments(np.concatenate(seen) if seen else np.zeros((0, width))))
        if self.gained is not None:
            gained = [b.values("gains").astype(np.float64) for b in batches]
            parts.append(np.concatenate(gained).sum(0) if gained else np.zeros(3))
        return np.concatenate(parts)

    @torch.no_grad()
    def absorb(self, told: Doubles) -> None:
        at = 0
        for own in (self.seen, self.gained):
            if own is not None:
                size = 1 + 2 * len(own.mean)
                own.absorb(told[at : at + size])
                at += size

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Column:
        steps = self.steps([batch])
        assert steps is not None
        units = np.arange(steps.count if not self.state_width else len(steps.lengths))
        scored = self.score(steps, units, torch.Generator()).logprobs.cpu().numpy()
        return Column(scored, np.concatenate([[0], np.cumsum(steps.lengths)]).astype(np.int64))

    # What decoders have, and networks do not

    def get_decoder(self) -> nn.Module:
        return nn.ModuleDict({"layers": nn.ModuleList()})


def _is_flat(column: Column) -> bool:
    return column.offsets is not None and not column.is_text
