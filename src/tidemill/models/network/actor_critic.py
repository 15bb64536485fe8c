"""A policy and a critic that values states: what PPO, A2C and REINFORCE learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.models.network import fused
from tidemill.models.network.layers import begin_head, trunk_of
from tidemill.models.network.network import ENDS, Network, Steps
from tidemill.models.policy import Acted, Array, Floats, Scores
from tidemill.models.spaces import Spaces
from tidemill.recipe.model import PolicySettings

SMALL = 0.01  # gain of the policy's last layer


class ActorCritic(Network):
    """Dense policies have a critic of their own; over pixels and with a memory both read the same features."""

    def __init__(self, settings: PolicySettings, spaces: Spaces) -> None:
        super().__init__(settings, spaces)
        self.trunk: Any = trunk_of(settings, spaces)
        has_critic = settings.judges != "nothing"
        is_apart = has_critic and settings.kind == "mlp"
        self.critic_trunk: Any = trunk_of(settings, spaces) if is_apart else None
        width = settings.hidden[-1]
        self.out = begin_head(nn.Linear(width, self.head.width), settings, SMALL)
        self.value = begin_head(nn.Linear(width, 1), settings, 1.0) if has_critic else None
        self.state_width = width if settings.kind == "gru" else 0
        self._served: fused.Serving | None = None

    # Deciding

    @torch.no_grad()
    def act(
        self, observations: Array, noise: Floats | None, state: Floats | None = None, explore: float = 0.0
    ) -> Acted:
        out, values, after = self._read(observations, state)
        actions, logprobs = self.head.sample(out, observations, noise)
        return Acted(actions, logprobs, values, after)

    @torch.no_grad()
    def judge(self, observations: Array, state: Floats | None = None) -> Floats:
        values = self._read(observations, state)[1]
        return np.zeros(len(observations), np.float32) if values is None else values

    def serve(self) -> None:
        self._served = fused.Serving(self) if fused.fits(self) else None

    def _read(self, observations: Array, state: Floats | None) -> tuple[Floats, Floats | None, Floats | None]:
        if self._served is not None:
            rows = np.ascontiguousarray(observations, np.float32).reshape(len(observations), self.width)
            critic = self._served.critic
            return self._served.policy(rows), None if critic is None else critic(rows)[:, 0], None
        x = self.prepared(self.upload(observations))
        before = None if state is None else torch.from_numpy(state).to(self.device)
        own, judged = self._features(x, before)
        values = None if self.value is None else self.value(judged)[:, 0].cpu().numpy()
        after = own.cpu().numpy() if self.state_width else None
        return self.out(own).cpu().numpy(), values, after

    def _features(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        own = self.trunk(x, state) if self.state_width else self.trunk(x)
        return own, own if self.critic_trunk is None else self.critic_trunk(x)

    # Learning

    def learns_fused(self) -> bool:
        return fused.fits(self)

    def score(self, steps: Steps, units: Array, draw: torch.Generator) -> Scores:
        if self.state_width:
            return self._score_fragments(steps, units)
        chosen = self.places(units)
        observations = steps.observations.index_select(0, chosen)
        own, judged = self._features(self.prepared(observations), None)
        return self._scores(own, judged, steps.actions.index_select(0, chosen), observations)

    def _scores(self, own: Tensor, judged: Tensor, actions: Tensor, observations: Tensor) -> Scores:
        flat = observations.reshape(len(observations), -1)
        logprobs, entropy = self.head.score(self.out(own), actions, flat)
        return Scores(logprobs, entropy, None if self.value is None else self.value(judged)[:, 0])

    def _score_fragments(self, steps: Steps, units: Array) -> Scores:
        """Through time: all fragments side by side, a memory cleared where an episode ended before. The result is in
        the order of the decisions."""
        units = np.sort(np.asarray(units, np.int64))
        lengths, starts = steps.lengths[units], (np.cumsum(steps.lengths) - steps.lengths)[units]
        assert steps.state is not None
        state = steps.state.index_select(0, self.places(units))
        x, goes_on = self.prepared(steps.observations), (steps.columns[ENDS] == 0).to(state.dtype)
        made, places = list[Tensor](), list[Array]()
        for t in range(int(lengths.max(initial=0))):
            live = np.flatnonzero(lengths > t)
            rows, at = self.places(live), self.places(starts[live] + t)
            before = state.index_select(0, rows)
            if t:
                before = before * goes_on.index_select(0, at - 1)[:, None]
            after = self.trunk(x.index_select(0, at), before)
            state = state.index_copy(0, rows, after)
            made.append(after)
            places.append(starts[live] + t)
        order = np.argsort(np.concatenate(places), kind="stable")
        at = self.places(np.concatenate(places)[order])
        own = torch.cat(made).index_select(0, self.places(order))
        return self._scores(own, own, steps.actions.index_select(0, at), steps.observations.index_select(0, at))
