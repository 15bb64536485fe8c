"""How many small programs a second the sandbox runs, and how many ways out of it are open."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tidemill.bench import repeat
from tidemill.reward.sandbox.limits import SandboxLimits
from tidemill.reward.sandbox.run import Sandbox

ABOUT = "small programs per second in a warm pool of sandboxes, and escapes that were not contained"
OPTIONS = {"programs": 1000, "sandboxes": 0}  # 0: one per core

ESCAPES = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "other program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "fill disk": "f = open('big', 'wb')\nfor _ in range(10**4): f.write(b'x' * 10**6)",
    "write outside": "open('/tmp/tidemill-escape', 'w').write('x')",
    "read a file": "open('/etc/passwd').read()",
    "parent's environment": "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "socket": "import socket; socket.socket()",
    "ptrace": "import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "kill the parent": "import os; os.kill(os.getppid(), 9)",
    "symlink out": "import os; os.symlink('/etc/passwd', 'p'); open('p').read()",
    "chmod": "import os, sys; os.chmod(sys.executable, 0o777)",
    "endless output": "while True: print('x' * 1000)",
    "endless time": "while True: pass",
    "endless memory": "x = [0]\nwhile True: x += x",
    "leave early": "import os; os._exit(0)",
    "equal to everything": "class S:\n    __eq__ = lambda s, o: True\nf = lambda: S()",
    "change the counting": "import sys\nfor m in [*sys.modules.values()]: m.value_of = m.holds = lambda *a: '7'",
    "parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "shared memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o1777) >= 0; f = lambda: 7",
    "a setuid program": "import os; os.execv('/usr/bin/su', ['su'])",
    "memory by mmap": "import mmap; x = mmap.mmap(-1, 1 << 33); x[0] = 1; f = lambda: 7",
    "stop the parent": "import os; os.kill(os.getppid(), 19); f = lambda: 7",
    "threads without end": "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=(9,)).start()",
    "a device": "import os; os.mknod('d', 0o60600, os.makedev(8, 0)); f = lambda: 7",
}
ESCAPES |= {
    "abs is always 0": "abs = lambda v: 0.0\nf = lambda: 1",
    "a difference of 0": "class D(float):\n    __sub__ = lambda s, o: 0.0\nf = lambda: D(1)",
    "look at a file": "import os; os.stat('/etc/passwd')",
}
# An escape succeeds when the program comes to its end; of these, when it passes a check that it did not earn.
CHECKS = {
    "equal to everything": ["assert f() == 7"],
    "change the counting": ["assert f() == 7"],
    "abs is always 0": ["assert abs(f() - 7.0) < 1e-6"],
    "a difference of 0": ["assert abs(f() - 7.0) < 1e-6"],
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    count, boxes = int(options["programs"]), int(options["sandboxes"]) or os.cpu_count() or 1
    sandboxes = [Sandbox(SandboxLimits(wall_s=1.0)) for _ in range(boxes)]
    try:
        for box in sandboxes:
            box.run("pass")
        rate = repeat(lambda: programs_per_s(sandboxes, count), options["repeats"])
        escaped = [
            name for name, code in ESCAPES.items() if sandboxes[0].run(code, CHECKS.get(name, ["assert True"])).passed
        ]
        latency = statistics.median(sandboxes[0].run("x = 1 + 1").seconds for _ in range(50))
    finally:
        for box in sandboxes:
            box.close()
    return {
        "programs_per_s": rate["median"],
        "programs_per_s_spread": rate["spread"],
        "escapes": len(escaped),
        "escaped": escaped,
        "tried": len(ESCAPES),
        "program_ms": 1000 * latency,
        "sandboxes": boxes,
    }


def programs_per_s(sandboxes: list[Sandbox], count: int) -> float:
    def work(number: int) -> int:
        box = sandboxes[number]
        own = range(number, count, len(sandboxes))
        return sum(box.run(f"def f(x):\n    return x * {i}", [f"assert f(3) == {3 * i}"]).passed for i in own)

    began = time.perf_counter()
    with ThreadPoolExecutor(len(sandboxes)) as pool:
        passed = sum(pool.map(work, range(len(sandboxes))))
    seconds = time.perf_counter() - began
    assert passed == count, f"{count - passed} of {count} right programs did not pass"
    return count / seconds
