"""Checkpoints of a learner across ranks: every rank writes its own pieces while training goes on.

The folder has the form of `learn.checkpoint` (written aside and renamed, a checksum of every file, no pickle), and
its manifest also says which box of which tensor lies where. So any number of ranks, in any layout, can read it again,
bit for bit. torch.distributed.checkpoint shards as this does, but describes its files by a pickle and checks none of
them.

`save` copies this rank's pieces to the host and comes back; a thread writes them as they lie there. What it does is
long calls that hold no lock of Python's, and few of them, for on a machine without a core to spare everything else is
taken from the step. Ranks tell each other by the store how far they are, never by collectives, which belong to the
training.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.errors import CheckpointError
from tidemill.learn import checkpoint as plain
from tidemill.learn.adam import SCALE, decode
from tidemill.learn.parallel.stored import StoredSource, from_manifest
from tidemill.learn.tensor_file import Form, form, head, in_order, raw
from tidemill.reshard.layout import Box, Layout, LayoutEntry, volume

OF = re.compile(r"^(?P<role>critic\.)?(?P<kind>model|adapter|ema|averaged|optimizer)\.(?P<name>.+)$")
Pieces = dict[str, list[tuple[str, str, Box]]]  # tensor → file, key, box


@dataclass(frozen=True, slots=True)
class Shelf:
    """One file's bytes, in memory that training does not touch: they are written as they lie."""

    head: bytes
    memory: Tensor  # what follows the head
    places: dict[str, Tensor]  # views of it, by key in the file


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank writes. The memory is kept from one save to the next: touching it anew costs more than copying."""

    forms: dict[str, Form]  # of all this rank's tensors, those that others write included
    shelves: list[Shelf]
    boxes: dict[str, Box]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        for shelf in self.shelves:
            for name, place in shelf.places.items():
                place.copy_(tensors[name], non_blocking=True)
        if any(t.device.type != "cpu" for t in tensors.values()):
            torch.accelerator.synchronize()

    @property
    def nbytes(self) -> int:
        return sum(shelf.memory.numel() for shelf in self.shelves)


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    return {name: form(tensor) for name, tensor in tensors.items()}


def snapshot(tensors: Mapping[str, Tensor], layout: Layout, rank: int) -> Snapshot:
    """Room for this rank's share, still empty. Of several ranks that hold the same piece one writes it."""
    found = {name: (_own_box(name, tensor, layout, rank), tensor) for name, tensor in tensors.items()}
    boxes = {name: box for name, (box, _) in found.items() if box is not None}
    is_pinned = any(t.device.type != "cpu" for t in tensors.values())
    shards = plain.in_shards({name: tensors[name] for name in boxes}) if boxes else []
    shelves = [_shelf({name: form(tensors[name]) for name in names}, is_pinned) for names in shards]
    return Snapshot(forms_of(tensors), shelves, boxes)


def _shelf(forms: Mapping[str, Form], is_pinned: bool) -> Shelf:
    forms = {name: forms[name] for name in in_order(forms)}
    memory = torch.empty(sum(one.nbytes for one in forms.values()), dtype=torch.uint8, pin_memory=is_pinned)
    places, at = {}, 0
    for name, one in forms.items():
        places[name] = memory[at : at + one.nbytes].view(one.dtype).view(one.shape)
        at += one.nbytes
    return Shelf(head(forms), memory, places)


def _own_box(name: str, tensor: Tensor, layout: Layout, rank: int) -> Box | None:
    """What of the logical tensor this rank is to write, or None."""
    entry = _entry(name, layout)
    if entry is None or not tensor.ndim:  # a scalar beside a parameter, or something every rank has whole
        writer = min(entry.mesh.ranks) if entry is not None else layout.ranks[0]
        return tuple((0, n) for n in tensor.shape) if rank == writer else None
    mine = next((entry.home_box(c) for c, r in entry.mesh.coordinates() if r == rank), None)
    if mine is None or not volume(mine):
        return None
    holders = [r for c, r in entry.mesh.coordinates() if entry.home_box(c) == mine]
    return mine if rank == holders[sum(map(ord, name)) % len(holders)] else None  # each writes some


def _entry(name: str, layout: Layout) -> LayoutEntry | None:
    """Of `model.NAME` (or `adapter`, `ema`, `averaged`) or `optimizer.NAME.KEY`, perhaps another role's:
    `critic.model.NAME`. A reference has weights alone, `reference.NAME`, which the layout calls so too."""
    if name in layout.by_name:
        return layout.by_name[name][0]
    of = OF.match(name)
    if of is None:
        return None
    own = of["name"].rpartition(".")[0] if of["kind"] == "optimizer" else of["name"]
    found = layout.by_name.get(f"{of['role'] or ''}{own}")
    return found[0] if found else None


