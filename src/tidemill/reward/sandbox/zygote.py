"""The process that every sandboxed program is a copy of: Python already started, files already out of reach.

It reads programs from its socket, forks for each, watches the copy's time and output, and answers. It has an empty
environment and no secrets, so a copy inherits none.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from tidemill.reward.sandbox import files, filter, root
from tidemill.reward.sandbox.session import Session
from tidemill.reward.sandbox.values import encoded
from tidemill.reward.workers.wire import JsonSocket

PR_SET_PDEATHSIG = 1
CHUNK = 65536
F_SETPIPE_SZ = 1031
LONGEST_VALUE = 100_000  # characters of one value, encoded
PIPE = 1 << 20  # bytes that a pipe holds at most, by the kernel's usual setting; 64 KiB where that is refused


class Verdict(NamedTuple):
    """Where a copy writes what became of the checks: behind the word, and no more than fits without waiting."""

    pipe: int
    word: str
    room: int


def main(socket: int, folder: str, own_path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    wire = JsonSocket.at(socket)
    with contextlib.suppress(EOFError, ConnectionError):  # the process that asks is gone
        serve(libc, wire, folder, own_path)


def serve(libc: ctypes.CDLL, wire: JsonSocket, folder: str, own_path: str) -> None:
    limits = SimpleNamespace(**wire.receive())
    try:
        place = prepare(libc, folder, limits)
    except (OSError, AttributeError) as error:
        wire.send({"failed": str(error)})
        return
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # only now: the kernel forgets it when the user changes
    sys.path[:] = [p for p in sys.path if p != own_path]
    wire.send({"ready": True, "scratch": place is not None})
    gc.freeze()  # copies do not touch what is here already, so its pages stay shared
    talk = Session(limits, partial(confine, libc, wire, place, limits))
    while True:
        message = wire.receive()
        if "turn" in message:
            wire.send(talk.turn(message["turn"]))
            continue
        if "forget" in message:
            talk.end()
            wire.send({"is_clean": is_cleared(place)})
            continue
        if talk.pid:  # a program that was told to turn by turn, and its files, have no part in another's
            talk.end()
            is_cleared(place)
        result = run(libc, wire, place, message, limits)
        wire.send({**result, "is_clean": is_cleared(place)})


def prepare(libc: ctypes.CDLL, folder: str, limits: SimpleNamespace) -> int | None:
    """The open scratch folder, when there can be one; files out of reach in any case."""
    if files.landlock_version(libc) < 1:
        raise OSError("the kernel has no Landlock (Linux 5.13 or later, with it enabled)")
    filter.program(0)  # an architecture it does not know fails here
    is_apart = root.make_root(libc, folder, limits.scratch_mb, limits.files)
    place = root.SCRATCH if is_apart and limits.scratch_mb > 0 else None
    if not is_apart:
        limits.threads = 0  # the kernel would count all of this user's processes
    os.chdir(place or "/")
    files.restrict(libc, place)
    return None if place is None else os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def is_cleared(place: int | None) -> bool:
    """What one program wrote is not there for the next; if it cannot be deleted, the caller starts another sandbox."""
    try:
        if place is not None:
            root.clear(place)
    except (OSError, RecursionError):
        return False
    return True


def run(
    libc: ctypes.CDLL, wire: JsonSocket, place: int | None, message: dict[str, Any], limits: SimpleNamespace
) -> dict[str, Any]:
    """One program in a copy of this process, watched until it ends."""
    out_read, out_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    room = enlarged(verdict_write) - 4096
    word = os.urandom(8).hex()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(out_read)
        os.close(verdict_read)
        wire.close()
        if place is not None:
            os.close(place)
        in_copy(libc, message, limits, out_write, Verdict(verdict_write, word, room))
    os.close(out_write)
    os.close(verdict_write)
    output, status = watch(pid, out_read, limits, began)
    _, ended = os.waitpid(pid, 0)
    answers = verdict(verdict_read, word)
    os.close(out_read)
    os.close(verdict_read)
    if not status:
        status = "ok" if ended == 0 else "killed" if os.WIFSIGNALED(ended) else "failed"
    text = output.decode(errors="replace")
    return {"status": status, "output": text, "answers": answers, "seconds": time.monotonic() - began}


def enlarged(pipe: int) -> int:
    """The bytes the pipe holds."""
    with contextlib.suppress(OSError):
        return fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE)
    return 65536


def watch(pid: int, pipe: int, limits: SimpleNamespace, began: float) -> tuple[bytes, str]:
    """The program's output, and the limit that ended it, if one did."""
    output = bytearray()
    while True:
        left = limits.wall_s - (time.monotonic() - began)
        ready = select.select([pipe], [], [], max(left, 0.0))[0] if left > 0 else []
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return bytes(output), "timeout"
        data = os.read(pipe, CHUNK)
        if not data:
            # Its output is closed: it has ended, or it goes on in silence until its time is up.
            return bytes(output), wait_silently(pid, limits, began)
        output += data
        if len(output) > limits.output_bytes:
            os.kill(pid, signal.SIGKILL)
            return bytes(output[: limits.output_bytes]), "output"


