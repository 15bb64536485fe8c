"""Swap: a learner's parameters, gradients and optimizer state to host memory while rollout owns the device, and back.

Tensors keep their identity: only the memory under them goes and comes, so modules, optimizers and views need not know.
What has not changed since it was last copied is freed and not copied again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from tidemill.errors import ReshardError
from tidemill.reshard.pack import checksum

SLAB_BYTES = 1 << 30  # pinned memory is given out in powers of two; a slab wastes nothing
SMALLEST_SLAB_BYTES = 1 << 20
BATCH_BYTES = 1 << 29  # compared, or given memory, at a time
SMALL_BYTES = 1 << 16  # copied without asking whether it changed


@dataclass(frozen=True, slots=True)
class Span:
    slab: int
    at: int
    nbytes: int


@dataclass(slots=True)
class Swapped:
    """What went, or came."""

    copied_bytes: int = 0
    skipped_bytes: int = 0  # freed without a copy: the host has them as they are
    seconds: float = 0.0
    free_seconds: float = 0.0  # of them, giving memory back to the device


@dataclass(slots=True)
class _Held:
    """One storage's place on the host."""

    storage: torch.UntypedStorage | None  # held only while it is out: on the device its owner decides how long it lives
    owner: weakref.ref[torch.Tensor]
    device: torch.device
    nbytes: int
    spans: list[Span]
    sums: torch.Tensor | None = None


@dataclass(slots=True)
class Slabs:
    """Host memory in large pieces, pinned where there is a device to copy from."""

    pinned: bool
    slabs: list[torch.Tensor] = field(default_factory=list)
    free: list[Span] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(s.numel() for s in self.slabs)

    def take(self, nbytes: int) -> list[Span]:
        """Spans of `nbytes` in all; a tensor may lie across several."""
        spans = []
        while nbytes:
            if not self.free:
                self._grow(nbytes)
            span = self.free.pop()
            used = min(nbytes, span.nbytes)
            if used < span.nbytes:
                self.free.append(Span(span.slab, span.at + used, span.nbytes - used))
            spans.append(Span(span.slab, span.at, used))
            nbytes -= used
        return spans

    def reserve(self, nbytes: int) -> None:
        """Make room ahead: pinning takes longer than copying."""
        while (short := nbytes - sum(s.nbytes for s in self.free)) > 0:
            self._grow(short)

    def give(self, spans: Iterable[Span]) -> None:
        self.free.extend(spans)

    def bytes_of(self, span: Span) -> torch.Tensor:
        return self.slabs[span.slab].narrow(0, span.at, span.nbytes)

    def _grow(self, nbytes: int) -> None:
        size = max(SMALLEST_SLAB_BYTES, min(SLAB_BYTES, 1 << (nbytes - 1).bit_length()))
        self.free.append(Span(len(self.slabs), 0, size))
        self.slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned))


