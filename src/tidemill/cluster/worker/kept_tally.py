"""A tally that outlives its process: it is kept in a file, from which the worker's replacement continues. It holds what
a worker counts about its own work, such as its time. Counts of samples come with their commits and are kept by the
dock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.device.peaks import PEAKS
from tidemill.flow.tally import Counted, Tally
from tidemill.observe.timeline import Recorder, recorder_of

if TYPE_CHECKING:
    from tidemill.cluster.assignment import Assignment, DockPlace

_ADD, _MEAN = "+", "~"


def tally_of(task: Assignment, dock: DockPlace) -> Tally:
    """Return a tally kept in a file for a worker that may die alone; one that ends with the run needs no file."""
    recorder = recorder_of(task.logs.parent, task.post.name, task.config.observe.timeline)
    if not task.dies_alone:
        return Tally(recorder=recorder, peaks=PEAKS)
    return KeptTally(task.logs / f"{task.post.name}.counts", dock.ledger, recorder)


class KeptTally(Tally):
    """`place` names the dock that the counts belong to: those of another dock are discarded. Updates of the learner
    are not kept: learning again counts again."""

    def __init__(self, file: Path, place: str, recorder: Recorder | None = None) -> None:
        self._file = -1
        super().__init__(recorder=recorder, peaks=PEAKS)
        self._path, self._place = file, place
        for line in self._left():
            kind, name, value = line.split("\t")
            (super().add if kind == _ADD else super().mean)(name, float(value))
        self._file = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        if not os.fstat(self._file).st_size:
            os.write(self._file, f"{place}\n".encode())

    def _left(self) -> list[str]:
        """Read whole lines that a predecessor wrote at the same dock; anything else is discarded."""
        try:
            head, *lines = self._path.read_text().split("\n")
        except FileNotFoundError:
            return []
        if head == self._place:
            return [line for line in lines[:-1] if line.count("\t") == 2]
        self._path.unlink()
        return []

    def add(self, name: str, value: float) -> None:
        super().add(name, value)
        self._note(_ADD, name, value)

    def mean(self, name: str, value: float) -> None:
        super().mean(name, value)
        self._note(_MEAN, name, value)

    def drain(self) -> Counted:
        # Truncated in place: the file stays open.
        counted = super().drain()
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{self._place}\n".encode())
        return counted

    def close(self) -> None:
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _note(self, kind: str, name: str, value: float) -> None:
        if self._file >= 0:
            os.write(self._file, f"{kind}\t{name}\t{float(value)!r}\n".encode())
