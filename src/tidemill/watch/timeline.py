"""What each worker did when, by steps: one line of `timeline.jsonl` each."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from tidemill.watch import lines


def steps_of(path: Path, step: int = 0, count: int = 3) -> list[dict[str, Any]]:
    """`count` steps that end with `step`, oldest first; 0: the newest."""
    end = lines.whole_end(path)
    stop = lines.first_of_step(path, step + 1, end) if step > 0 else end
    found = [lines.parse(line) for _, line in islice(lines.backward(path, stop), count)]
    return [one for one in reversed(found) if one is not None]
