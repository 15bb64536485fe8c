"""Programs that try to get out, and what comes of it."""

import os
import sys
import time
from pathlib import Path

import pytest

from tidemill.reward.api import Sample
from tidemill.reward.sandbox.limits import SandboxLimits
from tidemill.reward.sandbox.run import Sandbox, SandboxError

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)


@pytest.fixture(scope="module")
def box():
    with Sandbox(SandboxLimits(wall_s=1.0, cpu_s=2, memory_mb=128, scratch_mb=2, files=16)) as made:
        try:
            made.run("pass")
        except SandboxError as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture(autouse=True)
def still_works(box):
    """Whatever a program did, the next one runs as if nothing had happened."""
    yield
    assert box.run("print('fine')").output == "fine\n"


def test_a_program_runs_and_its_checks_are_counted(box) -> None:
    result = box.run("def f(x):\n    return 2 * x", ["assert f(1) == 2", "assert f(2) == 5", "assert f(3) == 6"])
    assert (result.status, result.passed) == ("ok", 2)


def test_standard_input_reaches_it_and_output_comes_back(box) -> None:
    assert box.run("print(int(input()) + int(input()))", input="3\n4\n").output == "7\n"


def test_an_exception_is_shown(box) -> None:
    result = box.run("1 / 0")
    assert result.status == "failed" and "ZeroDivisionError" in result.output


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "quit()"])
def test_leaving_early_passes_no_check(box, leave) -> None:
    assert box.run(leave, ["assert True"]).passed == 0


def test_values_are_compared_outside_so_nothing_can_call_itself_equal(box) -> None:
    same = "class Same:\n    __eq__ = lambda s, o: True\n    __ne__ = __lt__ = lambda s, o: True\nf = lambda x: Same()"
    assert box.run(same, ["assert f(2) == 4", "assert f(2) < 3", "assert 4 == f(2)"]).passed == 0
    number = "class N(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\nf = lambda x: N(7)"
    assert box.run(number, ["assert f(2) == 4", "assert [f(2)] == [4]"]).passed == 0
    right = "def f(x):\n    return {'a': [x, (x, None)], 'b': {x}}"
    wanted = ["assert f(2) == {'b': {2}, 'a': [2, (2, None)]}", "assert f(1) is not None", "assert 3 > len(f(1))"]
    assert box.run(right, wanted).passed == 3
    counted = "from collections import Counter, OrderedDict\nf = Counter\ng = OrderedDict"
    assert box.run(counted, ["assert f('aab') == {'a': 2, 'b': 1}", "assert g(a=1) == {'a': 1}"]).passed == 2
    assert box.run("f = float", ["assert f(2) == 2", "assert f('nan') != 2", "assert f(1) is None"]).passed == 1


FORGERIES = {
    "look for the wanted value": (
        "import gc, re, sys\nfound = []\nframe = sys._getframe()\n"
        "while frame:\n    found.append(repr(frame.f_locals))\n    frame = frame.f_back\n"
        "found += [repr(o) for o in gc.get_objects() if isinstance(o, (list, tuple, dict))]\n"
        "wanted = [n for t in found for n in re.findall(r'== ?([0-9]{6})', t)]\n"
        "f = lambda x: int(wanted[0]) if wanted else 0"
    ),
    "change the counting": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "    for n in ('holds', 'value_of', 'as_plain'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a: '271828')\nf = lambda x: 0"
    ),
    "write a verdict": (
        "import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'0123456789abcdef[\"271828\"]')\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "change json": "import json\njson.dumps = lambda *a: '[\"271828\"]'\nf = lambda x: 0",
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_verdict_cannot_be_forged(box, how) -> None:
    assert box.run(FORGERIES[how], ["assert f(0) == 271828"]).passed == 0


def test_long_input_arrives_whole(box) -> None:
    result = box.run("import sys; print(len(sys.stdin.read()))", input="x" * 500_000)
    assert result.output == "500000\n"


def refused(box, code: str) -> bool:
    """Whether the program met an error where it tried to get out."""
    result = box.run(f"{code}\nprint('OUT')")
    return result.status != "ok" and "OUT" not in result.output


FORKS = {
    "fork": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "subprocess": "import subprocess; subprocess.run(['/bin/sh', '-c', 'echo OUT'])",
    "multiprocessing": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'OUT'])",
    "posix_spawn": "import os; os.posix_spawn('/bin/echo', ['echo', 'OUT'], {})",
    "clone3": "import ctypes; c = ctypes.CDLL(None); assert c.syscall(435, b'\\0' * 64, 64) >= 0",
}


