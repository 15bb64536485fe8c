"""A small environment of Gymnasium's API: a point is pushed about by chance, and the agent pushes back."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np


class Drift(gym.Env):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self, limit: int = 23, edge: float = 2.0, real: bool = True, fails_at: int = 0, sleeps_at: int = 0,
        render_mode: str | None = None,
    ) -> None:  # fmt: skip
        self.limit, self.edge, self.real, self.render_mode = limit, edge, real, render_mode
        self.fails_at, self.sleeps_at = fails_at, sleeps_at
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32) if real else gym.spaces.Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.normal(size=2), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise ValueError("the floor gave way")
        if self.steps == self.sleeps_at:
            time.sleep(600)
        push = np.asarray(action) if self.real else np.array([action - 2, 0])
        self.place = self.place + 0.3 * push + 0.2 * self.np_random.normal(size=2)
        distance = float(np.linalg.norm(self.place))
        return self._seen(), 1.0 - distance, distance > self.edge, self.steps >= self.limit, {}

    def _seen(self) -> Any:
        return np.array([*self.place, self.steps / self.limit], np.float32)

    def render(self) -> Any:
        picture = np.full((32, 32, 3), 255, np.uint8)
        x, y = (int(min(31, max(0, 16 + 6 * p))) for p in self.place)
        picture[y, x] = 0
        return picture


def pid() -> int:
    return os.getpid()
