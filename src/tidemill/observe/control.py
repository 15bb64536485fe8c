"""Steering a run from outside: commands are in `control.jsonl`, and what was done about each in `steered.jsonl`. The
loop reads new commands at the beginning of each step. Changed settings are recorded with the step from which they
apply, so that a resumed run changes them at the same steps and computes the same numbers."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidemill.errors import ConfigError, did_you_mean

ASKED, DONE = "control.jsonl", "steered.jsonl"
KINDS = ("pause", "resume", "stop", "save", "evaluate", "set")
BOUNDS = {"learn.lr": (0.0, 1.0), "rollout.temperature": (0.0, 10.0), "algorithm.kl.coef": (0.0, 100.0)}
PAUSE_LOOK_S = 0.2  # between checks for the end of a pause
LATE = "requested while the run was not running"


@dataclass(frozen=True, slots=True)
class Command:
    id: str
    kind: str
    key: str = ""  # of `set`
    value: float = 0.0
    by: str = ""
    at: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Record:
    """`refused` says why nothing was done; "" when it was."""

    command: Command
    step: int  # at the beginning of this step
    refused: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self.command) | {"step": self.step, "refused": self.refused}


def command(kind: str, key: str = "", value: float = 0.0, by: str = "") -> Command:
    """Check a command; ConfigError says what is wrong."""
    made = Command(uuid.uuid4().hex[:12], kind, key, value, by, time.time())
    validate(made)
    return made


def validate(asked: Command) -> None:
    if asked.kind not in KINDS:
        hint = f"known are {', '.join(KINDS)}"
        raise ConfigError(f"there is no command {asked.kind!r}{did_you_mean(asked.kind, KINDS)}", hint)
    if asked.kind != "set":
        return
    if asked.key not in BOUNDS:
        raise ConfigError(
            f"{asked.key!r} cannot be changed during a run{did_you_mean(asked.key, BOUNDS)}",
            f"what can: {', '.join(BOUNDS)}",
        )
    low, high = BOUNDS[asked.key]
    if not (math.isfinite(asked.value) and low <= asked.value <= high):
        raise ConfigError(f"{asked.key}={asked.value:g} is out of bounds", f"from {low:g} to {high:g}")


def ask(folder: Path, asked: Command) -> None:
    """Append one line in one write: several pages may send commands at once."""
    _append(folder / ASKED, asdict(asked))


def parse(line: bytes) -> Command | None:
    """Read a command. None: the line is cut short, or is not a command."""
    try:
        plain = json.loads(line)
        fields = {name: plain[name] for name in ("id", "kind", "key", "by")}
        found = Command(**{n: str(v) for n, v in fields.items()}, value=float(plain["value"]), at=float(plain["at"]))
        validate(found)
    except (ValueError, KeyError, TypeError, ConfigError):
        return None
    return found


def records(folder: Path) -> list[Record]:
    """Return everything that was done or refused so far, oldest first."""
    found = []
    for line in _lines(folder / DONE):
        asked = parse(line)
        if asked is not None:
            plain = json.loads(line)
            found.append(Record(asked, int(plain.get("step", 0)), str(plain.get("refused", ""))))
    return found


def is_paused(done: Sequence[Record]) -> bool:
    last = next((r for r in reversed(done) if r.command.kind in ("pause", "resume", "stop") and not r.refused), None)
    return last is not None and last.command.kind == "pause"


class Steering:
    """The loop's side. `change` returns a sentence where it cannot; `actions`: what `save` and `evaluate` do;
    `base`: the settings that the run began with."""

    def __init__(
        self,
        folder: Path,
        first: int,
        change: Callable[[Mapping[str, float]], str],
        actions: Mapping[str, Callable[[], object]],
        base: Mapping[str, float] = MappingProxyType({}),
        is_stopping: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder, self.change, self.actions = folder, change, actions
        self.is_stopping, self.note = is_stopping, note
        done = records(folder)
        self._seen = {r.command.id for r in done}
        self._offset = 0
        self._since = _started(folder)
        again = [r for r in done if r.command.kind == "set" and not r.refused]
        for key in dict.fromkeys(r.command.key for r in again if r.command.key in base):
            change({key: base[key]})  # workers that survived when the run went back hold a later value
        self._again: dict[int, list[Command]] = {}  # by step: what an earlier life of the run changed
        for record in again:
            self._again.setdefault(max(record.step, first + 1), []).append(record.command)

    def begin(self, step: int) -> bool:
        """Carry out commands at the beginning of a step. True: the run is to stop here."""
        for asked in self._again.pop(step, ()):
            self.change({asked.key: asked.value})
        is_paused = False
        while True:
            for asked in self._new():
                if not self._do(asked, step):
                    continue
                if asked.kind == "stop":
                    return True
                is_paused = asked.kind == "pause" or (is_paused and asked.kind != "resume")
            if not is_paused or self.is_stopping():
                return False
            time.sleep(PAUSE_LOOK_S)

    def _new(self) -> list[Command]:
        try:
            size = (self.folder / ASKED).stat().st_size
        except OSError:
            return []
        if size == self._offset:
            return []
        lines = _lines(self.folder / ASKED)
        self._offset = size
        asked = [c for line in lines if (c := parse(line)) is not None and c.id not in self._seen]
        self._seen |= {c.id for c in asked}
        return asked

    def _do(self, asked: Command, step: int) -> bool:
        refused = ""
        if asked.kind == "set":
            refused = self.change({asked.key: asked.value})
        elif asked.at < self._since:
            refused = LATE
        elif asked.kind in self.actions:
            self.actions[asked.kind]()
        self._record(asked, step, refused)
        return not refused

    def _record(self, asked: Command, step: int, refused: str = "") -> None:
        _append(self.folder / DONE, Record(asked, step, refused).plain())
        what = f"{asked.key}={asked.value:g}" if asked.kind == "set" else asked.kind
        self.note(f"{what}: {refused or f'done at step {step}'} (requested by {asked.by or 'control.jsonl'})")


def _started(folder: Path) -> float:
    """Return when the process that writes the run took the lock."""
    try:
        return (folder / "lock").stat().st_mtime
    except OSError:
        return time.time()


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _append(path: Path, plain: Mapping[str, Any]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, json.dumps(plain).encode() + b"\n")
    finally:
        os.close(handle)
