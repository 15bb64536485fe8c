"""The process that every sandboxed program is a copy of: Python already started, files already out of reach.

It reads programs from its socket, forks for each, watches the copy's time and output, and answers. It has an empty
environment and no secrets, so a copy inherits none.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from types import SimpleNamespace
from typing import Any

from tidemill.reward.sandbox import files, filter
from tidemill.reward.wire import JsonSocket

PR_SET_PDEATHSIG = 1
CHUNK = 65536
LONGEST_VALUE, LONGEST_VERDICT = 4000, 60_000  # characters; a pipe holds 64 KiB


def main(socket: int, scratch: str, own_path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    wire = JsonSocket.at(socket)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = SimpleNamespace(**wire.receive())
    try:
        place = prepare(libc, scratch, limits)
    except (OSError, AttributeError) as error:
        wire.send({"failed": str(error)})
        return
    sys.path[:] = [p for p in sys.path if p != own_path]
    wire.send({"ready": True, "scratch": place is not None})
    gc.freeze()  # copies do not touch what is here already, so its pages stay shared
    while True:
        try:
            message = wire.receive()
        except EOFError:
            return
        wire.send(run(libc, wire, message, limits))
        if place is not None:
            clear(place)


def prepare(libc: ctypes.CDLL, scratch: str, limits: SimpleNamespace) -> str | None:
    """The scratch folder, when there can be one; files out of reach in any case."""
    if files.landlock_version(libc) < 1:
        raise OSError("the kernel has no Landlock (Linux 5.13 or later, with it enabled)")
    filter.program(0)  # an architecture it does not know fails here
    has_scratch = limits.scratch_mb > 0 and files.make_scratch(libc, scratch, limits.scratch_mb, limits.files)
    place = scratch if has_scratch else None
    os.chdir(place or "/")
    files.restrict(libc, place)
    return place


def clear(place: str) -> None:
    """What one program wrote is not there for the next."""
    for entry in os.scandir(place):
        try:
            if entry.is_dir(follow_symlinks=False):
                clear(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)
        except OSError:
            continue


def run(libc: ctypes.CDLL, wire: JsonSocket, message: dict[str, Any], limits: SimpleNamespace) -> dict[str, Any]:
    """One program in a copy of this process, watched until it ends."""
    out_read, out_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    word = os.urandom(8).hex()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(out_read)
        os.close(verdict_read)
        wire.close()
        in_copy(libc, message, limits, out_write, verdict_write, word)
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
    except ValueError:
        return []
    return [a if isinstance(a, str) else None for a in answers] if isinstance(answers, list) else []


def in_copy(
    libc: ctypes.CDLL, message: dict[str, Any], limits: SimpleNamespace, out: int, verdict: int, word: str
) -> None:
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
        status = interpret(message, verdict, word)
    finally:
        os._exit(status)


def interpret(message: dict[str, Any], verdict: int, word: str) -> int:
    """The program's exit status."""
    write, dumps = os.write, json.dumps  # as they are now, whatever the program makes of them
    with open(0, closefd=False) as sys.stdin, open(1, "w", closefd=False) as sys.stdout:
        sys.stderr = sys.stdout
        try:
            scope: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(message["code"], "program.py", "exec"), scope)
            answers: list[str | None] = []
            room = LONGEST_VERDICT
            for source, is_value in message.get("checks") or ():
                answers.append(value_of(source, scope) if is_value else holds(source, scope))
                room -= 8 + len(answers[-1] or "")
                if room < 0:
                    break
            write(verdict, word.encode() + dumps(answers).encode())
        except SystemExit as leaving:
            return 0 if leaving.code in (None, 0) else 1
        except BaseException:
            traceback.print_exc(limit=4)
            return 1
    return 0


def holds(check: str, scope: dict[str, Any]) -> str | None:
    try:
        exec(compile(check, "check.py", "exec"), scope)
    except Exception:
        return None
    return "holds"


def value_of(expression: str, scope: dict[str, Any]) -> str | None:
    """A plain value as text; None for anything else, and for what raises."""
    try:
        value = eval(compile(expression, "check.py", "eval"), scope)
        text = repr(as_plain(value))
    except Exception:
        return None
    return text if len(text) <= LONGEST_VALUE else None


def as_plain(value: Any) -> Any:
    """The same of Python's own types alone, read by their own methods: a Counter is a dict, and an int that calls
    itself equal to everything is its number. Anything else is a TypeError."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    for kind, read in PLAIN:
        if isinstance(value, kind):
            return read(value)
    raise TypeError("no plain value")


PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda v: int.__add__(v, 0)),
    (float, lambda v: float.__add__(v, 0.0)),
    (str, lambda v: str.__add__(v, "")),
    (list, lambda v: [as_plain(x) for x in list.__iter__(v)]),
    (tuple, lambda v: tuple(as_plain(x) for x in tuple.__iter__(v))),
    (set, lambda v: {as_plain(x) for x in set.__iter__(v)}),
    (frozenset, lambda v: {as_plain(x) for x in frozenset.__iter__(v)}),
    (dict, lambda v: {as_plain(k): as_plain(x) for k, x in dict.items(v)}),
)


def take_limits(limits: SimpleNamespace) -> None:
    memory = limits.memory_mb << 20
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, limits.scratch_mb << 20),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
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
