"""Two runs beside each other: settings that differ, the first step whose numbers differ, samples of one prompt."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from tidemill.observe.metrics import is_computed
from tidemill.watch import lines, samples
from tidemill.watch.runs import Run, flat

OWN = ("name", "folder")
COMPARED = 200_000  # steps looked at
PROMPTS = 8


def compare(one: Run, other: Run) -> dict[str, Any]:
    return {
        "settings": differing(flat(one.config()), flat(other.config())),
        "first": first_difference(one.path / "metrics.jsonl", other.path / "metrics.jsonl"),
        "prompts": same_prompts(one.samples, other.samples),
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    keys = [key for key in dict.fromkeys((*one, *other)) if key not in OWN]
    return [
        {"key": key, "one": one.get(key), "other": other.get(key)} for key in keys if one.get(key) != other.get(key)
    ]


def first_difference(one: Path, other: Path) -> dict[str, Any] | None:
    """The first step with another value of a metric that both have; None: all common steps are equal."""
    pairs = zip(_rows(one), _rows(other), strict=False)
    for (_, a), (_, b) in islice(pairs, COMPARED):
        mine, theirs = lines.parse(a) or {}, lines.parse(b) or {}
        for name, value in mine.items():
            if name in theirs and is_computed(name) and value != theirs[name]:
                return {"step": mine.get("step"), "name": name, "one": value, "other": theirs[name]}
    return None


def same_prompts(one: Path, other: Path) -> list[dict[str, Any]]:
    """The newest prompts that both runs kept samples of, with one response of each."""
    theirs = {s["prompt"]: s for s in _newest(other) if "prompt" in s}
    found: dict[str, dict[str, Any]] = {}
    for sample in _newest(one):
        prompt = str(sample.get("prompt"))
        if prompt in theirs and prompt not in found:
            found[prompt] = {"prompt": prompt, "one": sample, "other": theirs[prompt]}
        if len(found) >= PROMPTS:
            break
    return list(found.values())


def _newest(path: Path) -> list[dict[str, Any]]:
    return samples.find(path, samples.Query(count=400)).samples


def _rows(path: Path) -> Any:
    return lines.forward(path, 0, lines.whole_end(path))
