"""The status of a run on workers: written by its driver every second or so, read by `tidemill status`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from tidemill.cluster.wiring import ROLLOUT
from tidemill.errors import ConfigError
from tidemill.observe.lock import lives

if TYPE_CHECKING:
    from tidemill.cluster.driver.worker_pool import Member
    from tidemill.dock import DockState

FILE = "status.json"
WANTED = "rollouts.wanted"
STACKS_S = 15.0
SILENT_S = 10.0  # silence is reported after this: workers report every second or so
NO_WORD_S = 60.0  # of a driver on another machine, whose process cannot be checked


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    name: str
    state: str
    pid: int
    host: str
    node: str
    doing: str
    for_s: float
    leases: int = 0
    restarts: int = 0
    version: int = -1
    waits_in: str = ""  # an operation with other ranks
    error: str = ""
    world: str = ""  # with whom: the learners, or the ranks of one engine
    silent_s: float = 0.0  # since its last report


@dataclass(frozen=True, slots=True)
class RunStatus:
    step: int
    steps: int
    open: tuple[str, ...]
    since: float  # seconds since the epoch of the last thing that moved
    written: float
    where: str
    driver: int
    machine: str
    workers: tuple[WorkerStatus, ...] = ()
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    lost: int = 0
    ray: str = ""  # Ray's address, where Ray placed the workers
    home: str = ""  # the driver's node
    logs: str = ""  # the run's folder, as workers know it
    is_over: bool = False  # all steps are made


def want_rollouts(folder: Path, count: int) -> None:
    """Ask the driver for this many rollout workers from now on."""
    found = read(folder)
    if not any(w.name.startswith(f"{ROLLOUT}-") for w in found.workers):
        raise ConfigError(
            f"{folder} has no rollout workers: rollout is colocated with the learners",
            "start it with cluster.placement.rollout=separated, and it can be scaled",
        )
    if not is_running(found):
        raise ConfigError(f"{folder} is not running", f"tidemill resume {folder} continues it")
    (folder / WANTED).write_text(str(count))


def wanted_rollouts(folder: Path) -> int | None:
    try:
        return int((folder / WANTED).read_text())
    except (FileNotFoundError, ValueError):
        return None


def of_member(member: Member) -> WorkerStatus:
    report, now = member.report, time.monotonic()
    is_ready = member.state == "ready" and report is not None
    return WorkerStatus(
        name=member.name,
        state=member.state,
        pid=member.pid,
        host=member.host,
        node=member.node,
        doing=(report.doing or "idle") if is_ready and report else "",
        for_s=(report.since_s + now - member.heard) if is_ready and report else now - member.since,
        leases=report.leases if report else 0,
        restarts=member.restarts,
        version=report.version if report else -1,
        waits_in=report.operation if report else "",
        error=member.last_error.splitlines()[0] if member.last_error else "",
        world=world_of(member),
        silent_s=now - member.heard if is_ready else 0.0,
    )


def world_of(member: Member) -> str:
    """The group it waits for in operations: the learners, or its engine's ranks; "": none."""
    group = member.post.group
    if group.learns:
        return group.name
    return f"{group.name} engine {member.post.engine}" if group.engine_ranks > 1 else ""


def stages_of(state: DockState) -> dict[str, dict[str, float]]:
    return {name: {"ready": c.ready, "leased": c.leased, "done": c.done} for name, c in state.stages.items()}


def write(folder: Path, status: RunStatus) -> None:
    aside = folder / f".{FILE}.tmp"
    aside.write_text(json.dumps(asdict(status)))
    aside.replace(folder / FILE)


def read(folder: Path) -> RunStatus:
    try:
        plain = json.loads((folder / FILE).read_text())
    except (FileNotFoundError, ValueError):
        raise ConfigError(
            f"{folder} has no {FILE}: it runs in one process, or has not started",
            f"`tidemill config` shows cluster.executor; {folder}/metrics.jsonl has every step made",
        ) from None
    workers = tuple(WorkerStatus(**w) for w in plain.pop("workers"))
    return RunStatus(**{**plain, "open": tuple(plain.pop("open"))}, workers=workers)


def render(status: RunStatus) -> str:
    """Render who does what, since when, and what waits for whom."""
    from tidemill.dock.view import table

    running, now = _how_it_is(status)
    lines = [
        f"step {status.step} of {status.steps}, {running}; {status.where}",
        f"open: {', '.join(status.open) or 'no stage'}; last moved {now - status.since:.0f} s ago; "
        f"workers lost so far: {status.lost}",
        "",
    ]
    rows: list[tuple[str, ...]] = []
    for w in status.workers:
        doing = f"{w.doing}{f', in {w.waits_in}' if w.waits_in else ''}" if w.doing else w.error or "–"
        version = str(w.version) if w.version >= 0 else "–"
        silent = f", silent for {w.silent_s:.0f} s" if w.silent_s > SILENT_S else ""
        cells = (
            w.name,
            f"{w.state}{silent}",
            str(w.pid),
            w.host,
            doing,
            f"{w.for_s:.0f} s",
            version,
            str(w.leases),
            str(w.restarts),
        )
        rows.append(cells)
    lines += table(("worker", "state", "pid", "host", "doing", "for", "weights", "leases", "restarts"), rows)
    stages = [(n, *(f"{c.get(k, 0):g}" for k in ("ready", "leased", "done"))) for n, c in status.stages.items()]
    if stages:
        lines += ["", *table(("stage", "ready", "leased", "done"), stages)]
    lines += ["", *who_waits(status.workers, status.stages)]
    return "\n".join(lines)


