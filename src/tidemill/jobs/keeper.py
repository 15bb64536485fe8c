"""Keep one attempt of one job: run its command once, write how it ended, leave no process behind.

Started by path, with the standard library alone, in a session of its own: it outlives the queue. The lock says that
it lives; `started` that the attempt was begun, which happens once whoever starts keepers; `exit` that it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENV_JOB = "TIDEMILL_QUEUE_JOB"  # marks every process of an attempt
NOT_STARTED = 127


def main(folder: Path) -> None:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by the command
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another keeper has this attempt
    if (folder / "started").exists():
        return
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    asked: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        if child:
            with contextlib.suppress(ProcessLookupError):
                child[0].send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    write(folder / "started", str(os.getpid()))
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    code = run(spec, folder, child, asked, libc)
    end_descendants()
    write(folder / "exit", str(code))


def run(spec: dict, folder: Path, child: list, asked: list[int], libc: ctypes.CDLL) -> int:  # type: ignore[type-arg]
    def die_with_keeper() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    environment = {**os.environ, **spec["env"], ENV_JOB: str(folder)}
    with (folder / "log").open("ab") as log:
        try:
            made = subprocess.Popen(
                spec["command"],
                cwd=spec["folder"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_keeper,
            )
        except OSError as error:
            log.write(f"cannot be started: {error}\n".encode())
            return NOT_STARTED
        child.append(made)
        if asked:  # the signal came before there was a child
            made.terminate()
        code = made.wait()
    return code if code >= 0 else 128 - code


def end_descendants() -> None:
    """Kill whatever the command left running: as their subreaper, this process is the parent of its orphans."""
    while True:
        left = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
