"""Environments of several agents with PettingZoo's API: agents that act at once share one policy, a slot each; games of
two players who act in turn are duels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.duel import DuelSlots
from tidemill.environment.vector.slots import TERMINAL, TRUNCATED, Ints, Slots, Stepped
from tidemill.environment.vector.spaces import codec_of
from tidemill.errors import ConfigError, MissingExtra

Array = npt.NDArray[Any]


def make_agents(game: str, args: Mapping[str, Any], count: int, render: bool) -> Slots:
    """Of a module of the package pettingzoo, such as `butterfly.pistonball_v6` or `classic.connect_four_v3`."""
    try:
        importlib.import_module("pettingzoo")
        module = importlib.import_module(f"pettingzoo.{game}")
    except ImportError as error:
        if error.name == "pettingzoo":
            raise MissingExtra(f"environment pettingzoo:{game}", "pettingzoo", "control") from None
        raise ConfigError(
            f"environment pettingzoo:{game}: {error}", "name one of its modules, and install it"
        ) from error
    mode = {"render_mode": "rgb_array"} if render else {}
    if hasattr(module, "parallel_env"):
        return of_parallel(lambda: module.parallel_env(**mode, **args), count, f"pettingzoo:{game}")
    return DuelSlots(AgentGame([module.env(**mode, **args) for _ in range(count)], f"pettingzoo:{game}"), count)


def of_parallel(make: Callable[[], Any], count: int, name: str) -> Slots:
    """As many environments as have so many agents in all."""
    first = make()
    agents = len(first.possible_agents)
    if count % agents and count > 1:
        raise ConfigError(
            f"environment {name!r} has {agents} agents, a slot each, and train.samples_per_prompt times "
            f"prompts_per_step is {count}",
            f"use a multiple of {agents}",
        )
    return AgentSlots([first, *(make() for _ in range(max(1, count // agents) - 1))], name)


class AgentSlots:
    """Slot i is agent i % agents of environment i // agents. Agents of one environment begin together; one that ends
    before the others waits for them, and makes no decisions meanwhile."""

    is_joint = True

    def __init__(self, envs: Sequence[Any], name: str) -> None:
        self.envs, self.agents = list(envs), list(envs[0].possible_agents)
        spaces = {(str(envs[0].observation_space(a)), str(envs[0].action_space(a))) for a in self.agents}
        if len(spaces) > 1:
            raise ConfigError(
                f"environment {name!r} has agents with different observations or actions, which one policy cannot be",
                "wrap it so that they are the same (supersuit has pad_observations and pad_action_space)",
            )
        self.codec = codec_of(envs[0].observation_space(self.agents[0]), envs[0].action_space(self.agents[0]), name)
        self.spaces, self.count = self.codec.spaces, len(self.envs) * len(self.agents)
        shape = (self.count, *self.spaces.observation)
        self._seen: Array = np.zeros(shape, self.codec.dtype)
        self._finals: Array = np.zeros(shape, self.codec.dtype)
        self._live = np.zeros(self.count, np.bool_)

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        for i, env in enumerate(self.envs):
            self._begin(i, env, int(seeds[i * len(self.agents)]))
        return self._seen

    def _begin(self, i: int, env: Any, seed: int) -> None:
        seen, _ = env.reset(seed=seed)
        for k, agent in enumerate(self.agents):
            slot = i * len(self.agents) + k
            self._live[slot] = agent in seen
            if agent in seen:
                self.codec.write(self._seen[slot], seen[agent])

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        rewards, ends = np.zeros(self.count), np.zeros(self.count, np.uint8)
        made = self._live.copy()
        for i, env in enumerate(self.envs):
            own = range(i * len(self.agents), (i + 1) * len(self.agents))
            actions = {a: self.codec.move(moves[s]) for a, s in zip(self.agents, own) if self._live[s]}
            seen, gained, over, cut, _ = env.step(actions)
            for agent, slot in zip(self.agents, own):
                if not made[slot]:
                    continue
                rewards[slot] = gained.get(agent, 0.0)
                if agent in seen:
                    self.codec.write(self._seen[slot], seen[agent])
                if over.get(agent) or cut.get(agent) or agent not in seen:
                    ends[slot] = TRUNCATED if cut.get(agent) and not over.get(agent) else TERMINAL
                    self._finals[slot], self._live[slot] = self._seen[slot], False
            if not env.agents:
                self._begin(i, env, int(seeds[own[0]]))
        return Stepped(self._seen, rewards, ends, self._finals, made)

    def close(self) -> None:
        for env in self.envs:
            env.close()


class AgentGame:
    """A `TurnGame` of environments in which two agents act in turn."""

    def __init__(self, envs: Sequence[Any], name: str) -> None:
        self.envs, agents = list(envs), list(envs[0].possible_agents)
        if len(agents) != 2:
            raise ConfigError(f"environment {name!r} is played in turn by {len(agents)}, and duels are of two")
        self.order = {agent: i for i, agent in enumerate(agents)}
        self.codec = codec_of(envs[0].observation_space(agents[0]), envs[0].action_space(agents[0]), name)
        self.spaces = self.codec.spaces

    def begin(self, slots: Ints) -> None:
        for slot in slots.tolist():
            self.envs[slot].reset(seed=0)

    def seen(self, slots: Ints) -> Array:
        rows: Array = np.zeros((len(slots), *self.spaces.observation), self.codec.dtype)
        for row, slot in zip(rows, slots.tolist()):
            env = self.envs[slot]
            self.codec.write(row, env.observe(env.agent_selection))
        return rows

    def to_move(self, slots: Ints) -> Array:
        return np.array([self.order[self.envs[slot].agent_selection] for slot in slots.tolist()], np.int64)

    def move(self, slots: Ints, moves: Array) -> tuple[Array, Array]:
        over, gained = np.zeros(len(slots), np.bool_), np.zeros(len(slots))
        for i, (slot, move) in enumerate(zip(slots.tolist(), moves.tolist())):
            env = self.envs[slot]
            agent = env.agent_selection
            env.step(self.codec.move(np.array([move])))
            over[i] = all(env.terminations[a] or env.truncations[a] for a in env.agents) or not env.agents
            gained[i] = env.rewards.get(agent, 0.0)
        return over, gained