def is_running(status: RunStatus) -> bool:
    """Say whether the driver lives, as far as can be seen from here."""
    if status.is_over:
        return False
    if status.machine == socket.gethostname():
        return lives(status.driver)
    return time.time() - status.written < NO_WORD_S


def _how_it_is(status: RunStatus) -> tuple[str, float]:
    """Describe whether the driver is there, and up to when its report is valid."""
    now, is_here = time.time(), status.machine == socket.gethostname()
    if status.is_over:
        return "all steps are done", status.written
    if is_running(status):
        return "running" if is_here else f"running on {status.machine}", now
    if is_here:
        return "its driver has ended: `tidemill resume` continues it", status.written
    return f"no report from its driver on {status.machine} for {now - status.written:.0f} s: look there", status.written


def who_waits(workers: Iterable[WorkerStatus], stages: dict[str, dict[str, float]]) -> list[str]:
    """Say who waits for whom: the first stage with rows is what all later ones wait for, and the workers that hold
    those rows are what it waits for."""
    listed = list(workers)
    told = []
    for w in listed:
        if w.state != "ready":
            told.append(f"{w.name} is {w.state} since {w.for_s:.0f} s{f': {w.error}' if w.error else ''}")
        elif w.waits_in:
            others = [o.name for o in listed if o.name != w.name and o.world == w.world and not o.waits_in]
            told.append(f"{w.name} waits in {w.waits_in} for {', '.join(others) or 'the other ranks'}")
    first = next((name for name, c in stages.items() if c["ready"] or c["leased"]), None)
    if first is not None:
        holders = [w.name for w in listed if w.leases and (w.doing == first or w.doing == "idle")]
        where = f"held by {', '.join(holders)}" if holders else "held by no worker that answers"
        counts = stages[first]
        told.append(
            f"everything after {first} waits for {counts['ready']:g} ready and {counts['leased']:g} leased rows"
        )
        if counts["leased"]:
            told.append(f"those leased are {where}")
    return told


# Stacks


def stacks_of(pid: int, own: Path) -> str:
    """Return the stacks of a process on this machine: by py-spy where it is installed and allowed, else its own."""
    if not lives(pid):
        return "the process has ended"
    spy = which("py-spy") or _beside_python("py-spy")
    if spy is not None:
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=STACKS_S)
            if done.returncode == 0:
                return done.stdout
    return _own_stacks(pid, own)


def keep_stacks(file: Path) -> Callable[[], None]:
    """Make this process write its stacks to a file when it is signalled; return a function that ends this."""
    stream = file.open("w")
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)

    def end() -> None:
        faulthandler.unregister(signal.SIGUSR1)
        stream.close()

    return end


def _own_stacks(pid: int, file: Path) -> str:
    """Ask by signal: faulthandler answers even in a process that hangs in a call."""
    if not file.exists():
        return "py-spy is not installed or not allowed here, and the process keeps no stacks of its own"
    before = file.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5.0
    while file.stat().st_size == before and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    with file.open() as text:
        text.seek(before)
        return text.read() or "no answer: the process is stopped"


def _beside_python(name: str) -> str | None:
    import sys

    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else None


def all_stacks(folder: Path, status: RunStatus) -> list[tuple[str, str]]:
    """Return the stacks of the driver and every worker: on this machine by their processes, elsewhere through Ray."""
    logs = folder / "logs"
    found: list[tuple[str, str]] = []
    is_here = status.machine == socket.gethostname()
    if status.is_over or (is_here and not lives(status.driver)):  # their process ids may have been reused
        return [("driver", "has ended, and all workers with it")]
    if is_here:
        found.append((f"driver (pid {status.driver})", stacks_of(status.driver, logs / "driver.stacks")))
    else:
        found.append(("driver", f"on {status.machine}: run the command there"))
    away = [w for w in status.workers if w.pid and not _is_here(w, status)]
    told = _stacks_elsewhere(status, away, Path(status.logs or logs)) if away else {}
    for w in status.workers:
        if not w.pid:
            found.append((w.name, f"{w.state}: no process"))
        elif w.name in told:
            found.append((f"{w.name} (pid {w.pid} on {w.host})", told[w.name]))
        else:
            found.append((f"{w.name} (pid {w.pid})", stacks_of(w.pid, logs / f"{w.name}.stacks")))
    return found


def _stacks_elsewhere(status: RunStatus, workers: list[WorkerStatus], logs: Path) -> dict[str, str]:
    if not status.ray:
        return {w.name: f"on {w.host}: run the command there" for w in workers}
    from tidemill.cluster.driver import remote_stacks as elsewhere

    return elsewhere.stacks(status.ray, workers, logs)


def _is_here(worker: WorkerStatus, status: RunStatus) -> bool:
    if status.machine == socket.gethostname() and worker.node == status.home:
        return True
    return is_own(worker.host)


def is_own(host: str) -> bool:
    """Say whether an address is this machine's."""
    return host in ("127.0.0.1", *_own_addresses())


def _own_addresses() -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def as_plain(status: RunStatus) -> dict[str, Any]:
    return asdict(status)
