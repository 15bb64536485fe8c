"""The reward `code`: a program in the response, run in the sandbox against tests."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from tidemill.reward.api import Reward, Sample
from tidemill.reward.sandbox.limits import SandboxLimits
from tidemill.reward.sandbox.run import Sandbox

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code(sample: Sample, partial: bool = False, wall_s: float = 2.0, cpu_s: int = 2, memory_mb: int = 256) -> Reward:
    """The share of tests that pass (with `partial`), or 1 when all do.

    Tests are the row's column `tests`, or its answer as JSON: a list of statements (`assert f(2) == 4`) that run behind
    the program, or of objects with `input` and `output`, standard input and what must then be printed.
    """
    tests = sample.meta.get("tests") or sample.answer
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests:
        raise ValueError("the row has no tests")
    program = program_of(sample)
    box = sandbox(wall_s, cpu_s, memory_mb)
    if all(isinstance(test, str) for test in tests):
        passed = box.run(program, tests).passed
    else:
        passed = sum(prints(box, program, test) for test in tests)
    share = passed / len(tests)
    return Reward(share if partial else float(share == 1.0), {"passed": share}, correct=share == 1.0)


def program_of(sample: Sample) -> str:
    """The last fenced block, or all of the response behind the row's `prefix` (a beginning that the prompt showed)."""
    blocks = FENCED.findall(sample.response)
    return str(blocks[-1]) if blocks else str(sample.meta.get("prefix", "")) + sample.response


def prints(box: Sandbox, program: str, test: dict[str, Any]) -> bool:
    result = box.run(program, input=str(test["input"]))
    given, wanted = result.output.split("\n"), str(test["output"]).split("\n")
    return result.status == "ok" and trimmed(given) == trimmed(wanted)


def trimmed(lines: list[str]) -> list[str]:
    kept = [line.rstrip() for line in lines]
    while kept and not kept[-1]:
        kept.pop()
    return kept


@lru_cache(maxsize=4)
def sandbox(wall_s: float, cpu_s: int, memory_mb: int) -> Sandbox:
    """One per worker and set of limits, warm from the first program on."""
    return Sandbox(SandboxLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb))
