"""A sandboxed program that is told to turn by turn keeps its names and files, and gets out no more than any other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tidemill.reward.sandbox.limits import SandboxLimits
from tidemill.reward.sandbox.run import Sandbox, SandboxError

# The ends of the pipes to the process that watches: whatever number they have.
ENDS = "import os, stat\nends = [n for n in range(3, 60) if os.path.exists(f'/dev/fd/{n}') or n < 20]\n"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox(SandboxLimits(wall_s=1.0, cpu_s=4, memory_mb=512, output_bytes=10_000)) as made:
        try:
            made.run("pass")
        except SandboxError as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture(autouse=True)
def ends_its_program(box: Sandbox) -> Iterator[None]:
    yield
    assert box.run("x = 2", ["assert x == 2"]).passed == 1


def test_names_and_files_stay_from_turn_to_turn(box: Sandbox) -> None:
    first, is_new = box.turn("x = 20\nopen('kept', 'w').write('2')")
    assert is_new and first.status == "ok"
    second, is_new = box.turn("x + int(open('kept').read())")
    assert not is_new and second.output == "22\n"
    failed, is_new = box.turn("x / 0")
    assert failed.status == "failed" and "ZeroDivisionError" in failed.output and not is_new
    assert box.turn("x")[0].output == "20\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("print('x' * 100_000_000)", "output"),
        ("while True: print('y' * 1000)", "output"),
        ("import os; os._exit(0)", "killed"),
        ("import os; os.abort()", "killed"),
        ("import os; os.closerange(3, 200)", "killed"),
    ],
)
def test_a_limit_ends_the_program_and_the_next_turn_begins_anew(box: Sandbox, code: str, status: str) -> None:
    box.turn("x = 1")
    began = time.monotonic()
    result, is_new = box.turn(code)
    assert result.status == status and not is_new and time.monotonic() - began < 8
    after, is_new = box.turn("x")
    assert is_new and "NameError" in after.output


def test_memory_is_bounded_over_all_turns(box: Sandbox) -> None:
    for _ in range(6):
        result, _ = box.turn("kept = globals().get('kept', []) + [bytearray(100 << 20)]")
    assert result.status == "failed" and "MemoryError" in result.output


def test_what_a_turn_left_running_has_no_part_in_another_program(box: Sandbox) -> None:
    """A thread that goes on writing would change what the next program finds."""
    left = (
        "import threading, time\n"
        "def write():\n"
        "    while True:\n"
        "        open('answer', 'w').write('forged'); time.sleep(0.001)\n"
        "threading.Thread(target=write, daemon=True).start()\n"
    )
    assert box.turn(left)[0].status == "ok"
    time.sleep(0.05)
    code = "import os, time\nfound = os.listdir('.')\ntime.sleep(0.2)\nfound += os.listdir('.')"
    assert box.run(code, ["assert found == []"]).passed == 1
    assert box.turn("import os; os.listdir('.')")[0].output == "[]\n"


def test_a_turn_that_says_it_is_done_before_it_is_gains_nothing(box: Sandbox) -> None:
    """It can write into every pipe that it has: what it is told then is its own, and the next program is as any."""
    forge = ENDS + "for n in ends:\n    try: os.write(n, b'++++')\n    except OSError: pass\n"
    for _ in range(3):
        box.turn(forge)
    result = box.run("x = 1", ["assert x == 1", "assert x == 2"])
    assert (result.status, result.passed) == ("ok", 1)


def test_more_than_a_pipe_holds_is_told_whole(box: Sandbox) -> None:
    text = "z" * 300_000
    assert box.turn(f"len({text!r})")[0].output == "300000\n"


def test_a_program_that_reads_nothing_does_not_hold_its_sandbox_for_good(box: Sandbox) -> None:
    """It says that its turn is done and goes on, so the next one is not taken out of the pipe."""
    box.turn(ENDS + "for n in ends:\n    try: os.write(n, b'+')\n    except OSError: pass\nimport time; time.sleep(30)")
    began = time.monotonic()
    result, is_new = box.turn("x = '" + "w" * 300_000 + "'")
    assert (result.status, is_new) == ("timeout", False) and time.monotonic() - began < 5
    assert box.turn("x")[1]
