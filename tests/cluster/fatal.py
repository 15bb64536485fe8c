"""A reward whose module ends the worker named by FATAL right after its first commit, before another line of it runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tidemill.dock.lease import TakenLease
from tidemill.imports import WORKER

FATAL, MARK = "TIDEMILL_TEST_FATAL", "TIDEMILL_TEST_FATAL_MARK"  # in the environment: who dies, and the file it leaves
commit = TakenLease.commit


def commit_and_die(lease: TakenLease, *args: Any, **kwargs: Any) -> None:
    commit(lease, *args, **kwargs)
    mark = Path(os.environ[MARK])
    if os.environ.get(WORKER) == os.environ[FATAL] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if FATAL in os.environ:
    TakenLease.commit = commit_and_die  # type: ignore[method-assign]


def reward(sample: Any) -> float:
    return len(sample.response) / 7
