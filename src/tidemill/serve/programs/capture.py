"""What a program asked and was answered, and how that becomes what is learned.

Each call of the model is a prompt and the tokens that were sampled behind it. A call whose prompt begins with all
tokens of an earlier one goes on with that trajectory; any other (a sub-agent, a retry, a history that was written
anew) begins a trajectory of its own. Every sampled token is learned in exactly one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.rollout.engine import Completion


@dataclass(slots=True)
class Trajectory:
    tokens: list[int]
    prompt_length: int  # of the first call
    mask: list[int] = field(default_factory=list)  # of all tokens behind the prompt, as are the next three
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # where each answer begins, counted from the prompt's end
    calls: list[int] = field(default_factory=list)  # the number of each answer, over all trajectories
    is_cut: bool = False  # some answer was drawn from a truncated distribution: `kept` counts

    def say(self, made: Completion, number: int) -> None:
        self.turns.append(len(self.mask))
        self.calls.append(number)
        self.tokens += made.tokens
        self.mask += [1] * len(made.tokens)
        self.logprobs += made.logprobs
        self.versions += made.versions
        self.kept += [0.0] * len(made.tokens) if made.kept is None else made.kept
        self.is_cut |= made.kept is not None

    def hear(self, tokens: Sequence[int], version: int) -> None:
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [version] * len(tokens)
        self.kept += [0.0] * len(tokens)


def trajectories(calls: Sequence[Completion]) -> list[Trajectory]:
    """The calls of one sample, in their order, as trajectories."""
    found: list[Trajectory] = []
    for number, made in enumerate(calls):
        if not made.tokens:
            continue
        prompt = list(made.request.prompt)
        before = [t for t in found if len(t.tokens) <= len(prompt) and prompt[: len(t.tokens)] == t.tokens]
        if before:
            trajectory = max(before, key=lambda t: len(t.tokens))
            trajectory.hear(prompt[len(trajectory.tokens) :], made.versions[0])
        else:
            trajectory = Trajectory(prompt, len(prompt))
            found.append(trajectory)
        trajectory.say(made, number)
    return found


@dataclass(slots=True)
class Row:
    """Trajectories behind one another, as one sample. `starts`: where each but the first begins, in `prompt` and
    `tokens` together."""

    prompt: list[int]
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    kept: list[float] | None
    starts: list[int]
    turns: list[int]  # where each answer begins in `tokens`
    calls: list[int]


def row_of(found: Sequence[Trajectory], prompt: Sequence[int], end: int, version: int) -> Row:
    """`prompt` and `end`: what a sample without any answer consists of."""
    if not found:
        return Row(list(prompt), [end], [0], [0.0], [version], None, [], [], [])
    first = found[0]
    row = Row(first.tokens[: first.prompt_length], [], [], [], [], None, [], [], [])
    kept: list[float] = []
    for place, trajectory in enumerate(found):
        if place:
            row.starts.append(len(row.prompt) + len(row.tokens))
            head = trajectory.tokens[: trajectory.prompt_length]
            row.tokens += head
            row.mask += [0] * len(head)
            row.logprobs += [0.0] * len(head)
            row.versions += [trajectory.versions[0]] * len(head)
            kept += [0.0] * len(head)
        row.turns += [len(row.tokens) + turn for turn in trajectory.turns]
        row.calls += trajectory.calls
        row.tokens += trajectory.tokens[trajectory.prompt_length :]
        row.mask += trajectory.mask
        row.logprobs += trajectory.logprobs
        row.versions += trajectory.versions
        kept += trajectory.kept
    row.kept = kept if any(t.is_cut for t in found) else None
    return row
