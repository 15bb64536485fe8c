"""How fast the dock carries samples, next to what others offer, in one run on one machine.

    python benchmarks/dock.py --json
    python benchmarks/dock.py --peer-python PATH   # an interpreter that has the peers; default: this one

Every figure has a writer and a reader in processes of their own. Figures are medians; `spread` gives the middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

from dock_payload import (
    CALLS,
    REPEATS,
    Copier,
    Side,
    big,
    carry,
    jagged,
    memcpy_gbps,
    nbytes,
    note,
    rows_per_s,
    small,
    speeds,
    summary,
    timed,
)
from tidemill.batch import Batch, Column
from tidemill.dock import Want
from tidemill.dock.address import Address
from tidemill.dock.client import RemoteDock
from tidemill.dock.server import DockServer
from tidemill.dock.setup import DockSetup
from tidemill.dock.store.buffer import PackedBuffer
from tidemill.graph import Stage

ABOUT = "put, get and take of the dock, in GB/s, rows/s and ms; peers: transferqueue, ray_put, central_actor"
PEERS = {"transferqueue": "transfer_queue", "ray_put": "ray", "central_actor": "ray"}
if os.environ.get("TIDEMILL_PEER_PYTHON"):  # they are in that interpreter, which says so if not
    PEERS = dict.fromkeys(PEERS, "tidemill")
OPTIONS: dict[str, Any] = {"parts": [], "peer_python": "", "peers": list(PEERS)}

COLUMNS = tuple(f"c{i}" for i in range(9))
STAGES = (
    Stage("big", "reader", COLUMNS),
    Stage("small", "reader", COLUMNS),
    Stage("jagged", "reader", ("tokens", "logprobs", "old_logprobs", "advantages", "reward")),
    Stage("table", "reader", ("x",)),
    Stage("never", "reader", ("y",)),
)
TABLES = (1000, 100_000, 1_000_000)
TAKE_ROWS = 64
VIEW_ROUNDS = 3
INSTALL = {
    "transferqueue": "pip install TransferQueue tensordict 'ray[default]'",
    "ray_put": "pip install ray",
    "central_actor": "pip install ray",
}


# -- the dock's own sides ---------------------------------------------------------------------------------------------


class DockSide(Copier):
    """A process that writes to or reads from one dock. Rows of a kind carry its name as their tag."""

    def __init__(self, address: Address, node: str | None, number: int = 0) -> None:
        self._dock = RemoteDock(address, node)
        self._buffer = PackedBuffer(pinned=False)
        self._next = number << 40
        self._cache: dict[str, Any] = {}

    def _rows(self, columns: dict[str, Any]) -> Batch:
        n = len(next(iter(columns.values())))
        ids = np.arange(self._next, self._next + n)
        self._next += n
        made = {"id": ids, "group": ids, **{name: _column(rows) for name, rows in columns.items()}}
        return Batch(made)

    def _payload(self, kind: str) -> dict[str, Any]:
        if kind not in self._cache:
            data = jagged() if kind == "jagged" else big()
            self._cache[kind] = {name: _column(rows) for name, rows in data.items()}
        return self._cache[kind]

    def put(self, kind: str, i: int) -> float:
        columns = self._payload(kind)
        n = Batch(columns).rows
        ids = np.arange(self._next, self._next + n)
        self._next += n
        batch = Batch({"id": ids, "group": ids, **columns})
        return timed(lambda: self._dock.put(batch, tag=kind))

    def get(self, kind: str, i: int) -> float:
        """Out of the store into one's own memory, in one copy."""
        leases = []

        def get() -> None:
            leases.append(self._dock.take(kind, Want(rows=1024, tag=kind)))
            leases[0].packed(self._buffer)

        seconds = timed(get)
        self._finish(leases.pop())
        return seconds

    def view(self, kind: str, n: int) -> list[float]:
        """Take and have views of all columns, so many times in a row; confirmed at the end."""
        leases: list[Any] = []

        columns = next(stage.reads for stage in STAGES if stage.name == kind)
        want = Want(rows=1024, tag=kind)
        views: list[Any] = []

        def get() -> None:
            leases.append(self._dock.take(kind, want))
            batch = leases[-1].batch
            views.extend([batch.values(name) for name in columns])

        times = [timed(get) for _ in range(n)]
        assert len(views) == n * len(columns) and not any(view.flags.owndata for view in views)
        while leases:
            self._finish(leases.pop())
        return times

    def put_until(self, kind: str, i: int) -> float:
        """The moment (of a clock that all processes share) at which a put came back."""
        self.put(kind, i)
        return time.perf_counter()

    def view_when_ready(self, kind: str) -> float:
        """Wait for rows; the moment at which they could be looked at."""
        lease = self._dock.take(kind, Want(rows=1024, tag=kind), wait=60)
        for name in next(stage.reads for stage in STAGES if stage.name == kind):
            lease.batch.values(name)
        seen = time.perf_counter()
        self._finish(lease)
        return seen

    def _finish(self, lease: Any) -> None:
        ids = lease.batch.values("id").tolist()
        lease.commit(drop=ids)  # the other stages have no business with these rows

    def put_many(self, rows: int, calls: int) -> float:
        batches = [self._rows(small(rows)) for _ in range(calls)]

        def put() -> None:
            for batch in batches:
                self._dock.put(batch, tag="small")

        return timed(put)

    def get_many(self, rows: int, calls: int) -> float:
        """Take, look at the values, commit: consumption is confirmed, as it would be in a run."""
        want = Want(rows=rows, tag="small")

        def get() -> None:
            for _ in range(calls):
                lease = self._dock.take("small", want)
                lease.batch.values("c0")
                lease.commit()

        seconds = timed(get)
        self._clear(rows * calls)
        return seconds

    def take_many(self, rows: int, calls: int) -> float:
        """Take and look at the values: what a get is elsewhere, where nothing is confirmed."""
        want = Want(rows=rows, tag="small")
        leases = []

        def get() -> None:
            for _ in range(calls):
                leases.append(self._dock.take("small", want))
                leases[-1].batch.values("c0")

        seconds = timed(get)
        for lease in leases:
            lease.commit()
        self._clear(rows * calls)
        return seconds

    def _clear(self, rows: int) -> None:
        lease = self._dock.take("big", Want(rows=rows, tag="small", columns=()))
        lease.commit(drop=lease.batch.values("id").tolist())

    def fill(self, rows: int) -> float:
        """Bring the table up to so many rows that are ready."""
        started = time.perf_counter()
        missing = rows - self._dock.state().stages["table"].ready
        while missing > 0:
            n = min(missing, 50_000)
            self._dock.put(self._rows({"x": np.zeros(n, np.int8)}), tag="table")
            missing -= n
        return time.perf_counter() - started

    def take(self, calls: int) -> list[float]:
        want = Want(rows=TAKE_ROWS, tag=None)
        times = []
        for _ in range(calls):
            started = time.perf_counter()
            lease = self._dock.take("table", want)
            times.append(time.perf_counter() - started)
            lease.abandon()
        return times

    def starve(self) -> None:
        while True:
            self._dock.take("never", Want(rows=1), wait=60)

    def ping(self, calls: int) -> list[float]:
        want = Want(rows=1, tag="small")

        def once() -> None:
            self._dock.put(self._rows(small(1)), tag="small")
            self._finish(self._dock.take("small", want))

        return [timed(once) for _ in range(calls)]

    def stream_out(self, calls: int, start_at: float) -> tuple[float, float]:
        """Write big batches one after the other; when it began and ended."""
        _wait_until(start_at)
        started = time.time()
        for i in range(calls):
            self.put("big", i)
        return started, time.time()

    def stream_in(self, calls: int, start_at: float) -> tuple[float, float]:
        _wait_until(start_at)
        started = time.time()
        for _ in range(calls):
            lease = self._dock.take("big", Want(rows=1024, tag="big"), wait=60)
            lease.packed(self._buffer)
            self._finish(lease)
        return started, time.time()


