"""Schedules: whom to poll, and when. A schedule changes a step's speed, never its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tidemill.errors import TidemillError
from tidemill.flow.learning import LearnWorker
from tidemill.flow.stage import Worker, stacks_of
from tidemill.flow.workers import Stopped

# Between polls when every worker waits for another thread or process: short at first, then longer, so that looking does
# not take time from those that work.
IDLE_S = 0.0005
LONGEST_IDLE_S = 0.004


def sync(workers: Sequence[Worker], learn: LearnWorker, stop: Callable[[], bool], stall_s: float) -> None:
    """One stage after the other, each on the whole step; rewards run beside whatever is under way."""
    beside = [worker for worker in workers if worker.runs_beside]
    moved = True
    while moved and not learn.is_done:  # once, unless a stage puts new rows in
        turns = [list(dict.fromkeys([worker, *beside])) for worker in workers]
        moves = [_poll_until_still(turn, learn, stop, stall_s) for turn in turns]
        moved = any(moves)
    _check_done(workers, learn)


def streamed(workers: Sequence[Worker], learn: LearnWorker, stop: Callable[[], bool], stall_s: float) -> None:
    """Every stage on what is ready."""
    _poll_until_still(workers, learn, stop, stall_s)
    _check_done(workers, learn)


# In `async` too every stage works on what is ready; what differs is how many steps' rows are there (flow/ahead.py), and
# that rollout has a thread and weights of its own (flow/beside.py, flow/weights.py).
SCHEDULES = {"sync": sync, "streamed": streamed, "async": streamed}


def _poll_until_still(workers: Sequence[Worker], learn: LearnWorker, stop: Callable[[], bool], stall_s: float) -> bool:
    """Whether anything moved."""
    began = moved_at = time.monotonic()
    idle_s = IDLE_S
    while not learn.is_done:
        if stop() and not learn.has_begun:
            raise Stopped
        moves = [worker.poll() for worker in workers]
        if any(moves):
            moved_at, idle_s = time.monotonic(), IDLE_S
        elif not any(worker.waits for worker in workers):
            break
        elif time.monotonic() - moved_at > stall_s:
            raise TidemillError(
                stacks_of(list(workers), moved_at), "see the log; raise rewards.timeout_s if it is slow"
            )
        else:
            time.sleep(idle_s)
            idle_s = min(2 * idle_s, LONGEST_IDLE_S)
    return moved_at > began


def _check_done(workers: Sequence[Worker], learn: LearnWorker) -> None:
    if learn.is_done:
        return
    state = learn.dock.state()
    counts = "; ".join(f"{name}: {c.ready} ready, {c.leased} leased" for name, c in state.stages.items())
    raise TidemillError(f"the step ended with {state.rows} samples still in the dock ({counts})")
