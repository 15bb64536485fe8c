"""What an action is drawn from. Each head draws in numpy, for rollout, and scores in torch, for learning; the tests
compare the two.

Actions are kept as they were drawn; `moves` makes of them what an environment is given. Noise comes from outside, so
that an action depends on its own place in the run alone.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.models.spaces import Spaces
from tidemill.recipe.model import PolicySettings

Floats = npt.NDArray[np.float32]
Drawn = tuple[npt.NDArray[Any], Floats]  # actions and their log-probabilities
Scored = tuple[Tensor, Tensor]  # log-probabilities and entropies
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
ILLEGAL = -1e9  # logit of a choice that must not be made
LOG_STD = (-20.0, 2.0)  # of a Gaussian whose width depends on the observation


class Head(Protocol):
    width: int  # of what it is given
    draws: int  # numbers of noise for one decision
    is_uniform: bool  # noise is from 0 to 1, else standard normal
    dtype: type

    def sample(self, out: Floats, observations: npt.NDArray[Any], noise: Floats | None) -> Drawn:
        """Without noise: the likeliest action."""

    def score(self, out: Tensor, actions: Tensor, observations: Tensor) -> Scored: ...

    def moves(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What the environment is given."""


class Categorical(torch.nn.Module):
    """One choice, or several independent ones (multi-discrete). With a mask, illegal choices have no probability."""

    is_uniform, dtype = True, np.int32

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.choices = spaces.choices
        self.width, self.draws = sum(spaces.choices), len(spaces.choices)
        ends = list(accumulate(spaces.choices))
        self.parts = [slice(end - n, end) for end, n in zip(ends, spaces.choices)]
        self.is_masked = spaces.masked

    def sample(self, out: Floats, observations: npt.NDArray[Any], noise: Floats | None) -> Drawn:
        if self.is_masked:
            out = np.where(observations[:, -self.width :] > 0.5, out, np.float32(ILLEGAL))
        rows = np.arange(len(out))
        actions = np.empty((len(out), self.draws), np.int32)
        logprobs = np.zeros(len(out), np.float32)
        for i, part in enumerate(self.parts):
            logits = out[:, part] - out[:, part].max(1, keepdims=True)
            weights = np.exp(logits)
            sums = weights.cumsum(1)
            whole = sums[:, -1]
            if noise is None:
                chosen = logits.argmax(1)
            else:
                chosen = (sums < (noise[:, i] * whole)[:, None]).sum(1).clip(max=logits.shape[1] - 1)
            actions[:, i] = chosen
            logprobs += logits[rows, chosen] - np.log(whole)
        return actions, logprobs

    def score(self, out: Tensor, actions: Tensor, observations: Tensor) -> Scored:
        if self.is_masked:
            out = out.masked_fill(observations[:, -self.width :] < 0.5, ILLEGAL)
        logprobs, entropy = out.new_zeros(len(out)), out.new_zeros(len(out))
        for i, part in enumerate(self.parts):
            own = torch.log_softmax(out[:, part], 1)
            logprobs = logprobs + own.gather(1, actions[:, i : i + 1].long())[:, 0]
            entropy = entropy - (own.exp() * own).sum(1)
        return logprobs, entropy

    def moves(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return actions


class Gaussian(torch.nn.Module):
    """Independent normal numbers; the width is learned and the same everywhere. Moves are kept within the bounds."""

    is_uniform, dtype = False, np.float32

    def __init__(self, spaces: Spaces, log_std: float) -> None:
        super().__init__()
        self.width = self.draws = spaces.dimensions
        self.low, self.high = _bounds(spaces)
        self.log_std = torch.nn.Parameter(torch.full((spaces.dimensions,), log_std))

    def sample(self, out: Floats, observations: npt.NDArray[Any], noise: Floats | None) -> Drawn:
        log_std = self.log_std.detach().cpu().numpy()
        z = np.zeros_like(out) if noise is None else noise
        logprobs = -(np.square(z).sum(1) * 0.5 + (log_std.sum() + HALF_LOG_2PI * self.width))
        return out + np.exp(log_std) * z, logprobs.astype(np.float32)

    def score(self, out: Tensor, actions: Tensor, observations: Tensor) -> Scored:
        z = (actions - out) * torch.exp(-self.log_std)
        constant = self.log_std.sum() + HALF_LOG_2PI * self.width
        return -(0.5 * z.square().sum(1) + constant), (constant + 0.5 * self.width).expand(len(out))

    def moves(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return actions.clip(self.low, self.high)


class SquashedGaussian(torch.nn.Module):
    """tanh of normal numbers, stretched over the bounds; mean and width depend on the observation (Haarnoja et al.
    2018).

    An action is kept as it was before the tanh, where its log-probability is exact. The entropy is one sample's −log π.
    """

    is_uniform, dtype = False, np.float32

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.draws, self.width = spaces.dimensions, 2 * spaces.dimensions
        self.low, self.high = _bounds(spaces)
        self.middle, self.reach = (self.high + self.low) / 2, (self.high - self.low) / 2

    def sample(self, out: Floats, observations: npt.NDArray[Any], noise: Floats | None) -> Drawn:
        with torch.no_grad():
            mean, log_std = self.parts(torch.from_numpy(out))
            z = torch.zeros_like(mean) if noise is None else torch.from_numpy(noise)
            actions = mean + log_std.exp() * z
            return actions.numpy(), self._logprobs(z, log_std, actions).numpy()

    def parts(self, out: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = out.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def drawn(self, out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions within −1 and 1, and log-probabilities, both with gradient."""
        mean, log_std = self.parts(out)
        actions = mean + log_std.exp() * noise
        return actions.tanh(), self._logprobs(noise, log_std, actions)

    def score(self, out: Tensor, actions: Tensor, observations: Tensor) -> Scored:
        mean, log_std = self.parts(out)
        logprobs = self._logprobs((actions - mean) * torch.exp(-log_std), log_std, actions)
        return logprobs, -logprobs

    def _logprobs(self, z: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
        """log N − log |d tanh|, with log(1 − tanh² u) = 2 (log 2 − u − softplus(−2u))."""
        slope = 2.0 * (math.log(2.0) - actions - torch.nn.functional.softplus(-2.0 * actions))
        return -(0.5 * z.square() + log_std + HALF_LOG_2PI + slope).sum(-1)

    def squashed(self, actions: Tensor) -> Tensor:
        """Within −1 and 1, as critics see them."""
        return actions.tanh()

    def moves(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(self.middle + self.reach * np.tanh(actions))


def _bounds(spaces: Spaces) -> tuple[Floats, Floats]:
    """Where there are none, the widest that a float32 has."""
    most = float(np.finfo(np.float32).max)
    low, high = spaces.low or (-most,) * spaces.dimensions, spaces.high or (most,) * spaces.dimensions
    return np.array(low, np.float32), np.array(high, np.float32)


def head_of(settings: PolicySettings, spaces: Spaces) -> Any:
    if spaces.choices:
        return Categorical(spaces)
    if settings.head == "squashed_gaussian":
        return SquashedGaussian(spaces)
    return Gaussian(spaces, settings.log_std)
