"""What the dock and its peers are made to carry, and how a side process is driven. Plain numpy: peers import it too."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, COLUMNS, WIDTH = 1024, 9, 8192  # 302 MB of fp32
SMALL_WIDTH = 128  # a row of 9 such columns is 4.6 kB: what one finished sample of a short answer weighs
BIG_BYTES = ROWS * COLUMNS * WIDTH * 4
CALLS = {1: 200, 8: 100, 64: 50}  # calls timed, by rows per call
REPEATS = 7


def big() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    block = rng.random((ROWS, WIDTH), np.float32)
    return {f"c{i}": block + i for i in range(COLUMNS)}


def small(rows: int) -> dict[str, np.ndarray]:
    return {f"c{i}": np.full((rows, SMALL_WIDTH), i, np.float32) for i in range(COLUMNS)}


def jagged(rows: int = ROWS) -> dict[str, list[np.ndarray]]:
    """Answers of 64 to 8192 tokens, most of them short: tokens, three per-token floats, and one float per row."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(7.0, 1.0, rows), 64, 8192).astype(int)
    columns: dict[str, list[np.ndarray]] = {"tokens": [rng.integers(0, 150_000, n).astype(np.int32) for n in lengths]}
    for name in ("logprobs", "old_logprobs", "advantages"):
        columns[name] = [rng.random(n, np.float32) for n in lengths]
    columns["reward"] = [np.float32(i % 2) for i in range(rows)]  # type: ignore[misc]
    return columns


def nbytes(columns: dict[str, Any]) -> int:
    return sum(c.nbytes if isinstance(c, np.ndarray) else sum(r.nbytes for r in c) for c in columns.values())


def memcpy_gbps() -> float:
    """One core copying what `big` weighs, between pages that are there already."""
    source = np.ones(ROWS * COLUMNS * WIDTH, np.float32)
    target = np.zeros_like(source)
    times = [timed(lambda: np.copyto(target, source)) for _ in range(REPEATS)]
    return source.nbytes / statistics.median(times) / 1e9


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def summary(times: list[float], scale: Callable[[float], float]) -> dict[str, float]:
    """Median, and the range of the middle half."""
    values = sorted(scale(t) for t in times)
    quarter = len(values) // 4
    return {
        "median": round(statistics.median(values), 4),
        "low": round(values[quarter], 4),
        "high": round(values[-1 - quarter], 4),
    }


class Side:
    """Another process that does what it is told, one command at a time."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, make, arguments), daemon=True)
        self._process.start()

    def tell(self, command: str, *arguments: Any) -> None:
        self._pipe.send((command, arguments))

    def hear(self, within_s: float = 300.0) -> Any:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"no answer within {within_s:.0f} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value

    def ask(self, command: str, *arguments: Any, within_s: float = 300.0) -> Any:
        self.tell(command, *arguments)
        return self.hear(within_s)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _obey(pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    worker = make(*arguments)
    while True:
        try:
            command, rest = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", getattr(worker, command)(*rest)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


class Copier:
    """A side that can also copy what `big` weighs inside its own memory: what the machine allows at that moment."""

    _pages: tuple[np.ndarray, np.ndarray] | None = None

    def copy(self) -> float:
        if self._pages is None:
            source = np.ones(ROWS * COLUMNS * WIDTH, np.float32)
            self._pages = source, source.copy()
        source, target = self._pages
        return timed(lambda: np.copyto(target, source))


def carry(writer: Side, reader: Side, kind: str, repeats: int = REPEATS) -> tuple[list[float], ...]:
    """Seconds of puts in one process, gets in the other, and plain copies between them; two rounds warm up."""
    puts: list[float] = []
    gets: list[float] = []
    copies: list[float] = []
    for i in range(-2, repeats):
        seconds = writer.ask("put", kind, i), reader.ask("get", kind, i), writer.ask("copy")
        if i >= 0:
            for times, one in zip((puts, gets, copies), seconds):
                times.append(one)
    return puts, gets, copies


def speeds(kind_bytes: int, puts: list[float], gets: list[float], copies: list[float]) -> dict[str, dict[str, float]]:
    """What `carry` timed, in GB/s."""
    return {
        "memcpy_gbps": summary(copies, lambda s: BIG_BYTES / s / 1e9),
        "put_gbps": summary(puts, lambda s: kind_bytes / s / 1e9),
        "get_copy_gbps": summary(gets, lambda s: kind_bytes / s / 1e9),
    }


def note(result: dict[str, Any], kind: str, figures: dict[str, dict[str, float]]) -> None:
    """Medians of the big batch, with their spread, and those of the jagged one apart."""
    medians = {name: figure["median"] for name, figure in figures.items()}
    if kind == "big":
        result.update(medians)
        result["spread"] = figures
    else:
        result["jagged"] = medians


def rows_per_s(
    writer: Side, reader: Side, calls: dict[int, int] = CALLS, get: str = "get_many"
) -> dict[str, dict[str, float]]:
    """Small rows, so many per call: all puts first, then all gets, by one process each."""
    speeds: dict[str, dict[str, float]] = {"put": {}, "get": {}}
    for rows, n in calls.items():
        put_s = writer.ask("put_many", rows, n)
        get_s = reader.ask(get, rows, n)
        speeds["put"][str(rows)] = round(rows * n / put_s, 1)
        speeds["get"][str(rows)] = round(rows * n / get_s, 1)
    return speeds