def wait_silently(pid: int, limits: SimpleNamespace, began: float) -> str:
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - began > limits.wall_s:
            os.kill(pid, signal.SIGKILL)
            return "timeout"
        time.sleep(0.0002)
    return ""


def verdict(pipe: int, word: str) -> list[Any]:
    """What became of each check. The copy writes the word only behind the last one, so leaving early answers none."""
    os.set_blocking(pipe, False)
    said = bytearray()
    with contextlib.suppress(BlockingIOError):
        while data := os.read(pipe, CHUNK):
            said += data
    if not said.startswith(word.encode()):
        return []
    try:
        answers = json.loads(said[len(word) :])
    except (ValueError, RecursionError):
        return []
    return [a if isinstance(a, list) else None for a in answers] if isinstance(answers, list) else []


def in_copy(libc: ctypes.CDLL, message: dict[str, Any], limits: SimpleNamespace, out: int, verdict: Verdict) -> None:
    """In the copy: take on the limits, run the program, then its checks. Never returns."""
    status = 1
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        give_input(message.get("input") or "", out)
        take_limits(limits)
        for name in [n for n in sys.modules if n.partition(".")[0] == "tidemill"]:
            del sys.modules[name]  # a program finds nothing of ours to change by name
        filter.install(libc, os.getpid())
        status = interpret(message, verdict)
    finally:
        os._exit(status)


def confine(libc: ctypes.CDLL, wire: JsonSocket, place: int | None, limits: SimpleNamespace, out: int) -> None:
    """In a copy that is told to turn by turn: take on the limits."""
    wire.close()
    if place is not None:
        os.close(place)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    give_input("", out)
    take_limits(limits)
    for name in [n for n in sys.modules if n.partition(".")[0] == "tidemill"]:
        del sys.modules[name]
    filter.install(libc, os.getpid())


def interpret(message: dict[str, Any], verdict: Verdict) -> int:
    """The program's exit status."""
    write, dumps = os.write, json.dumps  # as they are now, whatever the program makes of them
    with open(0, closefd=False) as sys.stdin, open(1, "w", closefd=False) as sys.stdout:
        sys.stderr = sys.stdout
        try:
            scope: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(message["code"], "program.py", "exec"), scope)
            answers = answers_to(message.get("checks") or (), scope, verdict.room, dumps)
            write(verdict.pipe, verdict.word.encode() + dumps(answers).encode())
        except SystemExit as leaving:
            return 0 if leaving.code in (None, 0) else 1
        except BaseException:
            traceback.print_exc(limit=4)
            return 1
    return 0


def answers_to(checks: Any, scope: dict[str, Any], room: int, dumps: Callable[[Any], str]) -> list[list[Any] | None]:
    """Per check what became of its steps, each check up to the first statement that raised."""
    answers: list[list[Any] | None] = []
    for steps in checks:
        found: list[Any] = []
        for source, is_value in steps:
            found.append(value_of(source, scope, dumps) if is_value else ran(source, scope))
            if not is_value and found[-1] is None:
                break
        room -= len(dumps(found)) + 2
        if room < 0:
            break
        answers.append(found)
    return answers


def ran(statement: str, scope: dict[str, Any]) -> bool | None:
    try:
        exec(compile(statement, "check.py", "exec"), scope)
    except Exception:
        return None
    return True


def value_of(expression: str, scope: dict[str, Any], dumps: Callable[[Any], str]) -> list[Any] | None:
    """A plain value, encoded; None for anything else, and for what raises."""
    try:
        found = encoded(eval(compile(expression, "check.py", "eval"), scope))
        return found if len(dumps(found)) <= LONGEST_VALUE else None
    except Exception:
        return None


def take_limits(limits: SimpleNamespace) -> None:
    memory = limits.memory_mb << 20
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.scratch_mb << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, limits.threads + 2)] if limits.threads else []),  # this copy and what it is one of
    ):
        resource.setrlimit(what, (value, value))


def give_input(text: str, out: int) -> None:
    """Standard input, output and error of the program. Input lies in a file in memory, whatever its length."""
    if text:
        file = os.memfd_create("input")
        with open(file, "wb", closefd=False) as writer:
            writer.write(text.encode())
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)
        os.close(file)
    else:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
