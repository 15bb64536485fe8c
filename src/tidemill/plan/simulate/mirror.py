"""Ranks that only follow: they answer the driver, and their time is that of the first of their group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.cluster.commands import Request
from tidemill.cluster.report import Answer, StoreAddress, WorkerReady, WorkerReport
from tidemill.cluster.start.handle import WorkerLost
from tidemill.cluster.wiring import Post
from tidemill.plan.simulate.promise import Promise
from tidemill.plan.simulate.worker import EMPTY

if TYPE_CHECKING:
    from tidemill.plan.simulate.starter import World

# Commands that are answered with more than that they are done.
ANSWERS = frozenset(
    ("where", "build", "watch", "move", "receive", "describe", "measure", "leave_step", "version", "restore")
) | {"open_store", "take_up"}


class Mirror:
    """Implements `Handle` for a rank that does what the first of its group does and decides nothing."""

    def __init__(self, world: World, post: Post) -> None:
        self.world, self.post = world, post
        self.is_dead = False
        self._watching: Promise | None = None
        self._seen = -1
        self._told = -1
        self._serial = 0

    def call(self, request: Request[Any]) -> Any:
        world = self.world
        if self.is_dead:
            gone = Promise()
            gone.fail(WorkerLost("its process has ended"))
            return gone
        if request.name not in ANSWERS:
            return world.done
        match request.name:
            case "where":
                return Promise(Answer(world.place_of(self.post)))
            case "build":
                promise = Promise()
                ready = Answer(WorkerReady(0, "here"))
                world.kernel.after(world.start_s(self.post), lambda: self._ready(promise, ready))
                self._watching = promise
                return promise
            case "watch":
                self._watching = Promise()
                if self._told != self._seen:
                    self.tell(self._seen)
                return self._watching
            case "move" | "receive":
                return world.moving()
            case "describe":
                return Promise(Answer((EMPTY, EMPTY)))
            case "measure":
                return world.nothing_counted
            case "take_up":
                return world.nothing_taken
            case "leave_step":
                return Promise(Answer(True))
            case "version":
                return Promise(Answer(world.version))
            case "restore":
                return Promise(Answer(world.saved.get(str(request.args[0]), {})))
            case _:  # open_store
                return Promise(Answer(StoreAddress("", "")))

    def _ready(self, promise: Promise, answer: Answer) -> None:
        promise.answer(answer)
        self.world.heard()

    def tell(self, group: int) -> None:
        """Its group's first has ended a step."""
        self._seen = group
        if self._watching is not None and not self._watching.done():
            self._told, self._serial = group, self._serial + 1
            report = WorkerReport(self.post.name, self._serial, "", 0.0, 0, 0, group)
            self._watching.answer(Answer(report))

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            if self._watching is not None:
                self._watching.fail(WorkerLost("its process has ended"))
            self.world.gone(self)