@pytest.mark.parametrize("how", FORKS)
def test_a_fork_bomb_is_contained(box, how) -> None:
    before = len([p for p in os.listdir("/proc") if p.isdigit()])
    assert refused(box, FORKS[how])
    assert len([p for p in os.listdir("/proc") if p.isdigit()]) < before + 30


def test_the_disk_cannot_be_filled(box) -> None:
    code = "i = 0\nwhile True:\n    with open(f'f{i}', 'wb') as f: f.write(b'x' * 100000)\n    i += 1"
    result = box.run(code)
    assert (result.status == "failed" and "OSError" in result.output) or "PermissionError" in result.output
    assert refused(box, "f = open('big', 'wb')\nfor i in range(100): f.write(b'x' * 1000000)")
    many = box.run("for i in range(100): open(f'n{i}', 'w').close()")
    assert many.status == "failed"


def test_what_one_program_wrote_is_gone_for_the_next(box) -> None:
    if not box.has_scratch:
        pytest.skip("no scratch folder on this machine")
    assert box.run("import os; os.mkdir('d'); open('d/a', 'w').write('x'); print(os.listdir())").output == "['d']\n"
    assert box.run("import os; print(os.listdir())").output == "[]\n"


@pytest.mark.parametrize("path", ["/tmp/out", "/etc/out", "/dev/shm/out", "../out", "~/out"])
def test_nothing_outside_can_be_written(box, path) -> None:
    assert refused(box, f"import os; open(os.path.expanduser({path!r}), 'w').write('x')")
    assert not Path("/tmp/out").exists()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/etc/shadow", str(Path.home() / ".bashrc"), "/proc/self/environ", "/proc/1/cmdline"]
)
def test_other_files_cannot_be_read(box, path) -> None:
    assert refused(box, f"open({path!r}, 'rb').read(1)")


def test_the_parents_environment_cannot_be_read(box, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    with Sandbox(SandboxLimits(wall_s=1.0)) as fresh:
        own = fresh.run("import os; print(dict(os.environ))").output
        assert "hunter2" not in own
        for pid in ("self", os.getpid(), os.getppid()):
            assert refused(fresh, f"print(open('/proc/{pid}/environ').read())")
        assert refused(fresh, "import os; print(open(f'/proc/{os.getppid()}/mem', 'rb').read(1))")


SOCKETS = {
    "tcp": "import socket; socket.socket()",
    "udp": "import socket; socket.socket(type=socket.SOCK_DGRAM)",
    "unix": "import socket; socket.socket(socket.AF_UNIX).connect('/run/x')",
    "pair": "import socket; socket.socketpair()",
    "raw": "import ctypes, os; c = ctypes.CDLL(None); assert c.syscall(41, 2, 1, 0) >= 0",
    "urllib": "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
    "io_uring": "import ctypes; c = ctypes.CDLL(None); assert c.syscall(425, 8, b'\\0' * 128) >= 0",
}


@pytest.mark.parametrize("how", SOCKETS)
def test_no_socket_can_be_opened(box, how) -> None:
    assert refused(box, SOCKETS[how])


REACHES = {
    "ptrace": "import ctypes, os; c = ctypes.CDLL(None); assert c.ptrace(16, os.getppid(), 0, 0) == 0",
    "process_vm_readv": "import ctypes, os; assert ctypes.CDLL(None).syscall(310, os.getppid(), 0, 0, 0, 0, 0) >= 0",
    "kill parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kill all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "tgkill parent": "import ctypes, os; p = os.getppid(); assert ctypes.CDLL(None).syscall(234, p, p, 9) == 0",
    "pidfd": "import os; os.pidfd_open(os.getppid())",
    "limits of parent": "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "raise limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'tmpfs', b'/mnt', b'tmpfs', 0, None) == 0",
    "unshare": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "chroot": "import os; os.chroot('/')",
    "chmod": "import os, sys; os.chmod(sys.executable, 0o777)",
    "chown": "import os, sys; os.chown(sys.executable, 0, 0)",
    "utime": "import os, sys; os.utime(sys.executable)",
    "setuid": "import os; os.setuid(12345)",
    "bpf": "import ctypes; assert ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0",
    "keyctl": "import ctypes; assert ctypes.CDLL(None).syscall(250, 0, 0) >= 0",
    "memfd": "import os; os.memfd_create('x')",
    "kill a group": "import os; os.killpg(os.getpgid(os.getppid()), 9)",
    "stop the parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "queue a signal": "import ctypes, os; assert ctypes.CDLL(None).syscall(129, os.getppid(), 9, 0) == 0",
    "priority of the parent": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "shared memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o1777) >= 0",
    "posix shared memory": "from multiprocessing import shared_memory as m; m.SharedMemory(create=True, size=4096)",
    "message queue": "import ctypes; assert ctypes.CDLL(None).syscall(240, b'/q', 0o102, 0o600, 0) >= 0",
    "userfaultfd": "import ctypes; assert ctypes.CDLL(None).syscall(323, 1) >= 0",
    "perf": "import ctypes; assert ctypes.CDLL(None).syscall(298, b'\\0' * 128, 0, -1, -1, 0) >= 0",
    "handle": "import ctypes; assert ctypes.CDLL(None).syscall(304, -100, b'\\0' * 16, 0) >= 0",
    "the 32-bit way in": "import ctypes; assert ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0) >= 0",
    "setuid program": "import os; os.execv('/usr/bin/su', ['su'])",
    "terminal input": "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "a device": "import os; os.mknod('d', 0o600 | 0o060000, os.makedev(8, 0))",
    "a module of the kernel": "import ctypes; assert ctypes.CDLL(None).syscall(175, b'', 0, b'') == 0",
}


