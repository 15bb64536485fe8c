"""Programs that try to get out, and what comes of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidemill.reward.api import Sample
from tidemill.reward.sandbox.limits import SandboxLimits
from tidemill.reward.sandbox.root import are_open_to_all
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
    assert box.run("f = float", ["assert f(2) == 2", "assert f('nan') != 2", "assert f(1) is None"]).passed == 2


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


CHEATS = {
    "abs is always 0": ("abs = lambda v: 0.0\nf = lambda x: 1", "assert abs(f(2) - 4.0) < 1e-6"),
    "a difference of 0": (
        "class D(float):\n    __sub__ = __rsub__ = lambda s, o: 0.0\n    __abs__ = lambda s: 0.0\nf = lambda x: D(9)",
        "assert abs(f(2) - 4.0) < 1e-6",
    ),
    "an object that is any difference": (
        "class A:\n    __sub__ = __rsub__ = __abs__ = lambda *a: A()\n    __lt__ = __eq__ = lambda s, o: True\n"
        "f = lambda x: A()",
        "assert abs(f(2) - 4.0) < 1e-6",
    ),
    "round is the wanted value": ("round = lambda v, n=0: 4.0\nf = lambda x: 1", "assert round(f(2), 2) == 4.0"),
    "len of a class": ("class L(list):\n    __len__ = lambda s: 3\nf = lambda x: L()", "assert len(f(2)) == 3"),
    "sorted gives what is wanted": ("sorted = lambda v: [1, 2]\nf = lambda x: 0", "assert sorted(f(2)) == [1, 2]"),
    "set that is equal to all": (
        "class S(set):\n    __eq__ = lambda s, o: True\nset = S\nf = lambda x: S()",
        "assert set(f(2)) == set([1, 2])",
    ),
    "builtins overridden": (
        "import builtins\nbuiltins.abs = builtins.len = builtins.all = lambda *a: 0\nf = lambda x: 1",
        "assert abs(f(2) - 4) < 1",
    ),
    "all is true": ("all = lambda v: True\nf = lambda x: 0", "assert all(f(x) == x * x for x in [1, 2, 3])"),
    "isclose is true": (
        "import math\nmath.isclose = lambda *a, **k: True\nf = lambda x: 0",
        "import math\nassert math.isclose(f(2), 4.0, rel_tol=1e-3)",
    ),
    "numpy says so": (
        "import numpy as np\nnp.allclose = lambda *a, **k: True\nf = lambda x: 0",
        "assert np.allclose(f(2), [4.0])",
    ),
    "isinstance is true": ("isinstance = lambda v, k: True\nf = lambda x: 'a'", "assert isinstance(f(2), int)"),
    "in any container": (
        "class C:\n    __contains__ = lambda s, o: True\nf = lambda x: C()",
        "assert 4 in f(2) and 5 in f(2)",
    ),
    "the wanted value in the frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'expected' in {**frame.f_locals, **frame.f_globals}: return frame.f_globals['expected']\n"
        "        frame = frame.f_back",
        "expected = 271828\nassert f(0) == expected",
    ),
    "a check of the test's own": (
        "abs = lambda v: 0\nf = lambda x: 1",
        "def check(candidate):\n    assert abs(candidate(2) - 4) < 1e-6\ncheck(f)",
    ),
    "a loop in the test": ("f = lambda x: 0", "for i in range(5):\n    assert f(i) == i * i"),
    "a format as wide as memory": ("f = lambda x: '%999999999999d'", "assert f(2) % 5 == '5'"),
    "a power without end": ("f = lambda x: 10 ** 300", "assert f(2) ** f(2) == 4"),
    "a power taken outside": ("f = lambda x: 10 ** 3000", "assert f(2) ** 1000000 == 4"),
    "a decimal as long as memory": (
        "from decimal import Decimal\nf = lambda x: Decimal('1e999999999')",
        "assert int(f(2)) == 4",
    ),
    "a list without end": ("f = lambda x: 10 ** 12", "assert [0] * f(2) == [0]"),
    "no function at all": ("pass", "assert f(2) == 4"),
    "Python's own sum for the one to write": ("sum = lambda v: 7", "assert abs(sum([0.1, 0.2]) - 0.3) < 1e-9"),
}


@pytest.mark.parametrize("how", CHEATS)
def test_a_program_that_cheats_its_test_does_not_pass(box, how) -> None:
    program, test = CHEATS[how]
    assert box.run(program, [test]).passed == 0


RIGHT = {
    "np.int64": ("import numpy as np\nf = lambda x: np.int64(4)", "assert f(2) == 4"),
    "np.float32": ("import numpy as np\nf = lambda x: np.float32(0.5)", "assert abs(f(2) - 0.5) < 1e-6"),
    "np.bool_": ("import numpy as np\nf = lambda x: np.bool_(True)", "assert f(2) == True"),
    "an array": ("import numpy as np\nf = lambda x: np.arange(3)", "assert np.array_equal(f(2), [0, 1, 2])"),
    "a compared array": (
        "import numpy as np\nf = lambda x: np.arange(3)",
        "assert (f(2) == np.array([0, 1, 2])).all()",
    ),
    "numbers of an array": ("import numpy as np\nf = lambda x: list(np.arange(3))", "assert f(2) == [0, 1, 2]"),
    "Fraction": ("from fractions import Fraction\nf = lambda x: Fraction(1, 2)", "assert f(2) == 0.5"),
    "a wanted Fraction": (
        "from fractions import Fraction\nf = lambda x: Fraction(1, 3)",
        "from fractions import Fraction\nassert f(2) == Fraction(1, 3)",
    ),
    "Decimal": ("from decimal import Decimal\nf = lambda x: Decimal('4.0')", "assert f(2) == 4"),
    "bytearray": ("f = lambda x: bytearray(b'ab')", "assert f(2) == b'ab'"),
    "inf": ("f = lambda x: float('inf')", "assert f(2) == float('inf')"),
    "minus inf in a list": ("f = lambda x: [float('-inf')]", "assert f(2) == [float('-inf')]"),
    "inf of math": ("import math\nf = lambda x: math.inf", "import math\nassert f(2) == math.inf"),
    "nan": ("f = lambda x: float('nan')", "assert f(2) != f(2)"),
    "isnan": ("f = lambda x: float('nan')", "import math\nassert math.isnan(f(2))"),
    "complex": ("f = lambda x: 1j * x", "assert f(2) == 2j"),
    "deque": ("from collections import deque\nf = lambda x: deque([1, 2])", "assert list(f(2)) == [1, 2]"),
    "a generator": ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2]"),
    "a map": ("f = lambda x: map(str, [1, 2])", "assert list(f(3)) == ['1', '2']"),
    "keys": ("f = lambda x: {'a': 1}.keys()", "assert sorted(f(3)) == ['a'] and f(3) == {'a'}"),
    "range": ("f = range", "assert f(3) == range(3) and list(f(2)) == [0, 1]"),
    "a frozen set": ("f = lambda x: frozenset([x])", "assert f(2) == {2}"),
    "a named tuple": (
        "from collections import namedtuple as n\nP = n('P', 'a b')\nf = lambda x: P(1, x)",
        "assert f(2) == (1, 2)",
    ),
    "its own class": (
        "class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n"
        "    def __add__(s, o): return P(s.x + o.x)",
        "assert P(1) + P(2) == P(3)",
    ),
    "a sorting in place": ("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
    "steps of an object": (
        "class S(list):\n    push = list.append",
        "s = S()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and s.pop() == 1\nassert len(s) == 0",
    ),
    "named arguments": ("def f(a, *, b): return a - b", "n = 3\nassert f(n, b=1) == n - 1"),
    "a check of the test's own": (
        "f = lambda x: x * x",
        "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(0.1) - 0.01) < 1e-9\ncheck(f)",
    ),
    "a loop in the test": ("f = lambda x: x * x", "for i, j in [(1, 1), (2, 4)]:\n    assert f(i) == j"),
    "Python's own name": ("def sum(v): return 7", "assert sum([1, 2]) == 7"),
    "an exception that is wanted": (
        "def f(x): raise ValueError",
        "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass",
    ),
    "a long list": ("f = lambda n: list(range(n))", "assert f(3000) == list(range(3000))"),
    "a chain": ("f = lambda x: x", "assert 1 < f(2) <= 2 < f(3)"),
    "text": ("f = lambda x: 'Ab'", "assert f(2).lower() == 'ab' and ', '.join([f(1), f(2)]) == 'Ab, Ab'"),
}


@pytest.mark.parametrize("how", RIGHT)
def test_a_right_program_passes_what_python_passes(box, how) -> None:
    program, test = RIGHT[how]
    scope: dict = {}
    exec("import numpy as np\n" + program + "\n" + test, scope)
    assert box.run("import numpy as np\n" * ("np." in program) + program, [test]).passed == 1


NESTED = """
import os
for _ in range({depth}):
    try:
        os.mkdir('d' * 255, {mode})
        os.chdir('d' * 255)
    except OSError:
        break
