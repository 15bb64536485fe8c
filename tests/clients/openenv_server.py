"""An OpenEnv server for tests: guess a number that the seed decides."""

from __future__ import annotations

import random
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""


class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.wanted, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, largest=9, **kwargs):
        self.wanted, self.steps = random.Random(seed).randint(1, largest), 0
        return Told(text=f"a number from 1 to {largest}, game {seed}:")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "sleep":
            time.sleep(3)
        if action.message == "raise":
            raise RuntimeError("a mistake of the environment")
        self.steps += 1
        if action.message == str(self.wanted):
            return Told(text="yes", done=True, reward=1.0)
        return Told(text="no", reward=0.0)

    @property
    def state(self):
        return State(step_count=self.steps)


uvicorn.run(
    create_fastapi_app(Number, Guess, Told, max_concurrent_envs=int(sys.argv[2])),
    host="127.0.0.1",
    port=int(sys.argv[1]),
    log_level="warning",
)
