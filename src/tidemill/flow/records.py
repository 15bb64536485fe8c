"""Records of a run that are only numbers and words: who reads them needs no model library."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answered:
    prompt: str
    answer: str
    response: str
    correct: bool
    reward: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    accuracy: float  # greedy
    pass_at: dict[int, float] = field(default_factory=dict)  # k: share of problems solved by one of k samples
    reward: float = 0.0
    response_tokens: float = 0.0
    answers: tuple[Answered, ...] = ()

    def metrics(self) -> dict[str, float]:
        named = {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.reward,
            "eval/response_tokens": self.response_tokens,
        }
        return named | {f"eval/pass@{k}": share for k, share in self.pass_at.items()}


def dump_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    return dataclasses.asdict(evaluation)


def load_evaluation(plain: dict[str, Any]) -> Evaluation:
    answers = tuple(Answered(**a) for a in plain["answers"])
    pass_at = {int(k): v for k, v in plain["pass_at"].items()}
    return Evaluation(**{**plain, "answers": answers, "pass_at": pass_at})
