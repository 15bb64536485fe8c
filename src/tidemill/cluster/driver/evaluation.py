"""Has a worker evaluate, and waits for it: however long it takes, as long as it moves on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.cluster.commands import WorkerCommands, request
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.workers import Stopped

if TYPE_CHECKING:
    from tidemill.cluster.driver.driver import Driver
    from tidemill.cluster.driver.worker_pool import Member

SHOWN_ANSWERS = 32  # of an evaluation, shown to people


def evaluated(driver: Driver, member: Member, size: int, samples: int) -> Evaluation:
    """Evaluate on this worker. It is lost when it makes no token and no score for `cluster.stall_s`."""
    pool, now_s = driver.pool, driver.starter.now
    shown = size if driver.starter.is_here else SHOWN_ANSWERS
    future = pool.send(member, request(WorkerCommands.evaluate, size, samples, shown))
    moves, moved_at = -1, now_s()
    while not future.done():
        driver.check_learners()
        pool.pump(0.2)
        now = now_s()
        if member.report is not None and member.report.moves != moves:
            moves, moved_at = member.report.moves, now
        _tell(driver, member, size)
        if now - moved_at > driver.config.cluster.stall_s:
            why = f"{member.name} has made no token and no score of an evaluation for {now - moved_at:.0f} s"
            pool.lose(member, f"{why}{pool.examine(why)}")
    seen: Evaluation = pool.unwrap(member.name, future)
    return seen


def _tell(driver: Driver, member: Member, size: int) -> None:
    """Report the progress, and interrupt the worker if the user wants to stop."""
    if driver.starter.is_here or member.report is None:
        return  # the worker itself reports, in this process
    try:
        driver.tell(member.report.evaluating or Activity("evaluating", 0, size))
    except Stopped:
        driver.interrupt(member)
