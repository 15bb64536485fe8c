"""A run's samples, page by page: by step through halving, by search and by value through stretches of bounded size.

No index is kept, so five million samples cost as little memory as five. A request reads at most `BUDGET` bytes and says
where the next one goes on.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.watch import lines

BUDGET = 12 << 20
VALUES = {
    "reward": re.compile(rb'(?<!\\)"reward": (-?[\d.eE+-]+)'),
    "group": re.compile(rb'(?<!\\)"group": (-?\d+)'),
}
TEXT = ("prompt", "response", "answer")
NOTED = ("logprobs", "ratio", "advantages", "images")
LATE_STEPS = 16  # after which a sample is no longer learned from


@dataclass(frozen=True, slots=True)
class Query:
    text: str = ""
    first: int = 0  # steps, both included
    last: int = 1 << 60
    sort: str = "-step"  # or step, reward, -reward, length, -length, prompt
    correct: bool | None = None
    count: int = 50
    cursor: int | None = None  # where an earlier page of this query ended


@dataclass(frozen=True, slots=True)
class Page:
    samples: list[dict[str, Any]] = field(default_factory=list)  # each with `at`, where its line starts
    cursor: int | None = None  # None: that was all
    scanned: int = 0  # samples looked at
    done: float = 1.0  # share of the stretch that has been read


def find(path: Path, query: Query) -> Page:
    end = lines.whole_end(path)
    start = lines.first_of_step(path, query.first, end) if query.first > 0 else 0
    stop = lines.first_of_step(path, query.last + 1, end) if query.last < 1 << 59 else end
    if query.sort in ("step", "-step"):
        return _in_order(path, query, start, stop)
    return _by_value(path, query, start, stop)


def at(path: Path, offset: int) -> dict[str, Any] | None:
    if not 0 <= offset < lines.whole_end(path):
        return None
    with path.open("rb") as file:
        found = lines.line_after(file, offset, 1 << 62)
    return None if found is None or found[0] != offset else _sample(*found)


def group_of(path: Path, offset: int) -> list[dict[str, Any]]:
    """All samples of the step that share the prompt of the one at `offset`."""
    own = at(path, offset)
    if own is None:
        return []
    end = lines.whole_end(path)
    start = lines.first_of_step(path, own["step"], end)
    stop = lines.first_of_step(path, own["step"] + 1, end)
    found = [_sample(*line) for line in lines.forward(path, start, stop)]
    return [s for s in found if s is not None and s.get("group") == own.get("group")]


def notes_of(path: Path, found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the learner made of these samples, by their ids. Where rollout runs ahead they are learned from later."""
    wanted = {sample.get("id") for sample in found}
    end = lines.whole_end(path)
    if not found or not end:
        return {}
    first = min(int(sample["step"]) for sample in found)
    noted: dict[int, dict[str, Any]] = {}
    for where, line in lines.forward(path, lines.first_of_step(path, first, end), end):
        if len(noted) == len(wanted) or (lines.step_of(line) or 0) > first + LATE_STEPS:
            break
        if (note := _sample(where, line)) is not None and note.get("id") in wanted:
            noted[note["id"]] = {name: note[name] for name in NOTED if name in note}
    return noted


def with_prompt(path: Path, prompt: str, count: int) -> list[dict[str, Any]]:
    """The newest samples of one prompt."""
    page = find(path, Query(text=prompt, count=count))
    return [s for s in page.samples if s.get("prompt") == prompt]


def _in_order(path: Path, query: Query, start: int, stop: int) -> Page:
    is_back = query.sort == "-step"
    if query.cursor is not None:
        start, stop = (start, min(stop, query.cursor)) if is_back else (max(start, query.cursor), stop)
    found: list[dict[str, Any]] = []
    wanted, scanned = _matching(query), 0
    walk = lines.backward(path, stop, start) if is_back else lines.forward(path, start, stop)
    whole = max(1, stop - start)
    for where, line in walk:
        read = stop - where if is_back else where - start
        if len(found) >= query.count or read > BUDGET:
            cursor = where + len(line) + 1 if is_back else where
            return Page(found, cursor, scanned, read / whole)
        scanned += 1
        if wanted(line) and (sample := _kept(where, line, query)) is not None:
            found.append(sample)
    return Page(found, None, scanned)


def _by_value(path: Path, query: Query, start: int, stop: int) -> Page:
    """The best of one stretch, from its newest sample back; whoever asks joins them with those of later stretches."""
    stop = stop if query.cursor is None else min(stop, query.cursor)
    is_falling, name = query.sort.startswith("-"), query.sort.lstrip("-")
    cursor, scanned = None, 0

    def ranked() -> Iterator[tuple[Any, int, bytes]]:
        nonlocal cursor, scanned
        wanted, value = _matching(query), _value(name)
        for where, line in lines.backward(path, stop, start):
            if stop - where > BUDGET:
                cursor = where + len(line) + 1
                return
            scanned += 1
            if wanted(line):
                yield value(line), where, line

    best = (heapq.nlargest if is_falling else heapq.nsmallest)(4 * query.count, ranked(), key=lambda r: r[:2])
    found = [s for _, where, line in best if (s := _kept(where, line, query)) is not None]
    share = 1.0 if cursor is None else (stop - cursor) / max(1, stop - start)
    return Page(found[: query.count], cursor, scanned, share)


def _value(name: str) -> Callable[[bytes], Any]:
    if name in VALUES:
        pattern = VALUES[name]

        def number(line: bytes) -> float:
            found = pattern.search(line)
            return float(found[1]) if found else 0.0

        return number
    if name == "prompt":
        return lambda line: str((lines.parse(line) or {}).get("prompt", ""))
    return len  # a line's length follows its response's


def _matching(query: Query) -> Callable[[bytes], bool]:
    """A cheap test of a raw line; `_kept` decides."""
    needle = json.dumps(query.text, ensure_ascii=False)[1:-1].encode().lower()
    mark = {None: b"", True: b'"correct": true', False: b'"correct": false'}[query.correct]
    return lambda line: (not mark or mark in line) and (not needle or needle in line.lower())


def _kept(where: int, line: bytes, query: Query) -> dict[str, Any] | None:
    sample = _sample(where, line)
    if sample is None or (query.correct is not None and sample.get("correct") is not query.correct):
        return None
    text = query.text.lower()
    return sample if not text or any(text in str(sample.get(name, "")).lower() for name in TEXT) else None


def _sample(where: int, line: bytes) -> dict[str, Any] | None:
    found = lines.parse(line)
    return None if found is None else found | {"at": where}
