"""Kill the dock's parts at random under load and count what is lost, what happens twice, and how long it takes.

Two nodes with a warehouse each and one replica of every chunk; producers and consumers on both; one ledger. A victim is
killed with SIGKILL; a warehouse loses its bytes with it. The next kill comes when the last is mended.

    python benchmarks/dock_faults.py --kills 1000 --json
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.batch import Batch, Column
from tidemill.dock import LeaseExpired, Want
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.errors import TidemillError
from tidemill.graph import Stage

ABOUT = "kill the dock's parts at random under load: rows lost, rows doubled, slowest recovery"
OPTIONS: dict[str, Any] = {"kills": 1000, "seed": 0, "lease_s": 1.0, "verbose": False}

STAGES = (
    Stage("double", "worker", ("x",), ("y",)),
    Stage("judge", "worker", ("y",), ("z",), scope="group"),
    Stage("learn", "worker", ("x", "z")),
)
GROUP = 4
NODES = ("a", "b")
KINDS = ("consumer", "producer", "ledger", "warehouse")
GIVE_UP_S = 60.0
WORK_S = 0.02
PRODUCER_SPACING = 1 << 32


# -- the load ---------------------------------------------------------------------------------------------------------


def _connect(address: Address, node: str) -> RemoteDock:
    """From the first node as on the ledger's machine, from the others as from another machine."""
    return RemoteDock(address if node == NODES[0] else replace(address, local=""), node)


