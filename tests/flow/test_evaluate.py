"""Evaluation: answers are judged in pieces, so that whoever watches a long one sees it move."""

from __future__ import annotations

from typing import Any

from tidemill.data.source import Example
from tidemill.flow import evaluate
from tidemill.recipe.config import Rewards
from tidemill.reward.api import Sample, batched
from tidemill.reward.score import Scorer
from tidemill.rollout.engine import Completion, Request, Sampling


@batched
def length(samples: list[Sample]) -> list[float]:
    """Of the answer, and in thousands how many were asked for at once."""
    return [1000.0 * len(samples) + len(s.transcript) for s in samples]


class Engine:
    """Answers every request at once, sample k of prompt p with p + k."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Completion]:
        asked, self.waiting = self.waiting, []
        return [Completion(r, k, [r.prompt[0] + k], [0.0], [0], "stop") for r in asked for k in range(r.n)]


def test_many_answers_are_judged_in_pieces_and_keep_their_order() -> None:
    problems = [(Example("", where=f"row {i}"), [i]) for i in range(evaluate.PIECE)]
    told: list[int] = []

    def decode(tokens: list[int]) -> str:
        return "x" * sum(tokens)

    engine: Any = Engine()
    rewards = Rewards(functions=[f"{__file__}:length"])
    with Scorer(rewards, lambda: told.append(1)) as scorer:
        found = evaluate._answer(engine, problems, [None] * len(problems), Sampling(), 2, decode, scorer)
    at_once = 1000 * evaluate.PIECE
    assert [[a.reward - at_once for a in each] for each in found] == [[i, i + 1] for i in range(evaluate.PIECE)]
    assert len(told) == 2 * evaluate.PIECE