try:
    open('secret', 'w').write('x')
except OSError:
    pass

"""


@pytest.mark.parametrize(("depth", "mode"), [(14, "0o700"), (64, "0o700"), (1, "0o000"), (8, "0o300")])
def test_folders_deeper_than_a_path_can_say_are_gone_for_the_next(box, depth, mode) -> None:
    with Sandbox(SandboxLimits(wall_s=1.0, files=64)) as fresh:
        fresh.run("pass")
        if not fresh.has_scratch:
            pytest.skip("no scratch folder on this machine")
        assert fresh.run(NESTED.format(depth=depth, mode=mode)).status == "ok"
        counted = "import os\nprint(os.listdir())\nfor i in range(60): os.mkdir(str(i))\nprint('room')"
        assert fresh.run(counted).output == "[]\nroom\n"


def test_threads_are_bounded_however_small_their_stacks(box) -> None:
    code = (
        "import threading, time\nthreading.stack_size(32768)\nn = 0\ntry:\n    while n < 2000:\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint(n, flush=True)\nimport os; os._exit(0)"
    )
    if not box.has_scratch:
        pytest.skip("without namespaces the kernel counts all of the user's processes")
    assert 4 <= int(box.run(code).output) <= 40


@pytest.mark.parametrize(
    "code",
    [
        "os.stat('/etc/passwd')",
        "os.stat('/home')",
        "os.lstat('/proc/self')",
        "os.readlink('/proc/self/exe')",
        "os.readlink('/proc/1/cwd')",
        "os.chdir('/var')",
        "os.chdir('/tmp')",
        "os.stat('/scratch/../home')",
        "assert os.access('/etc/passwd', os.F_OK)",
    ],
)
def test_nothing_outside_can_be_looked_at(box, code) -> None:
    if not box.has_scratch:
        pytest.skip("Landlock does not guard these calls, and namespaces are not allowed here")
    if any(f"/{top}'" in code and Path(sys.prefix).is_relative_to(f"/{top}") for top in ("home", "var", "tmp")):
        pytest.skip("Python itself lies in that folder, so its way there can be seen")
    assert refused(box, f"import os; {code}")


def test_a_program_is_not_root(box) -> None:
    if os.getuid() != 0 or not box.has_scratch:
        pytest.skip("only where the sandbox is started by root")
    assert int(box.run("import os; print(os.getuid())").output) >= 2_000_000_000


def test_root_keeps_its_user_where_others_cannot_read_python(tmp_path) -> None:
    file = tmp_path / "os.py"
    file.touch(0o644)
    tmp_path.chmod(0o755)
    assert are_open_to_all([str(tmp_path), str(file)])
    tmp_path.chmod(0o700)
    assert not are_open_to_all([str(tmp_path), str(file)])
    tmp_path.chmod(0o755)
    file.chmod(0o600)
    assert not are_open_to_all([str(tmp_path), str(file)])


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
    _, _, (process, _, folder), _ = made._end.peek()
    made.close()
    assert process.poll() is not None and not Path(folder).exists()


LEFT_OPEN = {
    "idle": "",
    "busy": "threading.Thread(target=box.run, args=('while True: pass',), daemon=True).start(); time.sleep(0.2)",
    "with an answer unread": "box._wire.send({'code': 'pass'}); time.sleep(0.2)",
    "at a Ctrl-C": "signal.signal(2, signal.SIG_IGN); os.killpg(0, 2); time.sleep(0.2)",
}


@pytest.mark.parametrize("how", LEFT_OPEN)
def test_a_sandbox_left_open_ends_with_python_and_prints_nothing(how) -> None:
    begin = "import os, signal, threading, time\nfrom tidemill.reward.sandbox.run import Sandbox\nbox = Sandbox()\n"
    code = f"{begin}box.run('pass'); print(box._end.peek()[2][2])\n{LEFT_OPEN[how]}"
    command = [sys.executable, "-W", "default", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not Path(ended.stdout.strip()).exists()


def test_the_code_reward_counts_tests() -> None:
    from tidemill.reward.verifiers.code import code

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
    from tidemill.reward.verifiers.code import code

    train, _ = open_source(Data(source="code"), seed=0)
    for index in range(10):
        example = train.example(index)
        assert code(Sample(str(example.prompt), example.response, example.answer, example.meta)).correct