def produce(address: Address, node: str, number: int, progress: Path, stop: Path) -> None:
    """Groups of rows whose content follows from their id. Progress is on file: a successor repeats the last put."""
    _quiet()
    dock = _connect(address, node)
    done = int(progress.read_text() or 0) if progress.exists() else 0
    while True:
        ids = np.arange(done, done + GROUP) + number * PRODUCER_SPACING
        x = Column.jagged([np.arange(i % 50, dtype=np.int64) + i for i in ids.tolist()], np.int64)
        size = np.full(GROUP, GROUP, np.int32)
        dock.put(Batch({"id": ids, "group": ids // GROUP, "group_size": size, "x": x}))
        done += GROUP
        scratch = progress.with_suffix(".tmp")
        scratch.write_text(str(done))
        os.replace(scratch, progress)
        if stop.exists():  # after a put: one that its killed predecessor made and did not note is repeated, and noted
            break
    dock.close()


def consume(address: Address, node: str, stage: str, log: Path, stop: Path) -> None:
    _quiet()
    dock = _connect(address, node)
    rng = random.Random(os.getpid())
    with open(log, "ab", buffering=0) as committed:
        while not stop.exists():
            lease = dock.take(stage, Want(rows=rng.randint(1, 4 * GROUP), groups=rng.randint(1, 4)), wait=0.5)
            if lease is None:
                continue
            batch = lease.batch
            outputs = WORK[stage](batch)
            time.sleep(WORK_S * rng.random())  # so that some die with a lease in hand
            try:
                lease.commit(outputs)
            except LeaseExpired:
                continue  # someone else has the rows now
            committed.write(batch.values("id").astype(np.int64).tobytes())
    dock.close()


def _double(batch: Batch) -> Batch:
    _check(batch, "x", lambda i: np.arange(i % 50) + i)
    return Batch({"y": Column(batch.values("x") * 2, batch["x"].offsets)})


def _judge(batch: Batch) -> Batch:
    _check(batch, "y", lambda i: 2 * (np.arange(i % 50) + i))
    groups, counts = np.unique(batch.values("group"), return_counts=True)
    if (counts != GROUP).any():
        raise TidemillError(f"groups {groups[counts != GROUP].tolist()} came in parts")
    return Batch({"z": batch.values("id") + 1})


def _learn(batch: Batch) -> None:
    _check(batch, "x", lambda i: np.arange(i % 50) + i)
    if (batch.values("z") != batch.values("id") + 1).any():
        raise TidemillError("wrong bytes in z")


WORK: dict[str, Any] = {"double": _double, "judge": _judge, "learn": _learn}


def _check(batch: Batch, column: str, expected: Any) -> None:
    for i, values in zip(batch.values("id").tolist(), batch[column]):
        if not np.array_equal(values, expected(i)):
            raise TidemillError(f"wrong bytes in {column} of row {i}")


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # where each one is, when nothing moves


# -- the killer -------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    target: Any
    arguments: tuple[Any, ...]
    process: Any = None

    def start(self, context: Any) -> None:
        self.process = context.Process(target=self.target, args=self.arguments, daemon=True)
        self.process.start()


@dataclass
class Soak:
    server: DockServer
    folder: Path
    rng: random.Random
    context: Any
    # Files as signs: an event's lock stays locked when its holder is killed, and everybody else waits forever.
    stop: Path  # there: nothing more is produced
    drained: Path  # there: everything is through, nothing more is consumed
    workers: list[Worker] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    crashed: int = 0  # workers that ended by themselves: they found wrong bytes or a split group

    def begin(self) -> None:
        address = self.server.address
        for i, node in enumerate(NODES):
            progress = self.folder / f"producer-{i}"
            self.workers.append(Worker(produce, (address, node, i, progress, self.stop)))
        for i, stage in enumerate(s for s in STAGES for _ in range(2)):
            log = self.folder / f"{stage.name}-{i}.log"
            self.workers.append(Worker(consume, (address, NODES[i % 2], stage.name, log, self.drained)))
        for worker in self.workers:
            worker.start(self.context)
        self.dock = self.server.connect(NODES[0])

    def kill_one(self) -> None:
        kind = self.rng.choice(KINDS)
        self._revive()
        if kind == "warehouse":
            self._wait(lambda f: f["short_of_copies"] == 0 and len(f["warehouses"]) == len(NODES), "copies to be whole")
        before = self.dock.figures()
        started = time.monotonic()
        mended = getattr(self, f"_kill_{kind}")(before)
        done = before["stages"]["learn"]["done"]
        self._wait(lambda f: mended(f) and f["stages"]["learn"]["done"] > done, f"recovery from a dead {kind}")
        self.recoveries[kind].append(time.monotonic() - started)

    def _kill_consumer(self, before: dict[str, Any]) -> Any:
        worker = self.rng.choice([w for w in self.workers if w.target is consume])
        self._end(worker)
        last = before["last_lease"]
        # Its rows are back: every lease that was out at the kill has ended.
        return lambda f: f["oldest_lease"] > last or f["epoch"] != before["epoch"]

    def _kill_producer(self, before: dict[str, Any]) -> Any:
        worker = self.rng.choice([w for w in self.workers if w.target is produce])
        self._end(worker)
        progress: Path = worker.arguments[3]
        at = progress.stat().st_mtime_ns if progress.exists() else 0
        full = before["rows"]
        return lambda f: (progress.exists() and progress.stat().st_mtime_ns > at) or (full and f["puts_waiting"] > 0)

    def _kill_ledger(self, before: dict[str, Any]) -> Any:
        os.kill(self.server.ledger.pid, signal.SIGKILL)
        return lambda f: f["epoch"] > before["epoch"] and len(f["warehouses"]) == len(NODES)

    def _kill_warehouse(self, before: dict[str, Any]) -> Any:
        name = self.rng.choice(NODES)
        hello = self.server.wait_announced(name)
        shutil.rmtree(hello.arena)
        os.kill(self.server.warehouses[name].pid, signal.SIGKILL)
        return lambda f: name in f["warehouses"] and self.server.find(name) not in (None, hello.warehouse)

    def _end(self, worker: Worker) -> None:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.join()
        worker.start(self.context)

    def _revive(self) -> None:
        for worker in self.workers:
            if not worker.process.is_alive():
                self.crashed += 1
                worker.start(self.context)

    def _wait(self, is_so: Any, what: str) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while not is_so(self.dock.figures()):
            if time.monotonic() > deadline:
                self._show_stacks()
                raise TidemillError(f"waited {GIVE_UP_S:.0f} s for {what}", json.dumps(self.dock.figures()))
            time.sleep(0.005)

    def _show_stacks(self) -> None:
        for worker in self.workers:
            print("---", worker.target.__name__, worker.arguments[1:3], "is alive:", worker.process.is_alive(),
                  file=sys.stderr, flush=True)  # fmt: skip
            if worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGUSR1)
                time.sleep(0.2)

    def finish(self) -> dict[str, Any]:
        """Stop producing, let everything through, and count."""
        self.stop.touch()
        for worker in self.workers:
            if worker.target is produce:  # its last put may wait until consumers have made room
                worker.process.join(30)
        produced = sum(int((self.folder / f"producer-{i}").read_text()) for i in range(len(NODES)))
        self._wait(lambda f: f["rows"] == 0, "all rows to get through")
        figures = self.dock.figures()
        self.drained.touch()
        for worker in self.workers:
            worker.process.join(30)
        logged = Counter[int]()
        for path in self.folder.glob("learn-*.log"):
            logged.update(np.frombuffer(path.read_bytes()[: path.stat().st_size // 8 * 8], np.int64).tolist())
        done = figures["stages"]["learn"]["done"]
        if done != produced or figures["dropped"]:
            print("missing:", sorted(self.dock.missing())[:20], "figures:", figures, file=sys.stderr)
            show_logs(self.server.folder)
        twice = sum(n - 1 for n in logged.values() if n > 1)
        return {
            "rows": produced,
            "lost": max(0, produced - done) + figures["dropped"],
            "doubled": max(0, max(0, done - produced), twice),
            "wrong": self.crashed,
            "redone_leases": figures["expired"],
        }


def show_logs(folder: Path) -> None:
    for log in folder.glob("*.log"):
        print(f"--- {log.name}", log.read_text()[-3000:], sep="\n", file=sys.stderr)


def run(options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options: kills, seed, lease_s. Returns what `tidemill bench dock-faults --json` prints."""
    options = options or {}
    kills, seed, lease_s = options.get("kills", 1000), options.get("seed", 0), options.get("lease_s", 1.0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tidemill.dock.client", "numpy"])
    folder = Path(tempfile.mkdtemp(prefix="tidemill-faults-"))
    setup = DockSetup(STAGES, source=("x",), lease_s=lease_s, replicas=1, max_rows=400, segment_bytes=1 << 20)
    started = time.monotonic()
    try:
        with DockServer(setup, folder / "dock", nodes=NODES) as server:
            soak = Soak(server, folder, random.Random(seed), context, folder / "stop", folder / "drained")
            soak.begin()
            for i in range(kills):
                soak.kill_one()
                if options.get("verbose"):
                    worst = {kind: round(max(v, default=0), 2) for kind, v in soak.recoveries.items()}
                    print(f"{i + 1}/{kills}", worst, file=sys.stderr)
            counted = soak.finish()
            soak.dock.close()
    except TidemillError:
        show_logs(folder / "dock")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    every = [s for kind in KINDS for s in soak.recoveries[kind]]
    return {
        "kills": kills,
        **counted,
        "recovery_s_max": round(max(every, default=0.0), 3),
        "recoveries_over_2_s": sum(s > 2 for s in every),
        "recovery_s_median": round(statistics.median(every), 3) if every else 0.0,
        "recovery_s": {
            kind: {"kills": len(v), "median": round(statistics.median(v), 3), "max": round(max(v), 3)}
            for kind, v in soak.recoveries.items()
            if v
        },
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    result = run(vars(arguments))
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    sys.exit(0 if result["lost"] == result["doubled"] == result["wrong"] == 0 else 1)


if __name__ == "__main__":
    main()
