"""Dumps: everything that a step's stages wrote, with gradients and weights, so that two runs can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.batch import ID, Batch

if TYPE_CHECKING:
    from tidemill.dock import Counts, Dock, Want

FOLDER = "dumps"


def file_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06d}.safetensors"


class Dump:
    """Writes one file per step. Rows are kept in the order of their ids, so the time of their arrival does not show."""

    def __init__(self, run: Path, steps: Sequence[int], stages: Sequence[str]) -> None:
        self.run, self.steps, self.stages = run, frozenset(steps), ["source", *stages]
        self._written: dict[str, list[Batch]] | None = None  # None outside the steps to dump
        self._tensors: dict[str, torch.Tensor] = {}
        self._updates: Counter[str] = Counter()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if number not in self.steps:
            yield
            return
        self._written, self._tensors, self._updates = {}, {}, Counter()
        try:
            yield
            self._save(number)
        finally:
            self._written = None

    def rows(self, stage: str, ids: Any, outputs: Batch | None) -> None:
        if self._written is not None and outputs is not None:
            self._written.setdefault(stage, []).append(outputs.merge({ID: np.asarray(ids, np.int64)}))

    def tensors(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the learner's tensors, by name, for each of a step's updates."""
        if self._written is None:
            return
        update = self._updates[what]
        self._updates[what] += 1
        for name, tensor in tensors.items():
            self._tensors[f"learn/{what}/{update}/{name}"] = tensor.detach().to("cpu", copy=True).contiguous()

    def _save(self, number: int) -> None:
        from safetensors.torch import save_file

        assert self._written is not None
        found: dict[str, torch.Tensor] = {}
        for stage, parts in self._written.items():
            whole = Batch.concat(parts)
            whole = whole.gather(np.argsort(whole.values(ID), kind="stable"))
            for name, column in whole.items():
                found[f"{stage}/{name}"] = torch.from_numpy(np.array(_plain(column.values)))
                if column.offsets is not None:
                    found[f"{stage}/{name}/offsets"] = torch.from_numpy(np.array(column.offsets))
        found |= self._tensors
        path = file_of(self.run, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        # safetensors orders tensors by its own rules; the original order shows which of two differences came first.
        save_file(found, path, {"stages": ",".join(self.stages), "names": "\n".join(found)})


class DumpingDock:
    """A dock that records in a dump everything that passes through it."""

    def __init__(self, dock: Dock, dump: Dump) -> None:
        self._dock, self._dump = dock, dump

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dock, name)

    def put(self, rows: Batch, *args: Any, **kwargs: Any) -> None:
        self._dump.rows("source", rows.values(ID), rows)
        self._dock.put(rows, *args, **kwargs)

    def take(self, stage: str, want: Want, *args: Any, **kwargs: Any) -> DumpingLease | None:
        lease = self._dock.take(stage, want, *args, **kwargs)
        return None if lease is None else DumpingLease(lease, stage, self._dump)


class DumpingLease:
    def __init__(self, lease: Any, stage: str, dump: Dump) -> None:  # a local dock's, which knows its rows' ids
        self._lease, self._stage, self._dump = lease, stage, dump

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def commit(self, outputs: Batch | None = None, drop: Sequence[int] = (), counts: Counts | None = None) -> None:
        self._dump.rows(self._stage, self._lease.ids, outputs)
        self._lease.commit(outputs, drop, counts)


def _plain(values: Any) -> Any:
    """Convert unsigned integers of more than 8 bits, which safetensors lacks."""
    signed = {np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}.get(values.dtype.type)
    return values if signed is None else values.view(signed)
