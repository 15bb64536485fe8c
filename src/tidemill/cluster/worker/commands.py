"""RoleWorker: carries out the driver's commands with what its post has. All of it runs on the work thread."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.cluster.assignment import Assignment, DockPlace, WeightLink
from tidemill.cluster.commands import OpenedStep
from tidemill.cluster.report import MoveReport, StoreAddress
from tidemill.cluster.worker import weights
from tidemill.cluster.worker.build import build_worker, join_learners, share_engine
from tidemill.cluster.worker.cut import ORDER
from tidemill.cluster.worker.kept_tally import tally_of
from tidemill.cluster.worker.sensors import Sensors
from tidemill.cluster.worker.store import StoreServer
from tidemill.cluster.worker.worker_state import WorkerState
from tidemill.device import collective, compiling
from tidemill.dock import Dock
from tidemill.errors import CollectiveError
from tidemill.flow.adjust import adjust, adjusted
from tidemill.flow.records import Activity, Evaluation
from tidemill.flow.tally import Counted
from tidemill.flow.workers import Stopped
from tidemill.models.load import keep_definition, save_folder, save_reading
from tidemill.observe import pictures
from tidemill.observe.run_folder import NOTES
from tidemill.reshard.layouts.layout import Layout

PAUSE_S = 0.001  # between polls of the first rank's calls


class RoleWorker:
    """Implements `WorkerCommands`."""

    def __init__(self, task: Assignment) -> None:
        self.task = task
        self.state: WorkerState = build_worker(task, self._dock(task.dock))
        self.weights = weights.WeightPort(self.state)
        self.open: tuple[str, ...] = ()  # stages it works on now
        self._is_commanded = False  # a command to all ranks is next in the list of calls
        self.first_token: float | None = None
        self._stores: dict[str, StoreServer] = {}
        self.sensors: Sensors | None = None
        if task.dies_alone:
            self.sensors = Sensors(task)
            collective.listen_at(task.host)
        self._is_interrupted = False  # the user wants to stop
        self._evaluating_now: Activity | None = None  # of the evaluation under way
        if self.state.feed is not None:
            self.state.feed.stop = lambda: self._is_interrupted or task.hooks.stop()
        self.is_leaving = False  # the dock is gone, or about to end

    def _dock(self, place: DockPlace) -> Dock:
        self._place, self._door = place, place.connect(self.task.node)
        return self._door.dock

    # Looking

    def count_parameters(self) -> int:
        return self.state.parameters

    @property
    def is_done(self) -> bool:
        return self.state.learn is not None and self.state.learn.is_done

    @property
    def milestones(self) -> tuple[bool, int]:
        """Return what the driver wants to hear of at once: a learned step; with carry-over each finished group, which
        may be the one that ends the stage."""
        rollout = self.state.rollout
        carries = rollout is not None and self.task.config.flow.carry_over > 0
        return self.is_done, rollout.finished if rollout is not None and carries else 0

    @property
    def waits(self) -> bool:
        """Say whether work elsewhere will bring work here."""
        return any(self.state.workers[stage].waits for stage in self.open)

    @property
    def operation(self) -> tuple[str, float] | None:
        follower = self.state.follower
        return self.state.world.operation or (follower.operation if follower is not None else None)

    def facts(self) -> dict[str, Any]:
        learn, state = self.state.learn, self.state
        return {
            "leases": self._door.leases(),
            "done_group": learn.first_group if learn is not None and learn.is_done else -1,
            "version": state.version,
            "first_token_s": self.first_token,
            "evaluating": self._evaluating_now,
            "compiling": compiling.under_way(),
        }

    def interrupt(self) -> None:
        self._is_interrupted = True

    # Working

    def poll(self, stage: str) -> bool:
        if stage == "rollout" and not self.weights.is_whole:
            return False
        moved = self.state.workers[stage].poll()
        if stage == "rollout" and moved and self.first_token is None:
            self.first_token = time.time()
        return moved

    def follow(self) -> bool:
        """Run the first rank's next call with the others; return whether there was one."""
        if self.state.follower is not None:
            self.state.follower.check()
        calls = self.state.calls
        if calls is None or calls.is_first or self._is_commanded:
            return False
        called = calls.heard()
        if called is None:
            return False
        if called == ORDER:
            self._is_commanded = True
            return True
        stage, _, what = called.partition(":")
        worker: Any = self.state.workers[stage]
        worker.together(what)
        return True

    def _in_turn(self) -> None:
        """Give a command to all learners its place in the order of their calls: a rank that moved weights while
        another began to learn would wait for it for ever."""
        calls = self.state.calls
        if calls is None or self.state.world.size == 1:
            return
        if calls.is_first:
            calls.call(ORDER)
            return
        wait_s = self.task.config.cluster.collective_s
        deadline = time.monotonic() + wait_s
        while not self._is_commanded:
            if not self.follow():
                if time.monotonic() > deadline:
                    raise CollectiveError(f"the first rank did not reach the same command within {wait_s:g} s")
                time.sleep(PAUSE_S)
        self._is_commanded = False

    def work_on(self, stages: tuple[str, ...]) -> None:
        self.open = tuple(s for s in self.state.workers if s in stages)
        self._hand_over("rollout" in stages)

    def _hand_over(self, rolls_out: bool) -> None:
        """Let rollout and learning in one process take turns with the device's memory. Workers do this themselves,
        too, but here all ranks of an engine sleep before one of them learns."""
        engine = self.state.engine
        if rolls_out:
            self.state.rolling()
        elif engine is None or not engine.has_work or self.task.config.flow.carry_over:
            self.state.learning()

    def begin(self, first_group: int, tag: str | None) -> None:
        self._in_turn()
        if self.sensors is not None:
            self.sensors.begin()
        for worker in self.state.workers.values():
            worker.begin(first_group, tag)

    def share_among(self, rollouts: int) -> None:
        if self.state.rollout is not None:
            self.state.rollout.peers = rollouts

    def leave_step(self) -> bool:
        if self.state.learn is not None and self.state.learn.has_begun:
            return False
        self.open = ()
        return True

    # Feeding

    def open_step(self, step: int, start: dict[str, Any] | None) -> OpenedStep:
        state = self.state
        assert state.feed is not None
        if start is not None:
            state.open_feed()
            assert state.ahead is not None
            state.ahead.restore(start)
        self._is_interrupted = False
        ahead, puts = state.ahead, state.puts
        assert ahead is not None and puts is not None
        with state.tally.shown("feed"):
            opened = ahead.begin(step)
        puts.forget([ahead.tag(s) or "" for s in ahead.open])
        if cut := state.feed.take_cut():
            state.tally.add("cut_responses", cut)
        return OpenedStep(opened.first_group, ahead.tag(step), ahead.starts, ahead.state(), state.feed.left_out)

    def feed_again(self) -> None:
        if self.state.puts is not None:
            self.state.puts.again()

    def feed_state(self) -> dict[str, Any]:
        assert self.state.ahead is not None
        return self.state.ahead.state()

    def leave(self, ledger: str) -> None:
        """Leave the dock, from any thread: it is about to end, and another will be named."""
        if ledger == self._place.ledger:
            self.is_leaving = True
            self._door.leave()

    def connect(self, dock: DockPlace) -> None:
        self.state.reconnect(self._dock(dock), tally_of(self.task, dock))
        self.open, self.is_leaving = (), False

    # Telling

    def measure(self) -> tuple[Counted, list[tuple[bool, int]]]:
        counted = self.state.tally.drain()
        if self.sensors is not None:
            counted = replace(counted, machine=self.sensors.report())
        return counted, [("error" not in s, int(s["id"])) for s in self.state.kept_samples]

    def write_samples(self, step: int, ids: list[int], file: Path) -> str:
        chosen = {s["id"]: s for s in self.state.kept_samples if s["id"] in set(ids)}
        self.state.kept_samples.clear()
        if chosen:
            with file.open("ab") as out:
                for id in sorted(chosen):
                    line = json.dumps({"step": step, **chosen[id]}, ensure_ascii=False, default=str)
                    out.write(line.encode() + b"\n")
        return next((str(s["error"]) for s in chosen.values() if "error" in s), "")

    def write_notes(self, step: int, shown: list[int], run: Path) -> None:
        found = self.state.learner.noted(shown) if self.state.learner is not None else []
        lines = []
        for record, images in found:
            named = {"images": [pictures.kept(run, image) for image in images]} if images else {}
            lines.append(json.dumps({"step": step, **record, **named}).encode() + b"\n")
        if lines:
            with (run / NOTES).open("ab") as out:  # one write: other learners append to it too
                out.write(b"".join(lines))

    def evaluate(self, size: int, samples: int, shown: int) -> Evaluation:
        self._hand_over(True)
        self._is_interrupted = False
        try:
            seen = self.state.evaluate(size, samples, self._evaluating)
        finally:
            self._evaluating_now = None
        return replace(seen, answers=seen.answers[:shown])

    def _evaluating(self, activity: Activity) -> None:
        self.state.moved_on()
        self._evaluating_now = activity
        self.task.hooks.tell(activity)
        if self._is_interrupted:
            raise Stopped

    def after_step(self, step: int, measured: dict[str, float]) -> float | None:
        state = self.state
        if state.feed is not None:
            state.feed.report(measured)
        if state.keeper is None:
            return None
        if state.keeper.moves_after(step):
            self._in_turn()
            state.learning()
        state.keeper.after_step(step, measured, state.loaded.model if state.loaded is not None else None)
        return measured.get("kl_coef")

    def hold_kl(self, coef: float) -> None:
        if (advantage := self.state.advantage) is not None:
            settings = advantage.config.algorithm
            kl = settings.kl.model_copy(update={"coef": coef})
            own = settings.model_copy(update={"kl": kl})
            advantage.config = advantage.config.model_copy(update={"algorithm": own})

    def adjust(self, changes: dict[str, float]) -> None:
        self.state.config = adjusted(self.state.config, changes)
        adjust(self.state.workers.values(), changes)

    # Keeping

    def save(
        self, folder: Path, step: int, state: dict[str, Any], best: bool, metric: float | None, wait: bool
    ) -> None:
        self._in_turn()
        own = self.state
        own.learning()
        more, kl = own.keeper.state() if own.keeper is not None else ({}, None)
        marks: dict[str, Any] = {"keep": own.config.checkpoint.keep, "best": best, "metric": metric, "wait": wait}
        whole = state | ({} if kl is None else {"kl": kl})
        own.learner.save(folder, step, whole, more=more, critic=own.critic, **marks, **self._moving_reference())

    def _moving_reference(self) -> dict[str, Any]:
        """Return the reference, where a checkpoint has a part of it that its ranks write and read."""
        moves = self.state.config.algorithm.kl.reset_every and self.state.reference is not None
        return {"reference": self.state.reference} if moves else {}

    def settle(self) -> None:
        if self.state.learner is not None:
            self.state.learner.settle()

    def restore(self, path: Path) -> dict[str, Any]:
        own = self.state
        own.learning()
        state: dict[str, Any] = own.learner.load(path, own.critic, **self._moving_reference())
        if own.keeper is not None:
            own.keeper.restore(path, state["kl"])
        return state

    def keep_definition(self, run: Path) -> None:
        assert self.state.loaded is not None
        keep_definition(self.state.loaded, run)

    def save_model(self, folder: Path) -> None:
        state = self.state
        assert state.loaded is not None
        if state.lead is None:
            with nullcontext() if state.learner is None or state.is_cut else state.learner.averaged():
                save_folder(state.loaded.model, state.loaded.tokenizer, folder)
            return
        whole = state.lead.gathered(state.loaded.model, state.engine_group)
        state.loaded.model.save_pretrained(folder, state_dict=whole)
        save_reading(state.loaded.model, state.loaded.tokenizer, folder)

    # Other ranks, and weights

    def open_store(self, purpose: str) -> StoreAddress:
        if purpose in self._stores:
            self._stores.pop(purpose).close()
        self._stores[purpose] = StoreServer(self.task.host)
        return self._stores[purpose].address

    def join_world(self, where: StoreAddress) -> None:
        self.state.world.join(where, self.state.device, self.task.config.cluster.collective_s)
        join_learners(self.state, self.task)
        if self.state.is_shared:
            share_engine(self.state, self.task, where)

    def join_engine(self, where: StoreAddress) -> None:
        """Join the ranks of one engine, which are processes of their own."""
        self.state.world.join(where, self.state.device, self.task.config.cluster.collective_s)
        share_engine(self.state, self.task, where)

    def lay_out_experts(self) -> bool:
        self._in_turn()
        return self.weights.lay_out_experts()

    def describe(self, rank: int, mates: tuple[int, ...]) -> tuple[Layout, Layout]:
        return self.weights.describe(rank, mates)

    def link(self, link: WeightLink, rank: int) -> None:
        self._in_turn()
        self.weights.link(link, rank)

    def unlink(self) -> None:
        self.weights.unlink()

    def move(self, version: int) -> MoveReport:
        self._in_turn()
        return self.weights.move(version)

    def take_up(self, version: int) -> int:
        return self.weights.take_up(version)

    def version(self) -> int:
        return self.state.version

    def close(self) -> None:
        self.unlink()
        if self.sensors is not None:
            self.sensors.close()
        self.state.close()
