"""Publishing: the driver's part of the weight flow. It says who is on a wire and when to move; no weight passes it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Literal

from tidemill.cluster.driver.placement import ROLLOUT
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.start.handle import WorkerLost
from tidemill.errors import TidemillError

Verify = Literal["off", "sample", "all"]
ATTEMPTS = 8  # to bring a version to whoever lives


class Publisher:
    """`check` raises when a learner was lost: there is nothing to publish then."""

    def __init__(self, crew: WorkerPool, timeout_s: float, verify: Verify, check: Callable[[], None]) -> None:
        self.crew, self.timeout_s, self.verify, self.check = crew, timeout_s, verify, check
        self.version = -1
        self.moved_bytes = 0.0
        self.checked = 0.0  # blocks whose checksums were compared
        self.seconds = 0.0
        self._linked: tuple[tuple[str, int], ...] = ()  # names and incarnations on the wire
        self._served: dict[str, tuple[int, int]] = {}  # rollout worker → its incarnation and the version it has
        self._met: dict[int, tuple[int, ...]] = {}  # engine of several ranks → the incarnations that have met

    def publish(self) -> int:
        """The learner's weights, whatever version they are now, to every rollout worker that is there."""
        learners = self.crew.learners()
        self.version = int(self.crew.call(learners[0], "version"))
        placement = self.crew.placement
        if placement.shares_tensors:
            self.crew.call_all(learners, "serve", lambda _: (self.version,))
        else:
            self.bring(learners if placement.is_colocated else self._rollouts())
        return self.version

    def newcomers(self) -> list[Member]:
        """Rollout workers that are up but lack the version that is served."""
        if self.crew.placement.is_colocated:
            return []
        return [m for m in self._rollouts() if self._served.get(m.name) != (m.incarnation, self.version)]

    def _rollouts(self) -> list[Member]:
        """All ranks of the engines that are whole."""
        return [m for m in self.crew.of(ROLLOUT) if self.crew.is_complete(m)]

    def forget(self) -> None:
        """The learners are new processes: nothing that was linked or served counts."""
        self._linked, self._served = (), {}

    def bring(self, wanted: Sequence[Member]) -> None:
        """To those of `wanted` that live; who dies on the way is left out and the rest is served again."""
        last = ""
        for _ in range(ATTEMPTS):
            self.check()
            alive = [m for m in wanted if m.state == "ready" and self.crew.is_complete(m)]
            if not alive:
                return
            learners = self.crew.learners()
            members = [*learners, *(m for m in alive if m not in learners)]
            try:
                self._meet(alive)
                self._link(members)
                told = self.crew.call_all(members, "move", lambda _: (self.version,), self.timeout_s + 5)
            except WorkerLost as lost:
                last = str(lost)
                self._unlink(members)
                self.crew.pump(0.1)
                continue
            for m in alive:
                self._served[m.name] = m.incarnation, self.version
            self.moved_bytes += sum(t["bytes"] for t in told.values())
            self.checked += sum(t["checked"] for t in told.values())
            self.seconds = max(t["seconds"] for t in told.values())
            return
        raise TidemillError(f"weights version {self.version} could not be brought to rollout: {last}", "see the logs")

    def _meet(self, members: Sequence[Member]) -> None:
        """The ranks of an engine become one, once. Learners, whose world is one already, have done so."""
        for leader in members:
            post = leader.post
            if post.group.name != ROLLOUT or post.group.engine_ranks == 1 or not post.leads:
                continue
            mates = self.crew.mates(leader)
            now = tuple(m.incarnation for m in mates)
            if self._met.get(post.engine) == now:
                continue
            try:
                at = self.crew.call(leader, "open_store", "engine")
                self.crew.call_all(mates, "join_engine", lambda _, at=at: (at,), self.timeout_s + 5)  # type: ignore[misc]
            except WorkerLost as lost:  # a process does not join twice: all of them start again
                self.crew.lose(leader, f"the ranks of its engine did not meet: {lost}")
                raise
            self._met[post.engine] = now

    def _link(self, members: Sequence[Member]) -> None:
        from tidemill.cluster.assignment import WeightLink
        from tidemill.reshard.layout import merge

        now = tuple((m.name, m.incarnation) for m in members)
        if now == self._linked:
            return
        self._linked = ()
        places = {m.name: i for i, m in enumerate(members)}
        mates = {m.name: tuple(places[o.name] for o in self.crew.mates(m) if o.name in places) for m in members}
        told = self.crew.call_all(members, "describe", lambda m: (places[m.name], mates[m.name]))
        nodes = list(dict.fromkeys(m.node for m in members))
        store = self.crew.call(members[0], "open_store", "link") if len(nodes) > 1 else None
        link = WeightLink(
            token=secrets.token_hex(32),
            source=merge(told[name][0] for name in places),
            target=merge(told[name][1] for name in places),
            nodes=tuple(nodes.index(m.node) for m in members),
            store=store,
            timeout_s=self.timeout_s,
            verify=self.verify,
        )
        self.crew.call_all(members, "link", lambda m: (link, places[m.name]), self.timeout_s + 5)
        self._linked = now

    def _unlink(self, members: Sequence[Member]) -> None:
        self._linked = ()
        for m in members:
            if m.state == "ready":
                with contextlib.suppress(WorkerLost):
                    self.crew.call(m, "unlink", within_s=self.timeout_s + 5)
