"""Evaluation: answers are judged in pieces, so that whoever watches a long one sees it move."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.data.source import Example
from tidemill.flow import evaluate
from tidemill.flow.records import Activity, Answered, Evaluation
from tidemill.flow.workers import Stopped
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
    problems = [(Example("", where=f"row {i}"), [i], ()) for i in range(evaluate.PIECE)]
    told: list[int] = []

    def decode(tokens: list[int]) -> str:
        return "x" * sum(tokens)

    engine: Any = Engine()
    rewards = Rewards(functions=[f"{__file__}:length"])
    with Scorer(rewards, lambda: told.append(1)) as scorer:
        heard: list[Activity] = []
        progress = evaluate.Progress(heard.append, 0, 2 * len(problems))
        found = evaluate._answer(engine, problems, [None] * len(problems), Sampling(), 2, decode, scorer, progress)
    at_once = 1000 * evaluate.PIECE
    assert [[a.reward - at_once for a in each] for each in found] == [[i, i + 1] for i in range(evaluate.PIECE)]
    assert len(told) == 2 * evaluate.PIECE
    made, *scoring = heard
    assert made == Activity("evaluating", 2 * evaluate.PIECE, 2 * evaluate.PIECE)
    assert [a.done for a in scoring] == sorted(a.done for a in scoring)
    assert {a.what for a in scoring} <= {"scoring answers"}
    assert [a.tokens for a in found[0]] == [1, 1]


def test_an_evaluation_that_is_stopped_leaves_nothing_in_the_engine() -> None:
    class Slow(Engine):
        def step(self) -> list[Completion]:
            return []

        def cancel(self, request_id: int) -> None:
            self.waiting = [r for r in self.waiting if r.id != request_id]

    def stop(activity: Activity) -> None:
        raise Stopped

    engine: Any = Slow()
    problems = [(Example("", where="row"), [1], ())]
    with Scorer(Rewards()) as scorer, pytest.raises(Stopped):
        progress = evaluate.Progress(stop, 0, 1)
        evaluate._answer(engine, problems, [None], Sampling(), 1, lambda tokens: "", scorer, progress)
    assert not engine.has_work


def test_the_parts_of_a_reward_are_told_where_it_has_several() -> None:
    def judged(*parts: dict[str, float]) -> dict[str, float]:
        answers = tuple(Answered("p", "a", "r", True, 1.0, parts=part) for part in parts)
        return {k: v for k, v in Evaluation(1.0, answers=answers).metrics().items() if k.startswith("eval/reward/")}

    assert judged({"math": 1.0}, {"math": 0.0}) == {}
    found = judged({"health": 1.0, "health.broken": 0.0}, {"health": -1.0, "health.broken": 1.0})
    assert found == {"eval/reward/health": 0.0, "eval/reward/health.broken": 0.5}
