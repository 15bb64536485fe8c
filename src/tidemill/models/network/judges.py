"""Networks whose critics value actions, with targets that follow slowly: what SAC and DQN learn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.models.network.layers import ACTIVATIONS, begin_orthogonal, dense
from tidemill.models.network.network import Network, Steps
from tidemill.models.policy import Acted, Array, Floats, Scores
from tidemill.models.spaces import Spaces
from tidemill.recipe.model import PolicySettings

CERTAIN = 1.0 - 1e-6  # an action that is drawn evenly stays inside its bounds


class Critics(nn.Module):
    """`count` dense networks side by side: (rows, in) → (count, rows, out). As a target its weights are buffers."""

    def __init__(self, count: int, sizes: Iterable[int], activation: str, is_target: bool = False) -> None:
        super().__init__()
        self.count, self.activation = count, ACTIVATIONS[activation]()
        widths = list(sizes)
        self.layers = len(widths) - 1
        for i, (wide, out) in enumerate(pairwise(widths)):
            bound = 1.0 / math.sqrt(wide)
            for name, shape in ((f"weight{i}", (count, wide, out)), (f"bias{i}", (count, 1, out))):
                begun = torch.empty(shape).uniform_(-bound, bound)
                if is_target:
                    self.register_buffer(name, begun)
                else:
                    self.register_parameter(name, nn.Parameter(begun))

    def forward(self, x: Tensor, is_fixed: bool = False) -> Tensor:
        """`is_fixed`: a gradient goes through to the input, none to the weights."""
        x = x.expand(self.count, -1, -1)
        for i in range(self.layers):
            weight, bias = getattr(self, f"weight{i}"), getattr(self, f"bias{i}")
            x = torch.baddbmm(bias.detach() if is_fixed else bias, x, weight.detach() if is_fixed else weight)
            x = self.activation(x) if i < self.layers - 1 else x
        return x

    def follow(self, other: Critics, share: float) -> None:
        """Go this share of the way to another's weights."""
        own = [getattr(self, name) for name, _ in other.named_parameters()]
        torch._foreach_lerp_(own, list(other.parameters()), share)


class SoftActorCritic(Network):
    """A squashed Gaussian policy, two critics of its actions, their targets, a temperature (Haarnoja et al. 2018)."""

    def __init__(self, settings: PolicySettings, spaces: Spaces) -> None:
        super().__init__(settings.model_copy(update={"head": "squashed_gaussian"}), spaces)
        self.trunk = dense(self.width, settings)
        self.out = nn.Linear(settings.hidden[-1], self.head.width)
        if settings.orthogonal:
            begin_orthogonal(self.trunk)
        sizes = [self.width + spaces.dimensions, *settings.hidden, 1]
        self.critics = Critics(2, sizes, settings.activation)
        self.targets = Critics(2, sizes, settings.activation, is_target=True)
        with torch.no_grad():
            self.targets.follow(self.critics, 1.0)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def act(
        self, observations: Array, noise: Floats | None, state: Floats | None = None, explore: float = 0.0
    ) -> Acted:
        if explore and noise is not None:  # evenly over the bounds
            even = 2.0 * torch.special.ndtr(torch.from_numpy(noise).double()) - 1.0
            actions = torch.atanh(even.clamp(-CERTAIN, CERTAIN)).float().numpy()
            return Acted(actions, np.zeros(len(actions), np.float32))
        out = self.out(self.trunk(self.prepared(self.upload(observations)))).cpu().numpy()
        return Acted(*self.head.sample(out, observations, noise))

    @torch.no_grad()
    def judge(self, observations: Array, state: Floats | None = None) -> Floats:
        x = self.prepared(self.upload(observations))
        likeliest = self.head.parts(self.out(self.trunk(x)))[0]
        values: Floats = self.critics(torch.cat([x, likeliest.tanh()], 1)).amin(0)[:, 0].cpu().numpy()
        return values

    def score(self, steps: Steps, units: Array, draw: torch.Generator) -> Scores:
        """What the losses read: q1 and q2 of the actions that were taken, `q_next` of the states they led to (under the
        targets, with the entropy there), `q_new` of an action drawn now, and that one's log-probability."""
        at = self.places(units)
        x = self.prepared(steps.observations.index_select(0, at))
        taken = self.head.squashed(steps.actions.index_select(0, at))
        noise = torch.randn(2, len(at), self.head.draws, generator=draw).to(self.device)
        assert steps.next_observations is not None
        with torch.no_grad():
            after = self.prepared(steps.next_observations.index_select(0, at))
            following, logprob = self.head.drawn(self.out(self.trunk(after)), noise[0])
            q_next = self.targets(torch.cat([after, following], 1)).amin(0)[:, 0] - self.log_alpha.exp() * logprob
        q = self.critics(torch.cat([x, taken], 1))[..., 0]
        drawn, logprobs = self.head.drawn(self.out(self.trunk(x)), noise[1])
        q_new = self.critics(torch.cat([x, drawn], 1), is_fixed=True).amin(0)[:, 0]
        more = {"q1": q[0], "q2": q[1], "q_next": q_next, "q_new": q_new, "log_alpha": self.log_alpha.expand(len(at))}
        return Scores(logprobs, -logprobs, None, more)

    @torch.no_grad()
    def updated(self, follow: float) -> None:
        self.targets.follow(self.critics, follow)


