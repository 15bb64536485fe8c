"""One sample's place at the endpoint: what its program may ask, what it was answered, and what it came to."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.environment.api import Played
from tidemill.recipe.config import EnvironmentSettings
from tidemill.rollout.engine import Completion, Request, Sampling, token_limit
from tidemill.serve.asking import Refused
from tidemill.serve.link import Answering
from tidemill.serve.service import Session, digest
from tidemill.serve.talk import Memory

MOST_OPEN = 32  # calls of one sample at once


class Seat(Session):
    """A conversation that remembers: the key is the sample's own."""

    def __init__(self, request: Request, index: int, prompt: str, settings: EnvironmentSettings, key: str) -> None:
        self.request, self.index, self.prompt, self.settings, self.key = request, index, prompt, settings, key
        self.memory = Memory()
        self.base: Sampling = request.sampling
        self.calls: list[Completion] = []
        self.deadline = math.inf
        self.fault: str | None = None  # why its program is to end
        self.is_killed = self.is_cancelled = self.is_closed = self.is_cut = False
        self._asked = 0
        self._made = 0
        self._open: list[Answering] = []
        self._prompts: Counter[int] = Counter()
        self._rewards: list[float] = []

    def begin(self) -> None:
        self.deadline = time.monotonic() + self.settings.timeout_s

    def task(self) -> dict[str, Any]:
        task = self.request.task
        assert task is not None
        own = {"prompt": self.prompt, "answer": task.answer, "seed": digest([self.request.id, self.index])}
        return {**task.meta, **own, "where": task.where}

    # As a session of the endpoint

    def admit(self, prompt: Sequence[int]) -> int:
        if self.is_closed:
            raise Refused("this sample has ended", status=410)
        self._asked += 1
        if self._asked > self.settings.max_calls:
            self.is_cut = True
            if self._asked > 2 * self.settings.max_calls and self.fault is None:
                self.fault = f"asked the model more than {2 * self.settings.max_calls} times"
            raise Refused(f"a sample may ask {self.settings.max_calls} times", status=429, code="rate_limit_exceeded")
        self._open = [answering for answering in self._open if not answering.is_whole]
        if len(self._open) >= MOST_OPEN:
            raise Refused(f"a sample may ask for {MOST_OPEN} answers at once", status=429, code="rate_limit_exceeded")
        room = token_limit(self.request, self.index) - self._made
        if room < 1:
            self.is_cut = True
            raise Refused("the sample's tokens are used up", "max_tokens", code="context_length_exceeded")
        return min(room, self.settings.max_turn_tokens or room)

    def draw_id(self, prompt: Sequence[int], seed: int | None) -> int:
        """The same prompt, asked for the same time, draws the same tokens in every run, whatever else goes on."""
        key = digest(prompt)
        self._prompts[key] += 1
        return digest([self.request.draws_as, self.index, key, self._prompts[key]])

    def began(self, answering: Answering) -> None:
        self._open.append(answering)

    def ended(self, answering: Answering, admitted: int) -> None:
        if self.is_closed:
            return
        for completion in answering.done:
            if completion is not None and completion.finish in ("stop", "length"):
                self.calls.append(completion)
                self._made += len(completion.tokens)

    # What it came to

    def close(self) -> list[Answering]:
        """Take no more; give what is still asked."""
        self.is_closed = True
        return [answering for answering in self._open if not answering.is_whole]

    def played(self, value: Any) -> Played:
        """A program's value: nothing, a number, or an object with `reward`, `solved`, `parts` and `rewards`."""
        turns = len(self.calls)
        if value is None or isinstance(value, str):
            return Played(turns=turns)
        if not isinstance(value, Mapping):
            return Played(_number(value), turns, None if not isinstance(value, bool) else value)
        self._rewards = [_number(reward) for reward in value.get("rewards") or ()]
        total = _number(value["reward"]) if "reward" in value else sum(self._rewards)
        parts = {str(name): _number(part) for name, part in (value.get("parts") or {}).items()}
        solved = value.get("solved")
        return Played(total, turns, None if solved is None else bool(solved), parts)

    def turn_rewards(self, turns: Sequence[int], calls: Sequence[int]) -> list[tuple[int, float]]:
        """Where each answer begins, with its own reward, as far as the program told any; in the order of the calls."""
        told = dict(enumerate(self._rewards))
        return [(place, told.get(n, 0.0)) for n, place in sorted(zip(calls, turns))]


def _number(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is no finite number")
    return found