class Swap:
    """The host's side of a set of tensors. `out` and `back` take turns."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._on_device = self.device.type != "cpu"
        self.slabs = Slabs(pinned=self._on_device)
        self._held: dict[int, _Held] = {}  # by storage
        self._out: list[_Held] = []
        self._stream = torch.Stream(device=self.device) if self._on_device else None
        self._coming = False

    def out(self, tensors: Iterable[torch.Tensor]) -> Swapped:
        """Copy to the host what the host does not have, then free all of it on the device."""
        if self._out:
            raise ReshardError("these tensors are out already", "bring them back first")
        started = time.perf_counter()
        self._forget_dead()
        held = [self._hold(storage, owner) for storage, owner in _storages(tensors)]
        self.slabs.reserve(sum(h.nbytes for h in held if not h.spans))
        copied = 0
        for batch in _batches(held):  # while one batch is copied the next is compared
            stale = self._stale(batch)
            copied += sum(h.nbytes for h in stale)
            with _on(self._stream):
                for one in stale:
                    one.spans = one.spans or self.slabs.take(one.nbytes)
                    for host, device in self._pairs(one):
                        host.copy_(device, non_blocking=self._on_device)
        if self._stream is not None:
            self._stream.synchronize()
        freeing = time.perf_counter()
        for one in held:
            assert one.storage is not None
            one.storage.resize_(0)
        if self._on_device:
            torch.accelerator.empty_cache()
        self._out = held
        now = time.perf_counter()
        return Swapped(copied, sum(h.nbytes for h in held) - copied, now - started, now - freeing)

    @property
    def is_out(self) -> bool:
        return bool(self._out)

    def back(self, *, wait: bool = True, copies: bool = True) -> Swapped:
        """Bring everything back. Without `wait` the copies run on while the caller does something else (prefetch);
        without `copies` only the memory comes, for who writes all of it next."""
        started = time.perf_counter()
        done = Swapped(sum(h.nbytes for h in self._out) if copies else 0, 0, len(self._out))
        for batch in _batches(self._out):  # while one batch is copied the next gets its memory
            for one in batch:
                assert one.storage is not None
                one.storage.resize_(one.nbytes)
            with _on(self._stream):
                for one in batch if copies else ():
                    for host, device in self._pairs(one):
                        device.copy_(host, non_blocking=self._on_device)
        self._coming = True
        for one in self._out:
            one.storage = None
        self._out = []
        if wait:
            self.wait()
        done.seconds = time.perf_counter() - started
        return done

    def wait(self) -> None:
        """Until what comes has come. Work given to the device after this sees the tensors whole."""
        if self._coming and self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)
            self._stream.synchronize()
        self._coming = False

    def drop(self) -> None:
        """Give the host memory back. Not while tensors are out."""
        if self._out:
            raise ReshardError("tensors are out: their only copy is on the host", "bring them back first")
        self.wait()
        self._held.clear()
        self.slabs = Slabs(pinned=self._on_device)

    # Inside

    def _hold(self, storage: torch.UntypedStorage, owner: torch.Tensor) -> _Held:
        if not storage.resizable():
            raise ReshardError("a tensor's memory is not its own to free: it is shared or mapped", "swap a clone of it")
        known = self._held.get(storage._cdata)
        if known is None or known.nbytes != storage.nbytes():
            if known is not None:
                self.slabs.give(known.spans)
            known = _Held(storage, weakref.ref(owner), owner.device, storage.nbytes(), [])
            self._held[storage._cdata] = known
        known.storage = storage
        return known

    def _stale(self, held: list[_Held]) -> list[_Held]:
        """Those whose bytes the host does not have. By checksum: version counters miss what fused optimizers write, and
        summing on the device takes a few hundredths of a copy's time."""
        with torch.no_grad():
            sums = {id(h): checksum(_bytes(h)) for h in held if h.nbytes > SMALL_BYTES}
            known = [h for h in held if h.sums is not None]
            same: set[int] = set()
            if known:
                equal = torch.stack([torch.eq(sums[id(h)], h.sums).all() for h in known if h.sums is not None])
                same = {id(h) for h, is_same in zip(known, equal.tolist()) if is_same}
        for h in held:
            h.sums = sums.get(id(h))
        return [h for h in held if id(h) not in same]

    def _forget_dead(self) -> None:
        for key, one in list(self._held.items()):
            if one.owner() is None:
                self.slabs.give(one.spans)
                del self._held[key]

    def _pairs(self, one: _Held) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        on_device, at = _bytes(one), 0
        for span in one.spans:
            yield self.slabs.bytes_of(span), on_device.narrow(0, at, span.nbytes)
            at += span.nbytes


def _batches(held: list[_Held]) -> Iterator[list[_Held]]:
    batch: list[_Held] = []
    for one in held:
        batch.append(one)
        if sum(h.nbytes for h in batch) >= BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


class _on:
    """Run on a side stream that begins when the current one has done what it was asked; on the CPU, just run."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def _bytes(one: _Held) -> torch.Tensor:
    assert one.storage is not None
    return torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.storage)


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Each storage once, with a tensor that lives as long: views and tied tensors share theirs."""
    found: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own bytes
        storage = local.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, (storage, tensor))
    return list(found.values())


def learner_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Everything a learner keeps on the device between steps: parameters, buffers, gradients, optimizer state."""
    found: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    found += [p.grad for p in module.parameters() if p.grad is not None]
    for state in optimizer.state.values() if optimizer else ():
        found += [v for v in state.values() if isinstance(v, torch.Tensor) and v.device == found[0].device]
    return found
