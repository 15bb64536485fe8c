"""Environments that step together, each in a slot of its own.

A slot whose episode ends begins the next one at once, with the seed that it is given for it: `Stepped.observations`
then show the new episode, and `finals` the last observation of the old one. So the caller knows at every moment what
state a slot is in: the seed of its episode and the moves since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.spaces import Codec
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
GOES_ON, TERMINAL, TRUNCATED = 0, 1, 2  # what `ends` holds: an episode that is truncated would have gone on


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step came to, one row for each slot that was stepped. Valid until the next step."""

    observations: Array
    rewards: npt.NDArray[np.float64]
    ends: npt.NDArray[np.uint8]
    finals: Array  # of slots that ended; other rows mean nothing
    made: npt.NDArray[np.bool_] | None = (
        None  # False: the move was not used, for the slot only began anew; None: all were
    )


class Slots(Protocol):
    count: int
    spaces: Spaces
    is_joint: bool  # slots cannot be stepped or begun one by one: their past is one

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        """Begin new episodes; their first observations."""

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        """`seeds`: of the next episodes, of slots that end. `slots` are ascending."""

    def close(self) -> None: ...


class EnvSlots:
    """One object with Gymnasium's API for each slot."""

    is_joint = False

    def __init__(self, envs: Sequence[Any], codec: Codec) -> None:
        self.envs, self.codec, self.count, self.spaces = list(envs), codec, len(envs), codec.spaces
        shape = (self.count, *codec.spaces.observation)
        self._observations: Array = np.zeros(shape, codec.dtype)
        self._finals: Array = np.zeros(shape, codec.dtype)
        self._rewards, self._ends = np.zeros(self.count), np.zeros(self.count, np.uint8)

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        for slot, seed in zip(slots.tolist(), seeds.tolist()):
            self.codec.write(self._observations[slot], self.envs[slot].reset(seed=seed)[0])
        return self._observations[slots]

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        codec, rewards, ends = self.codec, self._rewards, self._ends
        for i, slot in enumerate(slots.tolist()):
            env = self.envs[slot]
            seen, rewards[slot], is_over, is_cut, _ = env.step(codec.move(moves[i]))
            if is_over or is_cut:
                codec.write(self._finals[slot], seen)
                ends[slot] = TERMINAL if is_over else TRUNCATED
                seen = env.reset(seed=int(seeds[i]))[0]
            else:
                ends[slot] = GOES_ON
            codec.write(self._observations[slot], seen)
        if len(slots) == self.count:
            return Stepped(self._observations, rewards, ends, self._finals)
        return Stepped(self._observations[slots], rewards[slots], ends[slots], self._finals[slots])

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Batched(Protocol):
    """An environment of many slots in one object, which computes them together."""

    spaces: Spaces

    def reset(self, slots: Ints, seeds: Ints) -> Array: ...

    def step(self, slots: Ints, moves: Array) -> tuple[Array, Array, Array, Array]:
        """Observations, rewards, whether episodes are over, and whether they are cut off."""


class BatchedSlots:
    """Slots of an environment that computes them together."""

    is_joint = False

    def __init__(self, inner: Batched, count: int) -> None:
        self.inner, self.count, self.spaces = inner, count, inner.spaces

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        return self.inner.reset(slots, seeds)

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        seen, rewards, is_over, is_cut = self.inner.step(slots, moves)
        ends = np.where(is_over, TERMINAL, np.where(is_cut, TRUNCATED, GOES_ON)).astype(np.uint8)
        finals = seen
        ended = np.flatnonzero(ends)
        if len(ended):
            finals, seen = seen, seen.copy()
            seen[ended] = self.inner.reset(slots[ended], seeds[ended])
        return Stepped(seen, np.asarray(rewards, np.float64), ends, finals)

    def close(self) -> None:
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()


class VectorSlots:
    """A `gymnasium.vector.VectorEnv`, in any of its ways to begin again. Its slots are stepped together or not at all,
    and what seeds its later episodes is its own business: what happens is decided by the first reset and all moves."""

    is_joint = True

    def __init__(self, env: Any, codec: Codec) -> None:
        self.env, self.codec, self.count, self.spaces = env, codec, int(env.num_envs), codec.spaces
        mode = (env.metadata or {}).get("autoreset_mode")
        self.mode = str(getattr(mode, "value", mode) or "NextStep")
        shape = (self.count, *codec.spaces.observation)
        self._observations: Array = np.zeros(shape, codec.dtype)
        self._finals: Array = np.zeros(shape, codec.dtype)
        self._begins = np.zeros(self.count, np.bool_)  # with NextStep: ended in the step before

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        self._begins[:] = False
        self._write(self._observations, self.env.reset(seed=[int(seed) for seed in seeds])[0])
        return self._observations

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        seen, rewards, is_over, is_cut, told = self.env.step(self.codec.moves(moves))
        made = ~self._begins
        ends = np.where(is_over, TERMINAL, np.where(is_cut, TRUNCATED, GOES_ON)).astype(np.uint8)
        ends[~made] = GOES_ON
        rewards = np.where(made, rewards, 0.0)
        ended = np.flatnonzero(ends)
        self._write(self._finals, seen)
        if self.mode == "SameStep":
            for slot in ended.tolist():
                self.codec.write(self._finals[slot], told["final_obs"][slot])
        elif self.mode == "Disabled" and len(ended):
            seen = self.env.reset(options={"reset_mask": ends != GOES_ON})[0]
        self._begins = (ends != GOES_ON) & (self.mode == "NextStep")
        self._write(self._observations, seen)
        return Stepped(self._observations, rewards, ends, self._finals, made)

    def _write(self, rows: Array, seen: Any) -> None:
        if isinstance(seen, np.ndarray):
            for slot in range(self.count) if seen.shape != rows.shape else ():
                self.codec.write(rows[slot], seen[slot])
            if seen.shape == rows.shape:
                rows[...] = seen
            return
        for slot in range(self.count):  # a Dict or Tuple of arrays
            parts = {k: v[slot] for k, v in seen.items()} if isinstance(seen, dict) else tuple(v[slot] for v in seen)
            self.codec.write(rows[slot], parts)

    def close(self) -> None:
        self.env.close()
