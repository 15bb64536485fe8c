"""Records of a run that hold only numbers and text, so that reading them needs no model library."""

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
    tokens: int = 0  # of the response
    source: str = ""  # of several, by name
    parts: dict[str, float] = field(default_factory=dict)  # of the reward, by name


@dataclass(frozen=True, slots=True)
class Activity:
    """What a run is doing now, and its progress: `done` of `total`, where that can be counted."""

    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    accuracy: float  # greedy
    pass_at: dict[int, float] = field(default_factory=dict)  # k: share of problems solved by one of k samples
    reward: float = 0.0
    response_tokens: float = 0.0
    answers: tuple[Answered, ...] = ()
    scored: int = 0  # answers that were scored, sampled ones included
    failed: int = 0  # answers on which a reward failed
    first_failure: str = ""
    shares: dict[str, float] = field(default_factory=dict)  # solved of each kind of problem, where there are several

    def metrics(self) -> dict[str, float]:
        named = {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.reward,
            "eval/response_tokens": self.response_tokens,
        }
        named |= {"eval/reward_errors": float(self.failed)} if self.failed else {}
        for source in sorted({answer.source for answer in self.answers} - {""}):
            own = [answer.correct for answer in self.answers if answer.source == source]
            named[f"eval/source/{source}/accuracy"] = sum(own) / len(own)
        named |= self._parts()
        named |= {f"eval/{kind.replace(' ', '_')}": share for kind, share in self.shares.items()}
        return named | {f"eval/pass@{k}": share for k, share in self.pass_at.items()}

    def _parts(self) -> dict[str, float]:
        """Means of a reward's parts, such as how often a rule was broken, where it has several."""
        names = dict.fromkeys(name for answer in self.answers for name in answer.parts)
        if len(names) < 2:
            return {}
        count = len(self.answers)
        return {f"eval/reward/{name}": sum(a.parts.get(name, 0.0) for a in self.answers) / count for name in names}

    def failures(self) -> dict[str, Any]:
        """Return the failed rewards, a count of 0 included."""
        return {"reward_errors": self.failed, "scored": self.scored, "first_reward_error": self.first_failure or None}


def dump_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    return dataclasses.asdict(evaluation)


def load_evaluation(plain: dict[str, Any]) -> Evaluation:
    answers = tuple(Answered(**a) for a in plain["answers"])
    pass_at = {int(k): v for k, v in plain["pass_at"].items()}
    return Evaluation(**{**plain, "answers": answers, "pass_at": pass_at})
