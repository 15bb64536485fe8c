"""A process that steps some of a vector's environments: python -m tidemill.environment.vector.process WIRE BELL MEMORY.

It ends when its owner does. What an environment prints goes where its owner's output goes; what it raises is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import numpy as np

from tidemill.environment.vector.making import make_slots
from tidemill.environment.vector.room import Bell, Room, fields
from tidemill.models.spaces import Spaces
from tidemill.recipe.environment import EnvironmentSettings
from tidemill.reward.workers.wire import JsonSocket

STEP, RESET, END = 1, 2, 3  # what is asked


def run(wire: JsonSocket, rung: socket.socket, handle: int) -> None:
    told: dict[str, Any] = wire.receive()
    spaces = Spaces.of(told["spaces"])
    room = Room(fields(told["count"], told["workers"], spaces), handle)
    bell = Bell(room["bells"][told["worker"]], rung, is_worker=True)
    first, last = told["first"], told["last"]
    try:
        sys.path[:0] = [p for p in told["path"] if p not in sys.path]
        slots = make_slots(EnvironmentSettings.model_validate_json(json.dumps(told["settings"])), last - first)
        wire.send({"ready": True})
    except BaseException as error:
        wire.send({"failed": _words(error)})
        return
    number = int(bell.mine[0])
    while True:
        number += 1
        bell.wait(number)
        asked = int(room["asks"][0])
        if asked == END:
            slots.close()
            return
        try:
            _do(slots, room, asked, first, last)
        except BaseException as error:
            wire.send({"failed": _words(error)})
            return
        bell.ring(number)


def _do(slots: Any, room: Room, asked: int, first: int, last: int) -> None:
    own = np.flatnonzero(room["chosen"][first:last])
    at = own + first
    if asked == RESET:
        room["observations"][at] = slots.reset(own, room["seeds"][at])
        return
    stepped = slots.step(own, room["moves"][at], room["seeds"][at])
    for name in ("observations", "rewards", "ends"):
        room[name][at] = getattr(stepped, name)
    if stepped.ends.any():
        room["finals"][at] = stepped.finals


def _words(error: BaseException) -> str:
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its owner's business
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        run(JsonSocket.at(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
