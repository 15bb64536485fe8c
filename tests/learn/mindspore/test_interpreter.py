"""A part of a run in another Python: what is sent arrives, what fails is told, and who dies is missed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tidemill.errors import ConfigError, InterpreterError, TidemillError
from tidemill.interpreter import Interpreter, find_python

CHILD = """
import os, socket, sys
from tidemill.interpreter import serve
def back(request):
    return {"told": request.fields, "home": os.environ["OWN"]}, {n: a * 2 for n, a in request.arrays.items()}
def fail(request): raise ValueError("no such row\\nand more")
def leave(request): print("out of memory", file=sys.stderr, flush=True); os._exit(3)
serve(socket.socket(fileno=int(sys.argv[1])), {"back": back, "fail": fail, "leave": leave})
"""


def a_python(folder: Path) -> Path:
    """Stands in for the other interpreter: it runs CHILD, whatever module it is asked for."""
    (folder / "child.py").write_text(CHILD)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "child.py"} "$3"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Interpreter]:
    made = Interpreter(a_python(tmp_path), "some.module", "the other side", tmp_path / "logs" / "log", {"OWN": "7"})
    yield made
    made.close()
    assert made.process.poll() is not None


def test_fields_and_arrays_go_over_and_come_back(other: Interpreter) -> None:
    given = {"a": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], "none": np.zeros((0, 5), np.float32)}
    given["large"] = np.random.default_rng(0).normal(size=300_000)
    for _ in range(2):
        found = other.call("back", {"x": [1, "ü"]}, **given)
        assert found.fields == {"told": {"x": [1, "ü"]}, "home": "7"}
        for name, array in given.items():
            np.testing.assert_array_equal(found.arrays[name], array * 2)
            assert found.arrays[name].dtype == array.dtype


def test_an_error_over_there_is_told_and_it_goes_on(other: Interpreter) -> None:
    with pytest.raises(TidemillError, match=r"the other side failed: ValueError: no such row\n  →") as told:
        other.call("fail")
    assert str(other.log) in told.value.remedy and "Traceback" in other.log.read_text()
    with pytest.raises(TidemillError, match="KeyError"):
        other.call("nonsense")
    assert other.call("back").fields["told"] == {}


def test_one_that_is_killed_is_missed_at_once_with_the_signal(other: Interpreter) -> None:
    os.kill(other.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(InterpreterError, match="the other side was killed by SIGKILL"):
        other.call("back")
    assert time.monotonic() - started < 5


def test_one_that_leaves_is_quoted(other: Interpreter) -> None:
    with pytest.raises(InterpreterError, match=r"ended \(exit code 3\): out of memory"):
        other.call("leave")


def test_it_ends_with_its_line_and_leaves_no_folder(tmp_path: Path) -> None:
    made = Interpreter(a_python(tmp_path), "some.module", "the other side", tmp_path / "log", {"OWN": ""})
    made.call("back")
    made.close()
    assert made.process.returncode == 0 and not made.home.exists()


def test_a_python_that_is_not_there_or_cannot_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learn\.mindspore\.python: there is no Python at") as told:
        find_python("learn.mindspore.python", str(tmp_path / "none"), "", "make one")
    assert told.value.remedy == "make one"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("no program")
    with pytest.raises(ConfigError, match="the other side cannot be started with"):
        python = find_python("learn.mindspore.python", str(tmp_path), "", "")
        Interpreter(python, "some.module", "the other side", tmp_path / "log", {})