class Saver:
    """One per rank. Errors of a save in the background are raised by the next call, on every rank."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float = 600.0) -> None:
        self.store, self.rank, self.world, self.timeout_s = store, rank, world, timeout_s
        self.series = store.add(f"checkpoint/savers/{rank}", 1)  # of this world's savers: the same on every rank
        # A connection of the thread's own: it may wait there as long as it likes, and wakes nobody to look again.
        self._waiting = store.clone()
        self._taken: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._count = 0
        self.seconds_blocked = 0.0  # of the last save: what training waited

    def save(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        layout: Layout,
        state: Mapping[str, Any],
        *,
        keep: int,
        best: bool = False,
        metric: float | None = None,
    ) -> None:
        """Every rank calls this with its own tensors and the same rest. `wait` tells when it is on disk."""
        self.wait()
        began = time.perf_counter()
        taken = self._taken
        if taken is None or taken.forms != forms_of(tensors):
            taken = self._taken = snapshot(tensors, layout, self.rank)
        taken.take(tensors)
        self._count += 1
        job = _Job(folder, step, self._count, {"best": best, "metric": metric}, dict(state), keep)
        self._thread = threading.Thread(target=self._write, args=(job, taken), name="checkpoint", daemon=True)
        self._thread.start()
        self.seconds_blocked = time.perf_counter() - began

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # In the thread

    def _write(self, job: _Job, taken: Snapshot) -> None:
        try:
            if self.rank == 0:
                self._tell(job, "ready", self._attempt(lambda: _prepare(job)))
            _raise_if_failed(self._hear(job, "ready"))
            self._tell(job, f"wrote-{self.rank}", self._attempt(lambda: write_pieces(job.aside, self.rank, taken)))
            if self.rank == 0:
                parts = [self._hear(job, f"wrote-{r}") for r in range(self.world)]
                self._tell(job, "end", self._attempt(lambda: _finish(job, parts)))
            _raise_if_failed(self._hear(job, "end"))
        except BaseException as error:
            self._error = error
        finally:
            if self.rank == 0:
                shutil.rmtree(job.aside, ignore_errors=True)

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What it gives, or what went wrong, in a form that other ranks can hear."""
        try:
            return work()
        except CheckpointError as error:
            return {"error": error.message, "remedy": error.remedy}
        except Exception as error:
            return {"error": f"rank {self.rank} could not write its part of a checkpoint: {error}"}

    def _tell(self, job: _Job, key: str, value: dict[str, Any]) -> None:
        self.store.set(self._key(job, key), json.dumps(value))

    def _key(self, job: _Job, key: str) -> str:
        return f"checkpoint/{self.series}/{job.number}/{key}"

    def _hear(self, job: _Job, key: str) -> dict[str, Any]:
        name = self._key(job, key)
        try:
            self._waiting.wait([name], timedelta(seconds=self.timeout_s))
        except dist.DistStoreError as error:
            raise CheckpointError(f"a checkpoint waited {self.timeout_s:.0f} s for {key}", "is a rank dead?") from error
        heard: dict[str, Any] = json.loads(self._waiting.get(name))
        return heard


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    step: int
    number: int  # of this process's saves: the same on every rank
    marks: dict[str, Any]  # best, metric
    state: dict[str, Any]
    keep: int

    @property
    def target(self) -> Path:
        return self.folder / f"step-{self.step:06d}"

    @property
    def aside(self) -> Path:
        return self.folder / f"{plain.ASIDE}{self.target.name}-ranks"


def _prepare(job: _Job) -> dict[str, Any]:
    """A place to write aside, on one rank before the others begin."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        plain.clear_leftovers(job.folder)
        job.aside.mkdir()
    except OSError as error:
        raise plain.explain(error, job.folder, 0) from error
    return {}


def _raise_if_failed(outcome: Mapping[str, Any]) -> None:
    if "error" in outcome:
        raise CheckpointError(outcome["error"], outcome.get("remedy", ""))


def write_pieces(folder: Path, rank: int, taken: Snapshot) -> dict[str, Any]:
    """This rank's files, with their checksums and what lies in them."""
    files: dict[str, Any] = {}
    pieces: Pieces = {}
    try:
        for i, shelf in enumerate(taken.shelves):
            file = f"rank-{rank:05d}-{i + 1:03d}.safetensors"
            files[file] = plain.write_file(folder / file, [shelf.head, raw(shelf.memory)])
            for name in shelf.places:
                pieces.setdefault(name, []).append((file, name, taken.boxes[name]))
    except OSError as error:
        raise plain.explain(error, folder, taken.nbytes) from error
    return {"files": files, "tensors": pieces}


