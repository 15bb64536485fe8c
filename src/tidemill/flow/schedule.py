"""Schedules: whom to poll, and when. A schedule changes a step's speed, never its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tidemill.errors import TidemillError
from tidemill.flow.stages import LearnWorker, Worker, stacks_of
from tidemill.flow.workers import Stopped

IDLE_S = 0.0005  # between polls when every worker waits for another thread or process


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


SCHEDULES = {"sync": sync, "streamed": streamed}


def _poll_until_still(workers: Sequence[Worker], learn: LearnWorker, stop: Callable[[], bool], stall_s: float) -> bool:
    """Whether anything moved."""
    began = moved_at = time.monotonic()
    while not learn.is_done:
        if stop() and not learn.has_begun:
            raise Stopped
        moves = [worker.poll() for worker in workers]
        if any(moves):
            moved_at = time.monotonic()
        elif not any(worker.waits for worker in workers):
            break
        elif time.monotonic() - moved_at > stall_s:
            raise TidemillError(
                stacks_of(list(workers), moved_at), "see the log; raise rewards.timeout_s if it is slow"
            )
        else:
            time.sleep(IDLE_S)
    return moved_at > began


def _check_done(workers: Sequence[Worker], learn: LearnWorker) -> None:
    if learn.is_done:
        return
    state = learn.dock.state()
    counts = "; ".join(f"{name}: {c.ready} ready, {c.leased} leased" for name, c in state.stages.items())
    raise TidemillError(f"the step ended with {state.rows} samples still in the dock ({counts})")
