"""The seam between a model and those who use it: what a learner and an engine need of any policy.

A decoder meets it through `learn.model.MeshModel`, which packs tokens, and the native engine, which decodes them. A
network meets it by itself (`models/network/`): it is small, whole on every rank, and its decisions need no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.batch import Batch, Column
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Acted:
    """What a policy did with some observations, one row each."""

    actions: Array  # as they were drawn
    logprobs: Floats
    values: Floats | None = None  # of the observations
    state: Floats | None = None  # of a policy with a memory, after these observations


@dataclass(frozen=True, slots=True)
class Scores:
    """What a network says of decisions, with gradient: `more` is whatever its algorithm's loss reads beside."""

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """A network that decides. `units` are what a minibatch is made of: decisions, or with a memory whole fragments."""

    spaces: Spaces
    state_width: int  # of its memory; 0: none

    # What an engine needs

    def act(
        self, observations: Array, noise: Floats | None, state: Floats | None = None, explore: float = 0.0
    ) -> Acted:
        """Decide for a batch. Without noise: the likeliest actions. `explore`: share of decisions at random."""

    def judge(self, observations: Array, state: Floats | None = None) -> Floats:
        """Values of observations."""

    def moves(self, actions: Array) -> Array:
        """What environments are given."""

    # What a learner needs

    def steps(self, batches: list[Batch]) -> Any:
        """Samples as flat tensors."""

    def score(self, steps: Any, units: Array, draw: torch.Generator) -> Scores: ...

    def updated(self, follow: float) -> None:
        """A gradient step was made: target networks go this share of the way."""

    def told(self, batches: list[Batch]) -> Doubles:
        """What running statistics need of samples, in a form that adds up over ranks."""

    def absorb(self, told: Doubles) -> None: ...

    def logprobs(self, batch: Batch) -> Column:
        """Of every decision, under the weights as they are now."""