def _column(rows: Any) -> Any:
    if isinstance(rows, (np.ndarray, Column)):
        return rows
    return Column.jagged(rows, rows[0].dtype) if rows[0].ndim else np.array(rows)


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


# -- the measurements -------------------------------------------------------------------------------------------------


def carrying(server: DockServer) -> dict[str, Any]:
    writer, reader = Side(DockSide, server.address, None), Side(DockSide, server.address, None)
    result: dict[str, Any] = {}
    for kind, data in (("big", big()), ("jagged", jagged())):
        carried = carry(writer, reader, kind)
        after_idle = []  # the ledger and the reader have slept while the writer wrote
        for i in range(2 * REPEATS):
            writer.ask("put", kind, i)
            after_idle += reader.ask("view", kind, 1)
        views = []
        for _ in range(VIEW_ROUNDS):
            for i in range(REPEATS):
                writer.ask("put", kind, i)
            views += reader.ask("view", kind, REPEATS)
        awaited = []  # the reader waits in its take while the writer writes
        for i in range(REPEATS):
            reader.tell("view_when_ready", kind)
            time.sleep(0.02)
            put_at = writer.ask("put_until", kind, i)
            awaited.append(reader.hear() - put_at)
        figures = {
            **speeds(nbytes(data), *carried),
            "get_zero_copy_ms": summary(views, lambda s: 1e3 * s),
            "get_zero_copy_after_idle_ms": summary(after_idle, lambda s: 1e3 * s),
            "get_zero_copy_awaited_ms": summary(awaited, lambda s: 1e3 * s),
        }
        note(result, kind, figures)
    calls = {rows: 5 * n for rows, n in CALLS.items()}
    result["rows_per_s"] = rows_per_s(writer, reader, calls)
    result["rows_per_s"]["get_and_commit"] = result["rows_per_s"].pop("get")
    result["rows_per_s"]["get"] = rows_per_s(writer, reader, calls, get="take_many")["get"]
    for side in (writer, reader):
        side.end()
    return result


