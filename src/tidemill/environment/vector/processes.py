"""Environments in several processes: each has a run of slots, this process has the first.

A process that dies is started again, and its environments are restored from their seeds and moves: their caller notices
nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from tidemill.environment.vector.making import PETTINGZOO, VECTOR, make_slots
from tidemill.environment.vector.process import END, RESET, STEP
from tidemill.environment.vector.room import Bell, Room, fields
from tidemill.environment.vector.slots import GOES_ON, Array, Ints, Slots, Stepped
from tidemill.errors import PlayError
from tidemill.recipe.environment import EnvironmentSettings
from tidemill.reward.workers.wire import JsonSocket

START_S = 120.0  # an environment may import large modules
MOST_TICKS = 1_000_000  # of one episode that can be brought back
END_S = 2.0
KEPT_TICKS = 4096  # of the past, before what no episode needs any more is forgotten


MADE, ASKED = ("observations", "rewards", "ends", "finals"), ("chosen", "moves", "seeds")
JOINT = (f"{VECTOR}:", f"{PETTINGZOO}:")


@dataclass(slots=True)
class _Worker:
    number: int
    first: int
    last: int
    process: subprocess.Popen[bytes]
    wire: JsonSocket
    bell: Bell
    asked: int = 0

    def close(self) -> None:
        self.wire.close()
        self.bell.end.close()


class _Past:
    """What brings every slot back: the seeds of running episodes, and all moves since the oldest of them began."""

    def __init__(self, count: int) -> None:
        self.seeds, self.born = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.first = self.tick = 0  # of what is kept
        self.kept: list[tuple[Ints, Array]] = []  # slots that were stepped, and their moves

    def began(self, slots: Ints, seeds: Ints) -> None:
        self.seeds[slots], self.born[slots] = seeds, self.tick

    def stepped(self, slots: Ints, moves: Array) -> None:
        self.kept.append((slots, moves.copy()))
        self.tick += 1
        if len(self.kept) % KEPT_TICKS == 0:
            oldest = max(int(self.born.min()), self.tick - MOST_TICKS)
            del self.kept[: oldest - self.first]
            self.first = max(self.first, oldest)

    def moves_of(self, slot: int) -> list[Array]:
        if self.born[slot] < self.first:
            raise PlayError(
                f"an environment's process died in an episode of more than {MOST_TICKS:,} moves, which is not kept",
                "give the environment a time limit",
            )
        kept = self.kept[int(self.born[slot]) - self.first :]
        return [moves[np.searchsorted(slots, slot)] for slots, moves in kept if slot in slots]


class ProcessSlots:
    """`Slots` over `workers` other processes and this one."""

    is_joint = False

    def __init__(self, settings: EnvironmentSettings, count: int, workers: int) -> None:
        self.settings, self.count = settings, count
        edges = [count * i // (workers + 1) for i in range(workers + 2)]
        self.own = make_slots(settings, edges[1])
        self.spaces = self.own.spaces
        self.room = Room(fields(count, workers, self.spaces))
        self.past = _Past(count)
        self._workers: list[_Worker] = []
        starting = [self._start(i, edges[i + 1], edges[i + 2]) for i in range(workers)]
        self._workers = [self._ready(one) for one in starting]

    def _start(self, number: int, first: int, last: int) -> _Worker:
        (wire, their_wire), (rung, their_rung) = socket.socketpair(), socket.socketpair()
        handles = [their_wire.fileno(), their_rung.fileno(), self.room.handle]
        words = [sys.executable, "-m", "tidemill.environment.vector.process", *map(str, handles)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, pass_fds=handles, stdin=subprocess.DEVNULL, env=environment)
        their_wire.close()
        their_rung.close()
        cells = self.room["bells"][number]
        cells[:] = 0
        JsonSocket(wire).send(
            {
                "settings": self.settings.model_dump(mode="json"),
                "spaces": self.spaces.plain(),
                "count": self.count,
                "workers": len(self.room["bells"]),
                "worker": number,
                "first": first,
                "last": last,
                "path": [p for p in sys.path if p],
            }
        )
        return _Worker(number, first, last, process, JsonSocket(wire), Bell(cells, rung, is_worker=False))

    def _ready(self, worker: _Worker) -> _Worker:
        try:
            told = worker.wire.receive(START_S)
        except (EOFError, ConnectionResetError):
            told = {"failed": f"the process ended with status {worker.process.wait()}"}
        if told is None or "failed" in told:
            why = "it did not start in time" if told is None else told["failed"]
            raise PlayError(f"environment {self.settings.name!r} could not begin in a process of its own: {why}")
        return worker

    # Slots

    def reset(self, slots: Ints, seeds: Ints) -> Array:
        self.past.began(slots, seeds)
        self._all(RESET, slots, None, seeds)
        return self.room["observations"][slots]

    def step(self, slots: Ints, moves: Array, seeds: Ints) -> Stepped:
        self.past.stepped(slots, moves)
        self._all(STEP, slots, moves, seeds)
        room = self.room
        ends = room["ends"] if len(slots) == self.count else room["ends"][slots]
        if ends.any():
            ended = np.flatnonzero(ends)
            self.past.began(slots[ended], seeds[ended])
        if len(slots) == self.count:
            return Stepped(room["observations"], room["rewards"], ends, room["finals"])
        return Stepped(room["observations"][slots], room["rewards"][slots], ends, room["finals"][slots])

    def _all(self, what: int, slots: Ints, moves: Array | None, seeds: Ints) -> None:
        room = self.room
        room["chosen"][:] = 0
        room["chosen"][slots] = 1
        room["seeds"][slots] = seeds
        if moves is not None:
            room["moves"][slots] = moves.reshape(len(slots), -1)
        room["asks"][0] = what
        at_work = [w for w in self._workers if room["chosen"][w.first : w.last].any()]
        for worker in at_work:
            worker.asked += 1
            self._ask(worker)
        self._own_share(what, slots[: int(np.searchsorted(slots, self.own.count))], moves, seeds)
        lost = [worker for worker in at_work if not self._answers(worker)]
        for worker in lost:  # once nobody else reads what the room holds
            self._replace(worker, what)

    def _ask(self, worker: _Worker) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed when its answer is waited for
            worker.bell.ring(worker.asked)

    def _own_share(self, what: int, own: Ints, moves: Array | None, seeds: Ints) -> None:
        if not len(own):
            return
        room = self.room
        if what == RESET:
            room["observations"][own] = self.own.reset(own, seeds[: len(own)])
            return
        assert moves is not None
        stepped = self.own.step(own, room["moves"][own], seeds[: len(own)])
        for name in ("observations", "rewards", "ends"):
            room[name][own] = getattr(stepped, name)
        if stepped.ends.any():
            room["finals"][own] = stepped.finals

    def _answers(self, worker: _Worker) -> bool:
        """Wait for its answer; False: it is gone."""
        try:
            if worker.bell.wait(worker.asked, self.settings.timeout_s):
                return True
        except (EOFError, ConnectionResetError):
            self._refuse_failed(worker)
            return False
        worker.process.kill()
        raise PlayError(
            f"environment {self.settings.name!r} gave no answer within {self.settings.timeout_s:g} s",
            "raise environment.timeout_s, or mend the environment",
        )

    def _refuse_failed(self, worker: _Worker) -> None:
        """One that raised says why before it ends."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            told = worker.wire.receive(0.0)
            if told is not None and "failed" in told:
                raise PlayError(f"environment {self.settings.name!r} raised {told['failed']}", "mend the environment")

    # A process that is gone

    def _replace(self, worker: _Worker, what: int) -> None:
        """Start it again, and let it do what the others have done already."""
        worker.process.wait()
        worker.close()
        new = self._ready(self._start(worker.number, worker.first, worker.last))
        self._workers[self._workers.index(worker)] = new
        room = self.room
        kept = {name: room[name].copy() for name in MADE + ASKED}
        for slot in range(new.first, new.last):
            is_asked = bool(kept["chosen"][slot])
            self._bring_back(new, slot, is_asked and what == STEP)
            for name in (MADE if what == STEP else ("observations",)) if is_asked else ():
                kept[name][slot] = room[name][slot]
        for name, values in kept.items():
            room[name][:] = values

    def _bring_back(self, worker: _Worker, slot: int, is_stepped: bool) -> None:
        """Play a slot's moves again. The last of them may be the step under way, whose outcome nobody has seen."""
        room, moves = self.room, self.past.moves_of(slot)
        room["chosen"][:] = 0
        room["chosen"][slot] = 1
        next_seed = int(room["seeds"][slot])
        room["seeds"][slot] = self.past.seeds[slot]
        self._ask_alone(worker, RESET)
        room["seeds"][slot] = next_seed
        for i, move in enumerate(moves):
            room["moves"][slot] = move
            self._ask_alone(worker, STEP)
            if room["ends"][slot] != GOES_ON and not (is_stepped and i == len(moves) - 1):
                raise PlayError(
                    f"environment {self.settings.name!r} did not do the same again: an episode ended earlier",
                    "what it does must be decided by its seed and its moves",
                )

    def _ask_alone(self, worker: _Worker, what: int) -> None:
        self.room["asks"][0] = what
        worker.asked += 1
        self._ask(worker)
        if not self._answers(worker):
            raise PlayError(f"environment {self.settings.name!r}: its process died again while it was brought back")

    @property
    def processes(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        self.own.close()
        self.room["asks"][0] = END
        for worker in self._workers:
            worker.asked += 1
            self._ask(worker)
        for worker in self._workers:
            try:
                worker.process.wait(END_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.close()
        self._workers = []
        self.room.close()


def open_slots(settings: EnvironmentSettings, count: int, workers: int) -> Slots:
    """In this process, or shared with so many others. Slots that are stepped together stay in this one."""
    workers = min(workers, count - 1)
    if workers < 1 or settings.name.startswith(JOINT):
        return make_slots(settings, count)
    return ProcessSlots(settings, count, workers)
