"""A taskset of the package verifiers: numbers to be written backwards."""

from __future__ import annotations

import random

import verifiers.v1 as vf

__all__ = ["Reversal"]


class Number(vf.TaskData):
    answer: str = ""


class Backwards(vf.Task[Number]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class Reversal(vf.Taskset[Backwards]):
    def load(self):
        chance = random.Random(0)
        for _ in range(512):
            digits = "".join(chance.choice("01234567") for _ in range(4))
            yield Backwards(Number(prompt=f"{digits}=", answer=digits[::-1]), self.config.task)