def _finish(job: _Job, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """On one rank, once every rank's files are on disk: the manifest, then the name that says it is whole."""
    for part in parts:
        if "error" in part:
            return part
    files = {name: entry for part in parts for name, entry in part["files"].items()}
    tensors: dict[str, list[Any]] = {}
    for part in parts:
        for name, found in part["tensors"].items():
            tensors.setdefault(name, []).extend(found)
    files[plain.STATE] = plain.write_json(job.aside / plain.STATE, job.state)
    manifest = {"step": job.step, **job.marks, "files": files, "tensors": tensors}
    plain.write_file(job.aside / plain.MANIFEST, [json.dumps(manifest).encode()])  # in one line: it may be long
    plain.put_in_place(job.aside, job.target)
    plain.prune(job.folder, job.keep)
    return {}


# Reading


def open_checkpoint(path: Path) -> tuple[StoredSource, dict[str, Any]]:
    """Its tensors, to be read by box, and its state."""
    manifest = plain.read_manifest(path)
    state: dict[str, Any] = json.loads((path / plain.STATE).read_text(encoding="utf-8"))
    if "tensors" not in manifest:
        return _whole_tensors(path, manifest), state
    return from_manifest(path, manifest), state


def _whole_tensors(path: Path, manifest: Mapping[str, Any]) -> StoredSource:
    """A checkpoint that one rank wrote."""
    from safetensors import safe_open

    pieces: Pieces = {}
    for file in manifest["files"]:
        if file.endswith(".safetensors"):
            with safe_open(path / file, "pt") as found:
                for key in found.keys():  # noqa: SIM118  (no mapping, though it has keys)
                    shape = found.get_slice(key).get_shape()
                    pieces[key] = [(file, key, tuple((0, n) for n in shape))]
    return from_manifest(path, {"tensors": pieces})


@torch.no_grad()
def read_own(source: StoredSource, targets: Mapping[str, Tensor], layout: Layout, rank: int, prefix: str = "") -> None:
    """Fill this rank's tensors, whatever layout wrote them. `prefix`: what their names lack in comparison with a
    checkpoint's (`model.` for a plain model folder)."""
    for name, target in targets.items():
        if target.numel():
            source.read_into(target, name, held_box(f"{prefix}{name}", target, layout, rank))


def held_box(name: str, own: Tensor, layout: Layout, rank: int) -> Box:
    """What of the logical tensor this rank has."""
    entry = _entry(name, layout)
    if entry is None or not own.ndim:
        return tuple((0, n) for n in own.shape)
    return next(entry.home_box(c) for c, r in entry.mesh.coordinates() if r == rank)


def read_states(
    source: StoredSource, own: Mapping[str, Tensor], layout: Layout, rank: int, role: str = ""
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The optimizer's state of each parameter's piece, as far as the checkpoint has it."""
    start, keys = f"{role}optimizer.", dict[str, list[str]]()
    for full in source.pieces:
        name, _, key = full.removeprefix(start).rpartition(".")
        if full.startswith(start) and name in own and not key.endswith(SCALE):
            keys.setdefault(name, []).append(key)
    for name, found in keys.items():
        yield name, {key: _read_state(source, f"{start}{name}", key, own[name], layout, rank) for key in found}


def _read_state(source: StoredSource, at: str, key: str, own: Tensor, layout: Layout, rank: int) -> Tensor:
    name = f"{at}.{key}"
    if f"{name}{SCALE}" in source:  # one rank's blocks: other cuts of the tensor have other blocks
        entry = _entry(name, layout)
        assert entry is not None
        coded = {key: source.read(name), f"{key}{SCALE}": source.read(f"{name}{SCALE}")}
        box = held_box(name, own, layout, rank)
        return decode(coded, key, entry.shape)[tuple(slice(low, high) for low, high in box)].clone()
    shape = own.shape if source.pieces[name][0].box else torch.Size()
    target = torch.zeros(shape, dtype=source.dtype(name))
    read_own(source, {name: target}, layout, rank)
    return target


def default_saver(timeout_s: float) -> Saver:
    from torch.distributed.distributed_c10d import _get_default_store

    return Saver(_get_default_store(), dist.get_rank(), dist.get_world_size(), timeout_s)
