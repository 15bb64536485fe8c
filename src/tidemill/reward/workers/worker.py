"""The process that runs reward functions which may hang or crash: `python -m tidemill.reward.workers.worker FD`.

It speaks JSON over one socket: first the functions, then lists of units; every unit is answered on its own, in order.
Its standard output is joined to standard error, so a function that prints does not disturb anything.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from tidemill.errors import TidemillError
from tidemill.reward.api import RewardFunction, Sample
from tidemill.reward.registry import find
from tidemill.reward.workers.outcome import Outcome, judge
from tidemill.reward.workers.wire import JsonSocket

PR_SET_PDEATHSIG = 1


def main() -> None:
    wire = JsonSocket.at(int(sys.argv[1]))
    die_with_parent()
    os.dup2(2, 1)
    try:
        functions = [(load(name), args) for name, args in wire.receive()]
    except TidemillError as error:
        wire.send({"failed": str(error)})
        return
    except Exception as error:
        wire.send({"failed": f"{type(error).__name__}: {error}"})
        return
    wire.send({"ready": True})
    while True:
        try:
            units = wire.receive()
        except EOFError:
            return
        for index, sample in units:
            function, args = functions[index]
            wire.send(encoded(judge(function, Sample(**sample), args)))


def load(name: str) -> RewardFunction:
    """The function; its module's `warm_up()`, where there is one, runs before any sample's clock starts."""
    function = find(name)
    warm_up = getattr(sys.modules.get(getattr(function, "__module__", "")), "warm_up", None)
    if callable(warm_up):
        warm_up()
    return function


def encoded(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in Outcome.__slots__}


def die_with_parent() -> None:
    """Linux only: a worker stuck in a function would outlive a parent that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