@pytest.mark.parametrize("how", REACHES)
def test_no_other_process_or_right_can_be_reached(box, how) -> None:
    assert refused(box, REACHES[how])


def test_a_symlink_does_not_lead_out(box, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    assert refused(box, f"import os; os.symlink({str(victim)!r}, 'link'); open('link', 'w').write('x')")
    assert refused(box, f"import os; os.symlink({str(victim)!r}, 'link'); print(open('link').read())")
    assert refused(box, f"import os; os.symlink('/', 'root'); print(open('root{victim}').read())")
    assert refused(box, f"import os; os.link({str(victim)!r}, 'link')")
    assert refused(box, f"import os; os.rename({str(victim)!r}, 'moved')")
    assert victim.read_text() == "untouched"


def test_endless_output_is_cut(box) -> None:
    result = box.run("while True: print('x' * 1000)")
    assert result.status == "output" and len(result.output) <= 64 * 1024
    assert box.run("import os\nwhile True: os.write(2, b'y' * 5000)").status == "output"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import os, time; os.close(1); os.close(2); time.sleep(100)",
        "input()\nwhile True: pass",
        "x = 9**9**8",
    ],
)
def test_endless_time_is_cut(box, code) -> None:
    began = time.monotonic()
    assert box.run(code, input="x\n").status in ("timeout", "killed")
    assert time.monotonic() - began < 3


def test_endless_memory_is_cut(box) -> None:
    for code in (
        "x = 'a' * 10**10",
        "x = []\nwhile True: x.append(' ' * 1000000)",
        "x = list(range(10**8))",
        "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(64)]",
        "import mmap\nx = mmap.mmap(-1, 1 << 33); x[0] = 1",
        "import ctypes\nx = [ctypes.create_string_buffer(1 << 26) for _ in range(64)]",
    ):
        assert box.run(code).status in ("failed", "killed")


def test_signals_that_a_program_ignores_do_not_save_it(box) -> None:
    ignore = "try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass"
    code = f"import signal\nfor s in range(1, 65):\n    {ignore}\nwhile True: pass"
    assert box.run(code).status == "timeout"


def test_open_files_are_bounded(box) -> None:
    assert refused(box, "fs = [open('/dev/null') for _ in range(100)]")


def test_nothing_is_left_behind_when_it_is_closed() -> None:
    made = Sandbox(SandboxLimits(wall_s=30.0))
    made.run("pass")
    process, folder = made._process, made._folder.name
    made.close()
    assert process.poll() is not None and not Path(folder).exists()


def test_the_code_reward_counts_tests() -> None:
    from tidemill.reward.code import code

    tests = ["assert f(1) == 2", "assert f(2) == 4"]
    right = Sample("p", "```python\ndef f(x):\n    return 2 * x\n```", meta={"tests": tests})
    half = Sample("p", "```python\ndef f(x):\n    return x + 1\n```", meta={"tests": tests})
    assert (code(right).value, code(half).value, code(half, partial=True).value) == (1.0, 0.0, 0.5)
    printed = [{"input": "3\n", "output": "9\n"}, {"input": "4\n", "output": "16"}]
    assert code(Sample("p", "print(int(input())**2)", meta={"tests": printed})).value == 1.0
    assert code(Sample("p", "not python at all", meta={"tests": tests})).value == 0.0
    assert (
        code(Sample("p", "3*x", meta={"prefix": "def f(x):\n    return ", "tests": ["assert f(2) == 6"]})).value == 1.0
    )


def test_generated_code_tasks_are_solved_by_their_own_solutions() -> None:
    from tidemill.data.source import open_source
    from tidemill.recipe.config import Data
    from tidemill.reward.code import code

    train, _ = open_source(Data(source="code"), seed=0)
    for index in range(10):
        example = train.example(index)
        assert code(Sample(str(example.prompt), example.response, example.answer, example.meta)).correct