class ValuesOfChoices(Network):
    """A value for every choice, and their targets (Mnih et al. 2015); the best is taken, or now and then any."""

    def __init__(self, settings: PolicySettings, spaces: Spaces) -> None:
        super().__init__(settings, spaces)
        self.head.draws = 2  # whether to explore, and what
        sizes = [self.width, *settings.hidden, spaces.choices[0]]
        self.critics = Critics(1, sizes, settings.activation)
        self.targets = Critics(1, sizes, settings.activation, is_target=True)
        with torch.no_grad():
            self.targets.follow(self.critics, 1.0)

    @torch.no_grad()
    def act(
        self, observations: Array, noise: Floats | None, state: Floats | None = None, explore: float = 0.0
    ) -> Acted:
        values = self._legal(self.critics(self.prepared(self.upload(observations)))[0], observations).cpu().numpy()
        chosen = values.argmax(1)
        if noise is not None:
            legal = np.isfinite(values)
            places = (noise[:, 1] * legal.sum(1)).astype(np.int64)  # the how manieth legal choice
            any_choice = (legal.cumsum(1) > places[:, None]).argmax(1)
            chosen = np.where(noise[:, 0] < explore, any_choice, chosen)
        return Acted(chosen[:, None].astype(np.int32), np.zeros(len(values), np.float32))

    def _legal(self, values: Tensor, observations: Any) -> Tensor:
        if not self.mask_width:
            return values
        seen = torch.as_tensor(observations).reshape(len(values), -1)[:, -self.mask_width :].to(values.device)
        return values.masked_fill(seen < 0.5, -math.inf)

    @torch.no_grad()
    def judge(self, observations: Array, state: Floats | None = None) -> Floats:
        values = self._legal(self.critics(self.prepared(self.upload(observations)))[0], observations)
        best: Floats = values.amax(1).cpu().numpy()
        return best

    def score(self, steps: Steps, units: Array, draw: torch.Generator) -> Scores:
        """`q` of the choices that were made; `q_next` of the best ones after them: chosen by these values, judged
        by the targets (van Hasselt et al. 2016)."""
        at = self.places(units)
        values = self.critics(self.prepared(steps.observations.index_select(0, at)))[0]
        q = values.gather(1, steps.actions.index_select(0, at)[:, :1].long())[:, 0]
        assert steps.next_observations is not None
        with torch.no_grad():
            later = steps.next_observations.index_select(0, at)
            after = self.prepared(later)
            best = self._legal(self.critics(after)[0], later).argmax(1, keepdim=True)
            q_next = self.targets(after)[0].gather(1, best)[:, 0]
        return Scores(torch.zeros_like(q.detach()), None, None, {"q": q, "q_next": q_next})

    @torch.no_grad()
    def updated(self, follow: float) -> None:
        self.targets.follow(self.critics, follow)
