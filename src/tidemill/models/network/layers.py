"""What reads observations: dense layers, convolutions over pixels, or a recurrent cell with a memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tidemill.models.spaces import Spaces
from tidemill.recipe.model import PolicySettings

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
LARGE = 36  # pixels of a side from which the convolutions of Mnih et al. 2015 fit


def dense(width: int, settings: PolicySettings) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide in settings.hidden:
        layers += [nn.Linear(width, wide), ACTIVATIONS[settings.activation]()]
        width = wide
    return nn.Sequential(*layers)


class Pixels(nn.Module):
    """Bytes (n, channels, height, width), or channels last where that is the smallest side, to features."""

    def __init__(self, shape: Sequence[int], settings: PolicySettings) -> None:
        super().__init__()
        self.is_last = shape[-1] == min(shape)
        channels, *sides = (shape[-1], *shape[:-1]) if self.is_last else shape
        plan: tuple[tuple[int, int, int], ...]
        if min(sides) >= LARGE:
            plan = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
        else:
            plan = ((16, 3, 1), (32, 3, 1))
        layers: list[nn.Module] = []
        for out, kernel, stride in plan:
            layers += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU()]
            channels = out
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            width = self.convolutions(torch.zeros(1, *self._first(shape), *sides)).shape[1]
        self.dense = dense(width, settings)

    def _first(self, shape: Sequence[int]) -> tuple[int]:
        return (shape[-1] if self.is_last else shape[0],)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() / 255.0
        features: Tensor = self.dense(self.convolutions(x.movedim(-1, 1) if self.is_last else x))
        return features


class Memory(nn.Module):
    """Dense layers into a gated recurrent unit (Cho et al. 2014), whose state is the feature."""

    def __init__(self, width: int, settings: PolicySettings) -> None:
        super().__init__()
        self.dense = dense(width, settings)
        self.width = settings.hidden[-1]
        self.cell = nn.GRUCell(self.width, self.width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        after: Tensor = self.cell(self.dense(x), state)
        return after


def begin_orthogonal(module: nn.Module, gain: float = math.sqrt(2.0)) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(part.weight, gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def begin_head(layer: nn.Linear, settings: PolicySettings, gain: float) -> nn.Linear:
    """A policy that begins with small outputs is nearly the same everywhere."""
    if settings.orthogonal:
        begin_orthogonal(layer, gain)
    return layer


def trunk_of(settings: PolicySettings, spaces: Spaces) -> Any:
    if settings.kind == "cnn":
        made: nn.Module = Pixels(spaces.observation, settings)
    elif settings.kind == "gru":
        made = Memory(math.prod(spaces.observation), settings)
    else:
        made = dense(math.prod(spaces.observation), settings)
    if settings.orthogonal:
        begin_orthogonal(made)
    return made
