"""What turns another framework's settings into a recipe: a table of names, rules for several keys, and a list of what
was left out, with the reason where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.bridges.recipes.given import Given
from tidemill.recipe import dialect
from tidemill.recipe.load import LoadedRecipe, load

Convert = Callable[[Any], Any]
DROP = object()  # given by a `Convert` whose value changes nothing


@dataclass(slots=True)
class Draft:
    """A recipe in the making."""

    given: Given
    made: dict[str, Any] = field(default_factory=dict)  # our dotted key → value
    taken: set[str] = field(default_factory=set)  # their keys that are in it, or change nothing
    dropped: dict[str, str] = field(default_factory=dict)  # their key → why it is not in it
    notes: list[str] = field(default_factory=list)  # what the user still has to do or to know

    def take(self, key: str, default: Any = None) -> Any:
        """Read one of their settings, which is then dealt with."""
        self.taken.add(key)
        return self.given.get(key, default)

    def put(self, key: str, value: Any) -> None:
        if value is not None and value is not DROP:
            self.made[key] = value


@dataclass(frozen=True, slots=True)
class Converted:
    recipe: LoadedRecipe
    text: str
    dropped: Mapping[str, str]
    notes: tuple[str, ...]


def by_name(draft: Draft, names: Mapping[str, str | tuple[str, Convert]]) -> None:
    """Settings that have one counterpart each."""
    for theirs, ours in names.items():
        if theirs in draft.given:
            key, convert = ours if isinstance(ours, tuple) else (ours, _same)
            draft.put(key, convert(draft.take(theirs)))


def _same(value: Any) -> Any:
    return value


def leave_out(draft: Draft, reasons: Mapping[str, str]) -> None:
    """Settings without a counterpart whose reason is known, by pattern; then those of which nothing is known."""
    for key in draft.given:
        if key in draft.taken:
            continue
        why = next((why for pattern, why in reasons.items() if re.fullmatch(pattern, key)), None)
        if why != "":  # empty: it names a log, a tracker's detail, a default
            draft.dropped[key] = why or "no counterpart is known"


def finish(draft: Draft, about: str) -> Converted:
    """Check the recipe and write it, with what was left out as comments."""
    tree = {"about": about, **unflatten_values(draft.made)}
    loaded = load(tree)
    lines = [dialect.write(tree).rstrip()]
    if draft.notes:
        lines += ["", "# To do:", *(f"#   {note}" for note in draft.notes)]
    if draft.dropped:
        lines += ["", "# Left out:", *(f"#   {k} = {draft.given[k]!r}: {why}" for k, why in draft.dropped.items())]
    return Converted(loaded, "\n".join(lines) + "\n", draft.dropped, tuple(draft.notes))


def unflatten_values(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted, value in values.items():
        *path, last = dotted.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def whole(value: float, what: str, draft: Draft) -> int:
    """A count that must be whole; rounded with a note where it is not."""
    rounded = max(1, round(value))
    if rounded != value:
        draft.notes.append(f"{what} came to {value:g} and was rounded to {rounded}")
    return rounded


def every(value: Any) -> Any:
    """Steps between two events; theirs is -1 or 0 for never."""
    return max(0, int(value)) if isinstance(value, int | float) else DROP


def loggers(value: Any) -> tuple[bool, list[str]]:
    """Whether TensorBoard is on, and the other loggers, of their list."""
    names = [value] if isinstance(value, str) else list(value or ())
    known = {"wandb", "mlflow", "trackio", "swanlab"}
    return "tensorboard" in names or "all" in names, [n for n in names if n in known]


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
