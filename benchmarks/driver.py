"""What the driver costs, and how many workers one dock serves: clients of the dock that have no models.

    python benchmarks/driver.py --json

A worker is a process of its own that takes samples, sleeps for as long as a device would work, and commits. The driver
is this process: it starts the dock, watches it, counts, and raises the weight version; it must not touch a sample.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.batch import Batch, Column
from tidemill.dock import LeaseExpired, Want
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.graph import Stage

ABOUT = "samples/s through one dock with many workers that have no models, and what the driver costs"
OPTIONS: dict[str, Any] = {"workers": 200, "samples_per_s": 5600, "seconds": 20, "few": [2, 4, 8, 16]}

STAGES = (
    Stage("rollout", "rollout", ("prompt",), ("tokens", "logprobs")),
    Stage("reward", "reward", ("tokens",), ("reward",)),
    Stage("learn", "actor", ("tokens", "logprobs", "reward"), scope="group"),
)
GROUP = 8
PROMPT, ANSWER = 64, 256  # tokens, the answer's on average
ROLLOUT_ROWS, REWARD_ROWS, LEARN_GROUPS, PUT_GROUPS = 8, 64, 16, 8
CREDIT_S = 1.5  # so many seconds of work may lie in the dock
POLL_S = 0.25  # the driver looks this often
STEP_ROWS = 1024  # of one learning step: then the version rises
SETTLE_S = 3.0
DRAIN_S = 60.0
FEW_RATE = 25.0  # samples/s of each worker where there are few
FEW_S = 6.0


# -- the workers ------------------------------------------------------------------------------------------------------


class Board:
    """Memory shared with all workers: whether to stop feeding, whether to stop, and what each has done."""

    FIELDS = ("is_ready", "rows", "written_bytes", "read_bytes")

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (2 + len(self.FIELDS) * workers))
        cells = np.frombuffer(self._memory, np.int64)
        self.flags, self.cells = cells[:2], cells[2:].reshape(workers, len(self.FIELDS))

    @property
    def is_fed(self) -> bool:
        return bool(self.flags[0])

    @property
    def is_stopping(self) -> bool:
        return bool(self.flags[1])

    def note(self, number: int, rows: int, dock: RemoteDock) -> None:
        self.cells[number] = 1, self.cells[number, 1] + rows, dock.written_bytes, dock.read_bytes


def feed(dock: RemoteDock, note: Callable[[int], None], board: Board, rng: np.random.Generator, work_s: float) -> None:
    """Prompts, as many as the dock takes: it makes us wait when it is full."""
    first = 0
    n = PUT_GROUPS * GROUP
    while not board.is_fed:
        ids = np.arange(first, first + n)
        prompt = Column(rng.integers(0, 1000, n * PROMPT, np.int32), np.arange(n + 1) * PROMPT)
        size = np.full(n, GROUP, np.int32)
        dock.put(Batch({"id": ids, "group": ids // GROUP, "group_size": size, "prompt": prompt}))
        first += n
        note(n)


def roll_out(dock: RemoteDock, note: Any, board: Board, rng: np.random.Generator, work_s: float) -> None:
    def work(batch: Batch) -> Batch:
        time.sleep(work_s * rng.uniform(0.5, 1.5))
        lengths = rng.integers(ANSWER // 2, ANSWER * 3 // 2, batch.rows)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        tokens = Column(rng.integers(0, 1000, offsets[-1], np.int32), offsets)
        return Batch({"tokens": tokens, "logprobs": Column(np.zeros(offsets[-1], np.float32), offsets)})

    _consume(dock, "rollout", Want(rows=ROLLOUT_ROWS), work, note, board)


def judge(dock: RemoteDock, note: Any, board: Board, rng: np.random.Generator, work_s: float) -> None:
    def work(batch: Batch) -> Batch:
        return Batch({"reward": (batch["tokens"].lengths % 2).astype(np.float32)})

    _consume(dock, "reward", Want(rows=REWARD_ROWS), work, note, board)


def learn(dock: RemoteDock, note: Any, board: Board, rng: np.random.Generator, work_s: float) -> None:
    def work(batch: Batch) -> None:
        if len(batch.values("tokens")) != len(batch.values("logprobs")) or batch.rows % GROUP:
            raise ValueError("a group came in parts, or with the columns of another")

    _consume(dock, "learn", Want(groups=LEARN_GROUPS), work, note, board)


def _consume(dock: RemoteDock, stage: str, want: Want, work: Any, note: Any, board: Board) -> None:
    while not board.is_stopping:
        lease = dock.take(stage, want, wait=1.0)
        if lease is None:
            continue
        outputs = work(lease.batch)
        try:
            lease.commit(outputs)
        except LeaseExpired:
            continue
        note(lease.batch.rows)


ROLES: dict[str, Any] = {"feed": feed, "rollout": roll_out, "reward": judge, "learn": learn}


def nursery(address: Address, crew: list[str], work_s: float) -> None:
    """Fork the workers off one process that has imported everything; tell when all work; stop them when told."""
    board = Board(len(crew))
    children = {}
    for number, role in enumerate(crew):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                _work(address, role, number, board, work_s)
            except BaseException as error:
                print(f"{role} {number}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children[child] = role
    while not board.cells[:, 0].all():
        time.sleep(0.05)
    print(json.dumps(list(children)), flush=True)
    for flag in range(2):  # first no more prompts; when all is through, the end
        sys.stdin.readline()
        board.flags[flag] = 1
    failed = [children[child] for child in children if os.waitpid(child, 0)[1] != 0]
    totals = dict(zip(Board.FIELDS, board.cells.sum(axis=0).tolist()))
    fed = int(board.cells[[role == "feed" for role in crew], 1].sum())
    learned = int(board.cells[[role == "learn" for role in crew], 1].sum())
    print(json.dumps({**totals, "fed": fed, "learned": learned, "failed": failed}), flush=True)


def _work(address: Address, role: str, number: int, board: Board, work_s: float) -> None:
    dock = RemoteDock(address)
    board.note(number, 0, dock)
    ROLES[role](dock, lambda rows: board.note(number, rows, dock), board, np.random.default_rng(number), work_s)
    dock.close()


# -- the driver -------------------------------------------------------------------------------------------------------


def crew_of(workers: int) -> list[str]:
    """So many rollout workers, and who serves them."""
    return ["feed", *["learn"] * max(1, workers // 64), *["reward"] * max(1, workers // 16), *["rollout"] * workers]


def drive(workers: int, samples_per_s: float, seconds: float, settle_s: float = SETTLE_S) -> dict[str, Any]:
    """Keep so many workers busy, each as fast as makes `samples_per_s` of all; count for `seconds`."""
    crew = crew_of(workers)
    work_s = workers * ROLLOUT_ROWS / samples_per_s
    rows = int(CREDIT_S * samples_per_s) + workers * ROLLOUT_ROWS + LEARN_GROUPS * GROUP
    setup = DockSetup(STAGES, source=("prompt",), max_rows=rows, segment_bytes=1 << 20, memory_bytes=2 << 30)
    with DockServer(setup) as server:
        dock = server.connect()
        told = json.dumps({"ledger": server.address.ledger, "token": server.address.token, "crew": crew, "s": work_s})
        started = subprocess.Popen(
            [sys.executable, __file__, "--nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert started.stdin is not None and started.stdout is not None
        try:
            started.stdin.write(told + "\n")
            started.stdin.flush()
            children = json.loads(started.stdout.readline())
            _watch(dock, settle_s)
            parts = {"ledger": [server.ledger.pid], "warehouse": [server.warehouses["node0"].pid], "workers": children}
            before = {name: _cpu_s(pids) for name, pids in parts.items()}
            bytes_before, cpu_before, wall_before = _own_io(), time.process_time(), time.monotonic()
            rates = _watch(dock, seconds)
            wall_s = time.monotonic() - wall_before
            cpu = {name: (_cpu_s(pids) - before[name]) / wall_s for name, pids in parts.items()}
            cpu["driver"] = (time.process_time() - cpu_before) / wall_s
            own_bytes = _own_io() - bytes_before
            maps_segments = "tidemill-" in Path("/proc/self/maps").read_text()
            for is_done in (lambda: dock.state().rows == 0, lambda: True):
                started.stdin.write("next\n")
                started.stdin.flush()
                _wait(is_done)
            done = json.loads(started.stdout.readline())
        finally:
            started.kill()
            started.wait()
        figures = dock.figures()
        driver_bytes = dock.written_bytes + dock.read_bytes
        dock.close()
    return {
        "workers": workers,
        "processes": len(crew),
        "samples_per_s": round(statistics.mean(rates), 1),
        "samples_per_s_of_each_second": {"lowest": round(min(rates)), "median": round(statistics.median(rates))},
        "cores_used": {name: round(share, 4) for name, share in cpu.items()},
        "driver_sample_bytes": driver_bytes,
        "driver_maps_segments": maps_segments,
        "driver_other_bytes_per_s": round(own_bytes / wall_s),
        "worker_bytes": {"written": done["written_bytes"], "read": done["read_bytes"]},
        "put": done["fed"],
        "learned": done["learned"],
        "learned_by_the_ledger": figures["stages"]["learn"]["done"],
        "left_in_the_dock": figures["rows"],
        "failed_workers": done["failed"],
    }


def _watch(dock: RemoteDock, seconds: float) -> list[float]:
    """What a driver does while its workers work: look, count, raise the version. Samples learned in each second."""
    rates: list[float] = []
    since, before = time.monotonic(), dock.state().stages["learn"].done
    until = since + seconds
    while time.monotonic() < until:
        time.sleep(POLL_S)
        state = dock.state()
        done = state.stages["learn"].done
        if done // STEP_ROWS > state.version:
            dock.advance(done // STEP_ROWS)
        now = time.monotonic()
        if now - since >= 1.0:
            rates.append((done - before) / (now - since))
            since, before = now, done
    return rates


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DRAIN_S
    time.sleep(POLL_S)
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError("the workers do not get through what is in the dock")
        time.sleep(POLL_S)


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_io() -> int:
    """All that this process has read and written by system calls, sockets included."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


def run(options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options: workers, samples_per_s (asked of them together), seconds, few (numbers of workers to compare)."""
    chosen = {**OPTIONS, **{k: v for k, v in (options or {}).items() if v is not None}}
    result = drive(chosen["workers"], chosen["samples_per_s"], chosen["seconds"])
    few = [drive(n, n * FEW_RATE, FEW_S) for n in chosen["few"]]
    shares = {str(one["workers"]): one["cores_used"]["driver"] for one in few}
    return {
        **result,
        "driver_cores_by_workers": shares,
        "few": few,
        "driver_sample_bytes_in_all": sum(one["driver_sample_bytes"] for one in (result, *few)),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--samples-per-s", type=float)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--few", type=int, nargs="*")
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.nursery:
        told = json.loads(sys.stdin.readline())
        nursery(Address(told["ledger"], told["token"]), told["crew"], told["s"])
        return
    result = run(vars(arguments))
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
