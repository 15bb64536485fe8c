"""What several tasks share and none has alone: the cores of a machine, a link. Who is there gets an equal part."""

from __future__ import annotations

import heapq
import itertools

from tidemill.plan.simulate.kernel import Event, Kernel, Task


class Job:
    __slots__ = ("end", "is_done", "task")

    def __init__(self, task: Task, end: float) -> None:
        self.task, self.end, self.is_done = task, end, False


class Share:
    """`count` whole parts: up to so many tasks work at full speed, more of them share. A clock of work runs at the
    speed that each has at the moment, so that one heap tells who is done next."""

    def __init__(self, kernel: Kernel, count: float) -> None:
        self.kernel, self.count = kernel, count
        self._worked = 0.0  # what each task that is here could have done so far
        self._seen = kernel.time
        self._jobs: list[tuple[float, int, Job]] = []
        self._active = 0
        self._number = itertools.count()
        self._next: Event | None = None

    def work(self, task: Task, amount: float, is_interruptible: bool = False) -> float:
        """Until so many seconds of work are done; gives what is left when somebody wakes the task."""
        if amount <= 0:
            return 0.0
        self._catch_up()
        job = Job(task, self._worked + amount)
        heapq.heappush(self._jobs, (job.end, next(self._number), job))
        self._active += 1
        self._plan()
        try:
            while not job.is_done:
                task.wait()
                if is_interruptible and not job.is_done:
                    break
        finally:
            self._catch_up()
            left = 0.0
            if not job.is_done:
                job.is_done = True
                self._active -= 1
                left = max(0.0, job.end - self._worked)
                self._plan()
        return left

    def _speed(self) -> float:
        return min(1.0, self.count / self._active) if self._active else 0.0

    def _catch_up(self) -> None:
        passed = self.kernel.time - self._seen
        self._seen = self.kernel.time
        self._worked += passed * self._speed()

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        while self._jobs and self._jobs[0][2].is_done:
            heapq.heappop(self._jobs)
        if self._jobs:
            self._next = self.kernel.after(max(0.0, self._jobs[0][0] - self._worked) / self._speed(), self._done)

    def _done(self) -> None:
        self._next = None
        self._catch_up()
        while self._jobs and (self._jobs[0][2].is_done or self._jobs[0][0] <= self._worked + 1e-12):
            _, _, job = heapq.heappop(self._jobs)
            if not job.is_done:
                job.is_done = True
                self._active -= 1
                job.task.wake()
        self._plan()


class Unshared:
    """Devices of their own: work takes what it takes."""

    def work(self, task: Task, amount: float, is_interruptible: bool = False) -> float:
        if amount <= 0:
            return 0.0
        kernel = task.kernel
        end = kernel.time + amount
        while kernel.time < end:
            task.wait(end - kernel.time)
            if is_interruptible:
                break
        return max(0.0, end - kernel.time)