def tables(rounds: int = 8) -> dict[str, float]:
    """A take of some rows from tables of several sizes, a dock each, in turns: what else the machine does, and on which
    cores it puts reader and ledger, falls on all."""
    with ExitStack() as stack:
        readers: dict[str, Side] = {}
        times: dict[str, list[float]] = {}
        for rows in TABLES:
            server = stack.enter_context(DockServer(DockSetup(STAGES, memory_bytes=1 << 30)))
            writer, reader = Side(DockSide, server.address, None, 1), Side(DockSide, server.address, None, 2)
            writer.ask("fill", rows)
            writer.end()
            reader.ask("take", 20)
            readers[str(rows)], times[str(rows)] = reader, []
        for _ in range(rounds):
            for rows_in_table, reader in readers.items():
                times[rows_in_table] += reader.ask("take", 50)
        for reader in readers.values():
            reader.end()
    return {rows_in_table: round(1e3 * statistics.median(seconds), 4) for rows_in_table, seconds in times.items()}


def starvation(server: DockServer) -> dict[str, float]:
    """A neighbour's put and take, with and without someone who waits for what never comes; interleaved, so that what
    else the machine does falls on both."""
    neighbour = Side(DockSide, server.address, None, 3)
    neighbour.ask("ping", 50)
    quiet, starved = [], []
    for _ in range(5):
        quiet += neighbour.ask("ping", 60)
        hungry = [Side(DockSide, server.address, None, 4 + i) for i in range(2)]
        for one in hungry:
            one.tell("starve")
        time.sleep(1.0)
        starved += neighbour.ask("ping", 60)
        for one in hungry:
            one.end()
    neighbour.end()
    added = statistics.median(starved) - statistics.median(quiet)
    return {"added_ms": round(1e3 * added, 4), "alone_ms": round(1e3 * statistics.median(quiet), 4)}


def pairs(memory_gbps: float, calls: int = 6) -> dict[str, dict[str, float]]:
    """Writer and reader pairs at once, each with its own stream of big batches."""
    result = {}
    size = nbytes(big())
    for n in (1, 2, 4):
        setup = DockSetup(STAGES, memory_bytes=6 << 30, max_bytes=n * 3 * size)  # readers behind: writers wait
        with DockServer(setup) as server:
            writers = [Side(DockSide, server.address, None, i + 1) for i in range(n)]
            readers = [Side(DockSide, server.address, None, i + 100) for i in range(n)]
            for _ in range(2):  # the second round finds its memory made and mapped
                start_at = time.time() + 1.0
                for side in writers:
                    side.tell("stream_out", calls, start_at)
                for side in readers:
                    side.tell("stream_in", calls, start_at)
                spans = [side.hear() for side in (*writers, *readers)]
            seconds = max(end for _, end in spans) - min(start for start, _ in spans)
            for side in (*writers, *readers):
                side.end()
        carried = n * calls * size / seconds / 1e9
        # A byte is copied twice on its way: into the store and out of it.
        result[str(n)] = {"gbps": round(carried, 2), "share_of_memcpy": round(2 * carried / memory_gbps, 3)}
    return result


