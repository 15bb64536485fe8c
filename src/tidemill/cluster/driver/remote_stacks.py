"""Stacks of workers on other hosts: requested on their own node, through the Ray that placed them. The run's driver
takes no part, so this also works while it waits or hangs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.cluster.start.forkserver import environment

if TYPE_CHECKING:
    from tidemill.cluster.driver.status import WorkerStatus

KNOCK_S = 3.0  # for Ray to answer at all
REACH_S = 40.0  # for a node's answer: a process is started there, and each worker may take a while to dump its stacks


def stacks(address: str, workers: Sequence[WorkerStatus], logs: Path) -> dict[str, str]:
    """Return stacks by worker, or why a worker cannot be reached."""
    try:
        with _connected(address) as ray:
            return _asked(ray, workers, logs)
    except (OSError, ImportError, ValueError, RuntimeError) as error:  # what Ray raises when it cannot be joined
        return {w.name: f"on {w.host}, which cannot be reached: Ray at {address}: {_line(error)}" for w in workers}


def _asked(ray: Any, workers: Sequence[WorkerStatus], logs: Path) -> dict[str, str]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    asked: dict[str, Any] = {}
    for node in dict.fromkeys(w.node for w in workers):
        pids = [(w.pid, str(logs / f"{w.name}.stacks")) for w in workers if w.node == node]
        here = look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": environment()},
        )
        asked[node] = here.remote(pids)
    found: dict[str, str] = {}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=REACH_S)
    for node, reference in asked.items():
        there = [w for w in workers if w.node == node]
        try:
            told = ray.get(reference, timeout=0.1)
        except ray.exceptions.RayError as error:
            what = f"no answer within {REACH_S:g} s" if isinstance(error, TimeoutError) else _line(error)
            told = [f"on {w.host}, which cannot be reached: {what}" for w in there]
            ray.cancel(reference, force=True)
        found |= {w.name: text for w, text in zip(there, told, strict=True)}
    return found


def _look(pids: list[tuple[int, str]]) -> list[str]:
    """Run on the node itself."""
    from tidemill.cluster.driver import status

    return [status.stacks_of(pid, Path(file)) for pid, file in pids]


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), KNOCK_S).close()  # Ray itself would try for a minute
    import ray

    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    ray.init(address=address, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
