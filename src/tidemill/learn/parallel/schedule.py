"""In which order the ranks of a pipeline do their micro-batches: 1F1B, and interleaved with several runs of layers.

The order is found by playing the pipeline through, one action per rank and tick: a rank goes forward until it keeps as
many activations as its place needs, then backward and forward in turn. Any number of micro-batches will do. Every rank
plays the same game, so each knows what the others do when.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    is_forward: bool
    stage: int  # of all stages; stage s lies on rank s mod ranks
    microbatch: int


Timetable = list[list[Action]]  # of each rank


def timetable(ranks: int, chunks: int, microbatches: int) -> Timetable:
    """`chunks`: stages per rank, 1 for plain 1F1B."""
    return play(ranks, chunks, microbatches)[0]


def play(ranks: int, chunks: int, microbatches: int) -> tuple[Timetable, int]:
    """The timetable, and the ticks it takes when every action takes one."""
    last = ranks * chunks - 1
    forward = [_order(rank, ranks, chunks, microbatches, True) for rank in range(ranks)]
    backward = [_order(rank, ranks, chunks, microbatches, False) for rank in range(ranks)]
    most = [kept(rank, ranks, chunks) for rank in range(ranks)]
    made: Timetable = [[] for _ in range(ranks)]
    done: set[Action] = set()
    ticks = 0

    def ready(action: Action) -> bool:
        stage, m = action.stage, action.microbatch
        if action.is_forward:
            return stage == 0 or Action(True, stage - 1, m) in done
        return Action(True, stage, m) in done and (stage == last or Action(False, stage + 1, m) in done)

    def choose(rank: int) -> Action | None:
        f, b = forward[rank], backward[rank]
        if f and ready(f[0]) and len(b) - len(f) < most[rank]:  # those begun and not finished
            return f[0]
        return b[0] if b and ready(b[0]) else None

    while any(backward):
        chosen = [choose(rank) for rank in range(ranks)]
        if not any(chosen):  # the last round of micro-batches is short: a rank must look further ahead
            most = [n + 1 for n in most]
            continue
        for rank, action in enumerate(chosen):
            if action is not None:
                (forward if action.is_forward else backward)[rank].pop(0)
                made[rank].append(action)
        done.update(a for a in chosen if a is not None)
        ticks += 1
    return made, ticks


def kept(rank: int, ranks: int, chunks: int) -> int:
    """Activations a rank keeps at most: forwards begun before the first backward comes back."""
    if chunks == 1:
        return ranks - rank
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def _order(rank: int, ranks: int, chunks: int, microbatches: int, is_forward: bool) -> list[Action]:
    """A rank's own order: `ranks` micro-batches through one run of layers, then the same through its next. It is the
    same on every rank, so that messages between two ranks are sent and wanted in one order."""
    runs = range(chunks) if is_forward else range(chunks - 1, -1, -1)
    return [
        Action(is_forward, chunk * ranks + rank, m)
        for first in range(0, microbatches, ranks)
        for chunk in runs
        for m in range(first, min(first + ranks, microbatches))
    ]


def forward_only(ranks: int, chunks: int, microbatches: int) -> Timetable:
    """For scoring: nothing comes back."""
    return [_order(rank, ranks, chunks, microbatches, True) for rank in range(ranks)]