def over_tcp(repeats: int = 2 * REPEATS) -> dict[str, float]:
    """The same batch from one warehouse to another over TCP, and a plain socket beside it, in turns. The share is the
    median over turns: what else the machine does falls on both of one turn."""
    size = nbytes(big())
    with DockServer(DockSetup(STAGES, memory_bytes=4 << 30), nodes=("a", "b")) as server:
        writer, reader = Side(DockSide, server.address, "a"), Side(DockSide, server.address, "b")
        raw, ours = [], []
        sink = Side(RawReceiver)
        port = sink.ask("listen")
        source = Side(RawSender, port)
        for i in range(repeats + 1):
            writer.ask("put", "big", i)
            (ours_s,) = reader.ask("view", "big", 1)
            sink.tell("receive", size)
            source.ask("send", size)
            raw_s = sink.hear()
            if i:
                ours.append(ours_s)
                raw.append(raw_s)
        for side in (writer, reader, sink, source):
            side.end()
    gbps = {"dock_gbps": size / statistics.median(ours) / 1e9, "raw_gbps": size / statistics.median(raw) / 1e9}
    shares = sorted(raw_s / ours_s for raw_s, ours_s in zip(raw, ours))
    spread = {"share_low": shares[len(shares) // 4], "share_high": shares[-1 - len(shares) // 4]}
    figures = {**gbps, "share": statistics.median(shares), **spread}
    return {name: round(figure, 3) for name, figure in figures.items()}


class RawReceiver:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self._buffer = memoryview(bytearray(nbytes(big())))

    def listen(self) -> int:
        return int(self._listener.getsockname()[1])

    def receive(self, size: int) -> float:
        if self._connection is None:
            self._connection = self._listener.accept()[0]
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        view = self._buffer[:size]
        started = None
        while len(view):
            n = self._connection.recv_into(view)
            started = started or time.perf_counter()
            view = view[n:]
        assert started is not None
        return time.perf_counter() - started


class RawSender:
    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._data = memoryview(bytearray(nbytes(big())))

    def send(self, size: int) -> None:
        self._connection.sendall(self._data[:size])


def peer(name: str, python: str) -> dict[str, Any]:
    """In a process of its own; a peer that cannot be imported is named with what would install it."""
    script = Path(__file__).with_name("dock_peers.py")
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0"}
    try:
        done = subprocess.run([python, str(script), name], capture_output=True, text=True, timeout=420, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": "did not finish within 420 s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
        return {"error": "not installed", "install": INSTALL[name]}
    return {"error": done.stderr[-400:]}


def _alone(measure: Any) -> Any:
    with DockServer(DockSetup(STAGES, memory_bytes=4 << 30)) as server:
        return measure(server)


def _starved() -> dict[str, Any]:
    hunger = _alone(starvation)
    return {"starved_neighbour_ms": hunger["added_ms"], "neighbour_alone_ms": hunger["alone_ms"]}


def payload(groups: int = 64, size: int = 16, tokens: int = 1024) -> dict[str, Any]:
    """Bytes that one step's prompts take in the dock: with a copy for each row, and once for each group."""
    rng = np.random.default_rng(0)
    place = np.repeat(np.arange(groups), size)
    prompts = Column.jagged([rng.integers(0, 150_000, tokens) for _ in range(groups)], np.int32)
    answers = Column.text([f"the answer is {i}" for i in range(groups)])
    shared = {"prompt": prompts, "answer": answers}
    ids = np.arange(groups * size)
    held = {}
    for name in ("per_row", "per_group"):
        kept = {n: c.grouped(place) if name == "per_group" else c.gather(place) for n, c in shared.items()}
        with DockServer(DockSetup((Stage("rollout", "r", tuple(shared)),), memory_bytes=1 << 28)) as server:
            dock = server.connect()
            seconds = timed(lambda rows=kept, dock=dock: dock.put(Batch({"id": ids, "group": place, **rows})))
            held[name] = {"bytes": dock.state().bytes, "put_ms": round(1e3 * seconds, 2)}
            dock.close()
    return {**held, "share": round(held["per_group"]["bytes"] / held["per_row"]["bytes"], 3)}


PARTS: dict[str, Any] = {
    "carrying": lambda: _alone(carrying),
    "starved": _starved,
    "tables": lambda: {"take_ms": tables()},
    "tcp": lambda: {"tcp": over_tcp()},
    "pairs": lambda: {"pairs": pairs(memcpy_gbps())},
    "payload": lambda: {"payload": payload()},
}


def verdicts(result: dict[str, Any]) -> dict[str, Any]:
    """The promises, each with what was measured for it; None where a part or the peer did not run."""

    def at(*path: str) -> Any:
        found: Any = result
        for name in path:
            found = (found or {}).get(name)
        return found

    def ratio(above: tuple[str, ...], below: tuple[str, ...]) -> float | None:
        return round(at(*above) / at(*below), 3) if at(*above) and at(*below) else None

    other = "transferqueue"

    def share_ratio(name: str) -> float | None:
        ours, theirs = ratio((name,), ("memcpy_gbps",)), ratio((other, name), (other, "memcpy_gbps"))
        return round(ours / theirs, 2) if ours and theirs else None

    return {
        "put_share_of_memcpy (>= 0.6)": ratio(("put_gbps",), ("memcpy_gbps",)),
        "put_times_transferqueue (>= 5)": ratio(("put_gbps",), (other, "put_gbps")),
        "get_copy_times_transferqueue (>= 10)": ratio(("get_copy_gbps",), (other, "get_copy_gbps")),
        # The same per unit of what memory allowed at the time: fair when other work came and went between the two.
        "put_times_transferqueue, each as share of the memcpy beside it": share_ratio("put_gbps"),
        "get_copy_times_transferqueue, each as share of the memcpy beside it": share_ratio("get_copy_gbps"),
        "get_zero_copy_ms (< 0.5)": at("get_zero_copy_ms"),
        "get_zero_copy_after_idle_ms": at("get_zero_copy_after_idle_ms"),
        "get_zero_copy_awaited_ms": at("get_zero_copy_awaited_ms"),
        "put_1_row_times_transferqueue (>= 10)": ratio(("rows_per_s", "put", "1"), (other, "rows_per_s", "put", "1")),
        "get_1_row_times_transferqueue (>= 10)": ratio(("rows_per_s", "get", "1"), (other, "rows_per_s", "get", "1")),
        "take_at_1m_over_1k (<= 1.5)": ratio(("take_ms", "1000000"), ("take_ms", "1000")),
        "starved_neighbour_ms (< 1)": at("starved_neighbour_ms"),
        "tcp_share_of_raw_socket (>= 0.8)": at("tcp", "share"),
    }


def run(options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options: peers (names), parts (names), peer_python. Returns what `tidemill bench dock --json` prints."""
    options = options or {}
    names = options.get("peers")
    names = list(INSTALL) if names is None else names
    python = options.get("peer_python") or os.environ.get("TIDEMILL_PEER_PYTHON") or sys.executable
    parts = options.get("parts") or list(PARTS)
    result: dict[str, Any] = {"load_average_before": round(os.getloadavg()[0], 1)}
    for part in parts:
        print(f"measuring {part}", file=sys.stderr)
        result.update(PARTS[part]())
        print(json.dumps(result), file=sys.stderr)
    for name in names:
        print(f"measuring {name}", file=sys.stderr)
        result[name] = peer(name, python)
        print(json.dumps(result[name]), file=sys.stderr)
    result["load_average_after"] = round(os.getloadavg()[0], 1)
    result["verdicts"] = verdicts(result)
    result["peers"] = {name: result.pop(name) for name in names}
    result["machine"] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release(),
    }
    return result


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--peers", nargs="*", help=f"of: {', '.join(INSTALL)}; default all")
    parser.add_argument("--parts", nargs="*", help=f"of: {', '.join(PARTS)}; default all")
    parser.add_argument("--peer-python", help="an interpreter that has the peers installed")
    result = run(vars(parser.parse_args()))
    print(json.dumps(result) if "--json" in sys.argv else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
