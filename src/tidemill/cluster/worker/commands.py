"""Orders: what a worker's process can be told to do, with the equipment it has. All of it runs on the work thread."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.cluster.assignment import Assignment, WeightLink
from tidemill.cluster.report import StoreAddress
from tidemill.cluster.worker import weights
from tidemill.cluster.worker.build import WorkerState, build_worker, counts_of, join_learners, share_engine
from tidemill.cluster.worker.cut import ORDER
from tidemill.cluster.worker.store import StoreServer
from tidemill.device import collective
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.errors import CollectiveError
from tidemill.flow.records import Evaluation
from tidemill.flow.rolling import RolloutWorker
from tidemill.flow.scoring import AdvantageWorker
from tidemill.flow.tally import Counted
from tidemill.learn.model import MeshModel
from tidemill.models.load import keep_definition, save_folder
from tidemill.reshard.layout import Layout
from tidemill.rollout.native.forward import parallel

PAUSE_S = 0.001  # between looks at what the first rank calls


class Orders:
    def __init__(self, task: Assignment) -> None:
        self.task = task
        self._remote: RemoteDock
        self.kit: WorkerState = build_worker(task, self._dock(task.dock))
        self.open: tuple[str, ...] = ()  # stages it works on now
        self.is_whole = self.kit.learner is not None  # the engine has a whole version
        self._is_ordered = False  # an order to all ranks is next among the calls
        self.first_token: float | None = None
        self._carrier: weights.Carrier | None = None
        self._stores: dict[str, StoreServer] = {}
        collective.listen_at(task.host)
        self.is_leaving = False  # the dock is no longer there, or soon will not be

    def _dock(self, address: Address) -> RemoteDock:
        self._remote, self._ledger = RemoteDock(address, self.task.node, renews=True), address.ledger
        return self._remote

    # Looking

    @property
    def parameters(self) -> int:
        return self.kit.parameters

    def count_parameters(self) -> int:
        return self.parameters

    @property
    def is_done(self) -> bool:
        return self.kit.learn is not None and self.kit.learn.is_done

    @property
    def operation(self) -> tuple[str, float] | None:
        follower = self.kit.follower
        return self.kit.world.operation or (follower.operation if follower is not None else None)

    def facts(self) -> dict[str, Any]:
        learn, kit = self.kit.learn, self.kit
        return {
            "leases": kit.dock.leases,
            "done_group": learn.first_group if learn is not None and learn.is_done else -1,
            "version": kit.version,
            "first_token_s": self.first_token,
        }

    # Working

    def poll(self, stage: str) -> bool:
        if stage == "rollout" and not self.is_whole:
            return False
        moved = self.kit.workers[stage].poll()
        if stage == "rollout" and moved and self.first_token is None:
            self.first_token = time.time()
        return moved

    def follow(self) -> bool:
        """Do with the others what the first rank has called next; whether it had."""
        if self.kit.follower is not None:
            self.kit.follower.check()
        calls = self.kit.calls
        if calls is None or calls.is_first or self._is_ordered:
            return False
        called = calls.heard()
        if called is None:
            return False
        if called == ORDER:
            self._is_ordered = True
            return True
        stage, _, what = called.partition(":")
        worker: Any = self.kit.workers[stage]
        worker.together(what)
        return True

    def _in_turn(self) -> None:
        """What the driver tells all learners is done at one place among their calls: a rank that moved weights while
        another began to learn would wait for it for ever."""
        calls = self.kit.calls
        if calls is None or self.kit.world.size == 1:
            return
        if calls.is_first:
            calls.call(ORDER)
            return
        wait_s = self.task.config.cluster.collective_s
        deadline = time.monotonic() + wait_s
        while not self._is_ordered:
            if not self.follow():
                if time.monotonic() > deadline:
                    raise CollectiveError(f"the first rank did not come to the same order within {wait_s:g} s")
                time.sleep(PAUSE_S)
        self._is_ordered = False

    def work_on(self, stages: tuple[str, ...]) -> None:
        self.open = tuple(s for s in self.kit.workers if s in stages)
        self._hand_over("rollout" in stages)

    def _hand_over(self, rolls_out: bool) -> None:
        """Rollout and learning in one process take turns with its device's memory. Workers say so themselves too, but
        then all ranks of an engine have slept before one of them learns."""
        turns, engine = self.kit.turns, self.kit.engine
        if turns is None:
            return
        if rolls_out:
            turns.rolling()
        elif engine is None or not engine.has_work:
            turns.learning()

    def _look_at_learner(self) -> None:
        """What learning keeps is on the device."""
        if self.kit.turns is not None:
            self.kit.turns.learning()

    def begin(self, first_group: int, tag: str | None) -> None:
        """A new step for every stage."""
        self._in_turn()
        for worker in self.kit.workers.values():
            worker.begin(first_group, tag)

    def share_among(self, rollouts: int) -> None:
        """So many workers roll out now."""
        worker = self.kit.workers.get("rollout")
        if isinstance(worker, RolloutWorker):
            worker.peers = rollouts

    def leave_step(self) -> bool:
        """Stop working on the step, unless a gradient would be wasted; whether it has stopped."""
        if self.kit.learn is not None and self.kit.learn.has_begun:
            return False
        self.open = ()
        return True

    def open_step(self, step: int, start: dict[str, Any] | None) -> dict[str, Any]:
        """The rows of a step, and of those that may begin with it, enter; what the driver must know of them.
        `start`: where the feed is to stand first, for a dock that may lack what was put before."""
        kit = self.kit
        assert kit.feed is not None
        if start is not None:
            kit.feed.restore(start)
            kit.open_feed()
        assert kit.ahead is not None and kit.puts is not None
        opened = kit.ahead.begin(step)
        kit.puts.forget([kit.ahead.tag(s) or "" for s in kit.ahead.open])
        known = {"first_group": opened.first_group, "tag": kit.ahead.tag(step), "starts": kit.ahead.starts}
        return known | self.feed_state()

    def feed_again(self) -> None:
        """The bytes of some rows were lost with a warehouse."""
        if self.kit.puts is not None:
            self.kit.puts.again()

    def feed_state(self) -> dict[str, Any]:
        assert self.kit.feed is not None
        return {"state": self.kit.feed.state(), "bad_rows": len(self.kit.feed.bad_rows)}

    def leave(self, ledger: str) -> None:
        """From any thread: the dock is about to end, and another will be named."""
        if ledger == self._ledger:
            self.is_leaving = True
            self._remote.leave()

    def connect(self, address: Address) -> None:
        """To a new dock: whatever was held of the old one is forgotten."""
        self.kit.reconnect(self._dock(address), counts_of(self.task, address))
        self.open, self.is_leaving = (), False

    def measure(self) -> tuple[Counted, list[int]]:
        """What was counted, and the ids of the samples that could be shown."""
        return self.kit.tally.drain(), [int(s["id"]) for s in self.kit.kept_samples]

    def write_samples(self, step: int, ids: list[int], file: Path) -> None:
        chosen = {s["id"]: s for s in self.kit.kept_samples if s["id"] in set(ids)}
        self.kit.kept_samples.clear()
        if chosen:
            with file.open("ab") as out:
                for id in sorted(chosen):
                    line = json.dumps({"step": step, **chosen[id]}, ensure_ascii=False, default=str)
                    out.write(line.encode() + b"\n")

    def evaluate(self, size: int, samples: int, shown: int) -> Evaluation:
        """With the first `shown` answers in words."""
        self._hand_over(True)
        seen = self.kit.evaluate(size, samples)
        return replace(seen, answers=seen.answers[:shown])

    def after_step(self, step: int, measured: dict[str, float]) -> float | None:
        """Moves the reference and its weight; gives the weight where it changes."""
        if self.kit.feed is not None:
            self.kit.feed.report(measured)
        if self.kit.keeper is None:
            return None
        if self.kit.keeper.moves_after(step):
            self._in_turn()
            self._look_at_learner()
        self.kit.keeper.after_step(step, measured, self.kit.loaded.model if self.kit.loaded is not None else None)
        return measured.get("kl_coef")

    def hold_kl(self, coef: float) -> None:
        advantage = self.kit.workers.get("advantage")
        if isinstance(advantage, AdvantageWorker):
            settings = advantage.config.algorithm
            kl = settings.kl.model_copy(update={"coef": coef})
            own = settings.model_copy(update={"kl": kl})
            advantage.config = advantage.config.model_copy(update={"algorithm": own})

    # Keeping

    def save(
        self, folder: Path, step: int, state: dict[str, Any], best: bool, metric: float | None, wait: bool
    ) -> None:
        """Ranks of a cut learner write while training goes on; with `wait`, come back when it is on disk."""
        self._in_turn()
        self._look_at_learner()
        kit = self.kit
        assert kit.learner is not None
        more, own = kit.keeper.state() if kit.keeper is not None else ({}, None)
        kit.learner.save(
            folder, step, state | ({} if own is None else {"kl": own}), keep=kit.config.checkpoint.keep, best=best,
            metric=metric, more=more, critic=kit.critic, reference=self._moving_reference(), wait=wait,
        )  # fmt: skip

    def _moving_reference(self) -> MeshModel | None:
        return self.kit.reference if self.kit.config.algorithm.kl.reset_every else None

    def settle(self) -> None:
        """Whatever is being written is on disk."""
        if self.kit.learner is not None:
            self.kit.learner.settle()

    def restore(self, path: Path) -> dict[str, Any]:
        self._look_at_learner()
        kit = self.kit
        assert kit.learner is not None
        state = kit.learner.load(path, kit.critic, self._moving_reference())
        if kit.keeper is not None:
            kit.keeper.restore(path, state["kl"])
        return state

    def keep_definition(self, run: Path) -> None:
        assert self.kit.loaded is not None
        keep_definition(self.kit.loaded, run)

    def save_model(self, folder: Path) -> None:
        kit = self.kit
        assert kit.loaded is not None
        if kit.lead is None:
            with kit.learner.averaged() if kit.learner is not None and kit.shares_tensors else nullcontext():
                save_folder(kit.loaded.model, kit.loaded.tokenizer, folder)
            return
        whole = kit.lead.gathered(kit.loaded.model, kit.engine_group)
        kit.loaded.model.save_pretrained(folder, state_dict=whole)
        kit.loaded.tokenizer.save_pretrained(folder)

    # Other ranks, and weights

    def open_store(self, purpose: str) -> StoreAddress:
        """Where ranks, or the members of a link, meet: for as long as there is no other for the same purpose."""
        if purpose in self._stores:
            self._stores.pop(purpose).close()
        self._stores[purpose] = StoreServer(self.task.host)
        return self._stores[purpose].address

    def join_world(self, where: StoreAddress) -> None:
        self.kit.world.join(where, self.kit.device, self.task.config.cluster.collective_s)
        join_learners(self.kit, self.task)
        if self.kit.is_shared:
            share_engine(self.kit, self.task, where)

    def join_engine(self, where: StoreAddress) -> None:
        """The ranks of one engine, in processes of their own, meet."""
        self.kit.world.join(where, self.kit.device, self.task.config.cluster.collective_s)
        share_engine(self.kit, self.task, where)

    def describe(self, rank: int, mates: tuple[int, ...]) -> tuple[Layout, Layout]:
        """How what is sent and what is received lies, for this place in a link; `mates`: those of its engine."""
        sent = self.kit.learner.layout() if self.kit.learner is not None else weights.layout_of({}, rank)
        if self.kit.is_shared:
            assert self.kit.loaded is not None
            return sent, parallel.layout(self.kit.loaded.model, mates)
        return sent, weights.layout_of(self._received(), rank)

    def link(self, link: WeightLink, rank: int) -> None:
        self._in_turn()
        self.unlink()
        self._carrier = weights.Carrier(link, rank, self.kit.device)

    def unlink(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None

    def move(self, version: int) -> dict[str, float]:
        """Send or receive a version; on an engine it serves from then on."""
        self._in_turn()
        assert self._carrier is not None
        sent, received = self._sent(), self._received()
        if received:
            self.is_whole = False
            with self._between_steps():
                moved = self._carrier.receive(sent, received, version)
            self.serve(version)
        else:
            moved = self._carrier.send(sent, version)
        nbytes = moved.sent_bytes + moved.received_bytes
        return {"bytes": nbytes, "checked": moved.checked, "seconds": moved.seconds}

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Where an engine has several ranks, all of them are between the same two steps."""
        kit = self.kit
        if kit.lead is not None:
            kit.lead.order()
        if kit.follower is None:
            yield
            return
        with kit.follower.at_order(self.task.config.cluster.collective_s):
            yield

    def serve(self, version: int) -> None:
        """The weights as they are now are this version."""
        engine = self.kit.engine
        if engine is None:
            return
        if self.kit.turns is not None and self.kit.turns.serve(version):
            self.is_whole = True
            return
        reread = self.kit.config.flow.unfinished_samples == "recompute_kv" and engine.has_work
        half_made = engine.pause() if reread else []
        engine.load(None, version)
        engine.resume(half_made)
        if resumed := sum(bool(p.tokens) for p in half_made):
            self.kit.tally.add("resumed_samples", float(resumed))
        self.is_whole = True

    def version(self) -> int:
        return self.kit.version

    def _sent(self) -> dict[str, Any]:
        return self.kit.learner.pieces() if self.kit.learner is not None else {}

    def _received(self) -> dict[str, Any]:
        if self.kit.is_shared:
            assert self.kit.loaded is not None
            return weights.served(self.kit.loaded.model)
        if self.kit.engine is None or self.kit.shares_tensors:
            return {}
        assert self.kit.loaded is not None
        return weights.served(self.kit.loaded.model)

    def close(self) -> None:
        self.unlink()
        self.kit.close()
