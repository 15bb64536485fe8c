"""Publishing: the driver's part of the weight flow. It decides who is on a link and when to move; no weights pass
through it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence

from tidemill.cluster.commands import HostCommands, Request, WorkerCommands, request
from tidemill.cluster.driver.worker_pool import Member, WorkerPool
from tidemill.cluster.report import MoveReport
from tidemill.cluster.start.handle import WorkerLost
from tidemill.errors import TidemillError
from tidemill.flow.schedule import schedule_of
from tidemill.recipe.config import Config

ATTEMPTS = 8  # to bring a version to the workers that live


class Publisher:
    """`check` raises when a learner was lost: then there is nothing to publish."""

    def __init__(self, pool: WorkerPool, config: Config, check: Callable[[], None]) -> None:
        self.pool, self.check = pool, check
        self.timeout_s, self.verify = config.cluster.collective_s, config.reshard.verify
        self.serves_on = schedule_of(config).serves_on  # rollout works while weights arrive
        self.lay_out_every = config.rollout.experts.every if config.rollout.ranks > 1 else 0
        self.version = -1
        self.checked = 0.0  # blocks whose checksums were compared
        self.seconds = 0.0
        self.nbytes = 0  # brought to engines so far
        self._linked: tuple[tuple[str, int], ...] = ()  # names and incarnations on the link
        self._served: dict[str, tuple[int, int]] = {}  # rollout worker → its incarnation and the version it has
        self._all_served: tuple[int, int, int] | None = None  # the state in which no worker lacked the version
        self._met: dict[int, tuple[int, ...]] = {}  # engine of several ranks → the incarnations that have joined

    def publish(self) -> int:
        """Send the learner's current weights to every engine."""
        self.version = self.pool.call(self.pool.learners()[0], request(WorkerCommands.version))
        engines = self._engines()
        self._lay_out_experts(engines)
        self.bring(engines)
        return self.version

    def _lay_out_experts(self, engines: Sequence[Member]) -> None:
        """Let engines of several ranks spread their experts anew. Where one does, all plan again, and the weights go
        straight to where they are wanted."""
        if not self.lay_out_every or self.version % self.lay_out_every:
            return
        with contextlib.suppress(WorkerLost):  # seen to when the weights are brought
            alive = self.pool.complete(m for m in engines if m.state == "ready")
            asked = request(WorkerCommands.lay_out_experts)
            if any(self.pool.call_all(alive, lambda _: asked, self.timeout_s + 5).values()):
                self._linked = ()

    def newcomers(self) -> list[Member]:
        """List rollout workers that are up but lack the current version."""
        now = self.pool.changes, self.version, len(self._served)
        if self.pool.wiring.is_colocated or now == self._all_served:
            return []
        found = [m for m in self._engines() if self._served.get(m.name) != (m.incarnation, self.version)]
        if not found:
            self._all_served = now
        return found

    def _engines(self) -> Sequence[Member]:
        """List all ranks of engines that are complete."""
        group = self.pool.wiring.engines
        if group.learns:
            return self.pool.learners()
        return self.pool.complete(self.pool.of(group.name))

    def forget(self) -> None:
        """Forget all links and versions, because the learners are new processes."""
        self._linked, self._served, self._all_served = (), {}, None

    def bring(self, wanted: Sequence[Member]) -> None:
        """Send to those of `wanted` that live; when one dies on the way, send again without it."""
        last = ""
        for _ in range(ATTEMPTS):
            self.check()
            alive = self.pool.complete(m for m in wanted if m.state == "ready")
            if not alive:
                return
            learners = self.pool.learners()
            if gone := [m.name for m in learners if m.state != "ready"]:
                raise WorkerLost(f"{', '.join(gone)} is lost: there is nothing to publish")
            members = [*learners, *(m for m in alive if not m.learns)]
            try:
                self._meet(alive)
                self._move(members)
                taken = request(WorkerCommands.take_up, self.version)
                told = self.pool.call_all(alive, lambda _, taken=taken: taken)  # type: ignore[misc]
            except WorkerLost as lost:
                last = str(lost)
                self._unlink(members)
                self.pool.pump(0.1)
                continue
            self.nbytes += sum(told.values())
            for m in alive:
                self._served[m.name] = m.incarnation, self.version
            return
        raise TidemillError(f"weights version {self.version} could not be brought to rollout: {last}", "see the logs")

    def _move(self, members: Sequence[Member]) -> None:
        """Move the weights to these members. Where engines read the learner's own tensors, nothing is sent."""
        if self.pool.wiring.shares_tensors:
            return
        self._link(members)
        move, receive = request(WorkerCommands.move, self.version), request(HostCommands.receive, self.version)

        def order(member: Member) -> Request[MoveReport]:
            """Choose the command: an engine that continues serving writes the version aside; all others stop for it."""
            return receive if self.serves_on and not member.learns else move

        told = self.pool.call_all(members, order, self.timeout_s + 5)
        self.checked += sum(t.checked for t in told.values())
        self.nbytes += sum(t.nbytes for t in told.values())
        self.seconds = max(t.seconds for t in told.values())

    def _meet(self, members: Sequence[Member]) -> None:
        """Join the ranks of each engine, once. Learners' engines share the learners' world, which exists already."""
        for leader in members:
            post = leader.post
            if leader.learns or not leader.leads or post.group.engine_ranks == 1:
                continue
            mates = self.pool.mates(leader)
            now = tuple(m.incarnation for m in mates)
            if self._met.get(post.engine) == now:
                continue
            try:
                where = self.pool.call(leader, request(WorkerCommands.open_store, "engine"))
                joined = request(WorkerCommands.join_engine, where)
                self.pool.call_all(mates, lambda _, joined=joined: joined, self.timeout_s + 5)  # type: ignore[misc]
            except WorkerLost as lost:  # a process cannot join twice: all of them start again
                self.pool.lose(leader, f"the ranks of its engine did not join: {lost}")
                raise
            self._met[post.engine] = now

    def _link(self, members: Sequence[Member]) -> None:
        from tidemill.cluster.assignment import OneProcess, WeightLink
        from tidemill.reshard.layouts.layout import merge

        now = tuple((m.name, m.incarnation) for m in members)
        if now == self._linked:
            return
        self._linked = ()
        is_here = self.pool.starter.is_here
        places = {m.name: 0 if is_here else i for i, m in enumerate(members)}
        mates = {m.name: tuple(places[o.name] for o in self.pool.mates(m) if o.name in places) for m in members}
        told = self.pool.call_all(members, lambda m: request(WorkerCommands.describe, places[m.name], mates[m.name]))
        nodes = list(dict.fromkeys(m.node for m in members))
        several = len(nodes) > 1
        link = WeightLink(
            token=secrets.token_hex(32),
            source=merge(told[name][0] for name in places),
            target=merge(told[name][1] for name in places),
            nodes=(0,) if is_here else tuple(nodes.index(m.node) for m in members),
            store=self.pool.call(members[0], request(WorkerCommands.open_store, "link")) if several else None,
            timeout_s=self.timeout_s,
            verify=self.verify,
            one_process=OneProcess() if is_here else None,
        )
        self.pool.call_all(members, lambda m: request(WorkerCommands.link, link, places[m.name]), self.timeout_s + 5)
        self._linked = now

    def _unlink(self, members: Sequence[Member]) -> None:
        self._linked = ()
        for m in members:
            if m.state == "ready":
                with contextlib.suppress(WorkerLost):
                    self.pool.call(m, request(WorkerCommands.unlink), within_s=self.timeout_s + 5)
