"""A worker that has lost a part of itself says so in its next report; other failed commands are their callers'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.cluster.commands import WorkerCommands, request
from tidemill.cluster.report import Failure
from tidemill.cluster.worker.host import Host
from tidemill.errors import CheckpointError, InterpreterError, TidemillError


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [(InterpreterError("MindSpore's process 0 was killed by SIGKILL"), True), (CheckpointError("no room"), False)],
)
def test_a_command_that_fails(error: TidemillError, is_lost: bool) -> None:
    host = Host("learner-0")

    def after_step(*_: Any) -> None:
        raise error

    host.worker = SimpleNamespace(after_step=after_step)  # type: ignore[assignment]
    told = host.give(request(WorkerCommands.after_step, 1, {}))
    assert host.run_once()
    assert told.exception() is error
    assert (host.error is error) == is_lost
    assert Failure.of(error).is_users != is_lost  # else the worker is started anew
