"""Supervise a job on one of its nodes: join the Ray cluster, run the recipe on node 0, resume it when it is killed.

Every target starts this same program on every node. Node 0 starts the Ray head, waits until all nodes have joined,
and runs `tidemill.launch.entry`, again and again until the run is done. The others keep a Ray node up while the head
answers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from tidemill.launch import entry, place
from tidemill.launch.place import Place
from tidemill.owned import OwnedFolder
from tidemill.recipe import load as recipes

JOIN_S = 600.0  # longest that node 0 waits for the others, and they for it
HEAD_GONE = 5  # probes of the head's port that must fail in a row, a second apart, before a node leaves
PAUSE_S = 2.0  # before a killed run is started again
PR_SET_PDEATHSIG = 1


class Stop:
    """Whether the job was asked to stop. A signal is passed on to the child that is running, once."""

    def __init__(self) -> None:
        self.asked = False
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.asked and self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGTERM)
        self.asked = True


def supervise(
    command: Sequence[str], restarts: int, stop: Stop, progress: Callable[[], int], pause_s: float = PAUSE_S
) -> int:
    """Run a command until it is done, stopped or refused. `restarts` counts tries without progress in between."""
    left, before = restarts, progress()
    while True:
        stop.child = spawn(command)
        if stop.asked:  # the signal came before there was a child
            stop.child.terminate()
        code = stop.child.wait()
        stop.child = None
        if code == entry.DONE or stop.asked:
            return entry.DONE if code == entry.DONE else entry.STOPPED
        if code in (entry.STOPPED, entry.REFUSED):
            return code
        if (now := progress()) != before:
            left, before = restarts, now
        if left <= 0:
            return code if code > 0 else 128 - code
        left -= 1
        print(f"the run ended with {code}; it is resumed ({left} more without progress)", file=sys.stderr, flush=True)
        time.sleep(pause_s)


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child that dies with this process, in a process group of its own: signals reach it through us."""
    return subprocess.Popen(command, process_group=0, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# The Ray cluster of a job


def ray_start(*words: str) -> list[str]:
    """`ray start` in the foreground, with ports that two nodes on one machine do not fight over."""
    ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *ports, *words]


@contextlib.contextmanager
def head(here: Place) -> Iterator[None]:
    """Keep the Ray head up. Its folder is the job's own and goes with it."""
    folder = OwnedFolder()  # its name is short: sockets lie in it
    words = ("--head", f"--port={here.port}", f"--node-ip-address={here.head}", f"--temp-dir={folder.path}")
    started = spawn(ray_start(*words, "--include-dashboard=false", *_limits()))
    try:
        _wait_until(lambda: is_open(here), started)
        yield
    finally:
        _end(started)
        folder.close()


def wait_for_nodes(here: Place) -> None:
    import ray

    ray.init(address=here.address, log_to_driver=False, configure_logging=False)
    try:
        deadline = time.monotonic() + JOIN_S
        while (alive := sum(node["Alive"] for node in ray.nodes())) < here.nodes:  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise SystemExit(f"error: {alive} of {here.nodes} nodes joined within {JOIN_S:g} s")
            time.sleep(0.5)
    finally:
        ray.shutdown()


def follow(here: Place) -> int:
    """Keep a Ray node up while the head answers; a node that dies is started again. Ends when the head is gone."""
    deadline = time.monotonic() + JOIN_S
    while not is_open(here):
        if time.monotonic() > deadline:
            print(f"error: no Ray head answers at {here.address} within {JOIN_S:g} s", file=sys.stderr)
            return 1
        time.sleep(0.5)
    node = spawn(ray_start(f"--address={here.address}", *_limits()))
    missed = 0
    while missed < HEAD_GONE:
        time.sleep(1.0)
        missed = 0 if is_open(here) else missed + 1
        if node.poll() is not None and not missed:
            node = spawn(ray_start(f"--address={here.address}", *_limits()))
    _end(node)
    return 0


def is_open(here: Place) -> bool:
    try:
        with socket.create_connection((here.head, here.port), timeout=5.0):
            return True
    except OSError:
        return False


def _limits() -> list[str]:
    """What a node offers, where the launch says less than the machine has (two nodes on one machine)."""
    cpus, memory = os.environ.get("TIDEMILL_NODE_CPUS"), os.environ.get("TIDEMILL_NODE_STORE_BYTES")
    words = [f"--num-cpus={cpus}"] if cpus else []
    return words + ([f"--object-store-memory={memory}"] if memory else [])


def _wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + JOIN_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("error: the Ray head did not start; its own lines are above")
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# One node


def run(here: Place, recipe: str, restarts: int) -> int:
    command = [sys.executable, "-m", "tidemill.launch.entry", recipe]
    config = recipes.load(recipe).config
    metrics = Path(config.folder).expanduser() / config.name / "metrics.jsonl"

    def progress() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    if place.TOKEN_PATH in os.environ:  # a launch by ssh knows it only relative to the job's folder
        os.environ[place.TOKEN_PATH] = str(Path(os.environ[place.TOKEN_PATH]).resolve())
    if here.nodes > 1 and "RAY_AUTH_MODE" not in os.environ:
        # Said on every node alike: Ray's default depends on what is in this user's home folder.
        has_token = place.TOKEN_PATH in os.environ or "RAY_AUTH_TOKEN" in os.environ
        os.environ["RAY_AUTH_MODE"] = "token" if has_token else "disabled"
    if here.rank > 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)  # node 0 ends the run, which needs this node until then
        return follow(here)
    with Stop() as stop:
        if here.nodes == 1:
            return supervise(command, restarts, stop, progress)
        with head(here):
            wait_for_nodes(here)
            os.environ["RAY_ADDRESS"] = here.address  # what cluster.address=auto means
            return supervise(command, restarts, stop, progress)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemill.launch.node", description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--restarts", type=int, default=3)
    given = parser.parse_args(words)
    return run(place.find(os.environ), given.recipe, given.restarts)


if __name__ == "__main__":
    sys.exit(main())
