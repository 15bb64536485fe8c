"""What each worker did when, by steps, out of the files in RUN/timeline. Spans are in the order in which they ended, so
the bytes can be halved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tidemill.observe.timeline import FOLDER, LONG_S, WRITE_S
from tidemill.watch import lines

STEP, END = re.compile(rb'"step": (\d+)'), re.compile(rb'"end": ([\d.eE+-]+)')
DRIVER = "driver"
LATE_S = WRITE_S + LONG_S  # by which spans may be out of order
MOST = 20_000  # spans of one answer


def steps_of(run: Path, step: int = 0, count: int = 3) -> dict[str, Any]:
    """`count` steps that end with `step` (0: the newest), oldest first, and what every worker did from the first's
    beginning to the last's end: `[what, start, end]` in seconds since `at`."""
    folder = run / FOLDER
    steps = list(islice(_steps(folder / f"{DRIVER}.jsonl", step), count))[::-1]
    if not steps:
        return {"at": 0.0, "seconds": 0.0, "steps": [], "workers": {}}
    at, end = steps[0]["start"], max(one["end"] for one in steps)
    files = [file for file in sorted(folder.glob("*.jsonl")) if file.stem != DRIVER]
    return {
        "at": at,
        "seconds": end - at,
        "steps": [{"step": one["step"], "start": one["start"] - at, "end": one["end"] - at} for one in steps],
        "workers": {file.stem: found for file in files if (found := list(_spans(file, at, end)))},
    }


def _steps(file: Path, step: int) -> Iterator[dict[str, Any]]:
    """From the newest back, or from the one that is asked for; a resumed run counts from its checkpoint again."""
    has_come = not step
    for _, line in lines.backward(file, lines.whole_end(file)):
        found = STEP.search(line)
        has_come = has_come or (found is not None and int(found[1]) == step)
        if has_come and found is not None and (plain := lines.parse(line)) is not None:
            yield plain


def _spans(file: Path, at: float, end: float) -> Iterator[list[Any]]:
    """Of one worker, as far as they lie between both times."""
    whole = lines.whole_end(file)
    for _, line in islice(lines.forward(file, lines.first_where(file, whole, at - LATE_S, _end), whole), MOST):
        plain = lines.parse(line)
        if plain is None or plain["end"] <= at:
            continue
        if plain["end"] > end + LATE_S and plain["start"] > end:
            return  # later ones end later still
        if plain["start"] < end:
            yield [plain["what"], round(max(plain["start"], at) - at, 4), round(min(plain["end"], end) - at, 4)]


def _end(line: bytes) -> float:
    found = END.search(line)
    return float(found[1]) if found else 0.0
