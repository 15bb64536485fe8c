"""Hand-over: rollout and learning take turns with one device's memory. While samples are made, what only learning needs
(the optimizer's state, a critic, a frozen reference; of a learner that is cut its weights too) lies in host memory;
while others work, the engine's cache is freed, and weights that an engine over ranks has of its own lie in host memory.
Tensors keep their identity and their bytes, so a run computes the same numbers with it as without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from tidemill.device import Device
from tidemill.estimate.handover import HandedOver
from tidemill.flow.tally import Tally
from tidemill.reshard.swap import Swap
from tidemill.rollout.engine import RolloutEngine


class Away(Protocol):
    """What learning keeps on a device and rollout does not need."""

    def out(self) -> int:
        """Move to host memory; return the bytes freed on the device."""

    def back(self) -> None: ...


class Leaving:
    """Implements `Away` for tensors of this process. `tensors` is called each time, because an optimizer has none
    before its first update."""

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self.swap, self.tensors = Swap(device), tensors

    def out(self) -> int:
        went = self.swap.out(self.tensors())
        return went.copied_bytes + went.skipped_bytes

    def back(self) -> None:
        self.swap.back()

    def room(self) -> None:
        """The memory back, for whoever writes all of it next."""
        self.swap.back(copies=False)


class Handover:
    """Tracks whose turn it is. Each worker calls it before it works: a no-op if it already owns the device."""

    def __init__(
        self,
        engine: RolloutEngine | None,
        tally: Tally,
        device: Device,
        what: HandedOver,
        away: Away | None,
        copy: Leaving | None = None,
    ) -> None:
        """`copy`: weights of the engine's own, which arrive anew before each of its turns."""
        self.engine = engine if what != "never" else None
        self.away = away if what == "all" else None
        self.copy = copy if what == "all" else None
        self.tally, self.device = tally, device
        self.is_asleep = self.is_away = False  # the engine's cache; learning's state
        self._due: int | None = None  # a version that a sleeping engine has not loaded

    def rolling(self) -> None:
        """Give the device to the engine."""
        if self.away is not None and not self.is_away:
            with self.tally.time("hand_over"):
                self.tally.add("handed_over/state_bytes", float(self.away.out()))
            self.is_away = True
        if self.copy is not None and self.copy.swap.is_out:
            with self.tally.time("hand_over"):
                self.copy.back()
        if self.is_asleep:
            with self.tally.time("hand_over"):
                self._wake()

    def learning(self) -> None:
        """Give the device to other work, or to reads of the learner's state."""
        if self.engine is not None and not self.is_asleep:
            with self.tally.time("hand_over"):
                self.tally.add("handed_over/cache_bytes", float(self._sleep(self.engine)))
            self.is_asleep = True
        if self.copy is not None and not self.copy.swap.is_out:
            with self.tally.time("hand_over"):
                self.tally.add("handed_over/engine_bytes", float(self.copy.out()))
        self._bring_back()

    def publishing(self) -> None:
        """Make room for the weights that go from the learner to the engine's own tensors."""
        if self.copy is not None and self.copy.swap.is_out:
            with self.tally.time("hand_over"):
                self.copy.room()
        self._bring_back()

    def _bring_back(self) -> None:
        if self.is_away:
            assert self.away is not None
            with self.tally.time("hand_over"):
                self.away.back()
            self.is_away = False

    def serve(self, version: int) -> bool:
        """Announce that the current weights are this version. Returns whether the engine sleeps, and loads it when
        it wakes."""
        if self.is_asleep:
            self._due = version
        return self.is_asleep

    def _wake(self) -> None:
        assert self.engine is not None
        self._give_back()  # an engine's memory may not come from torch, which holds on to what learning has freed
        self.engine.wake()
        self.is_asleep = False
        if self._due is not None:
            self.engine.load(None, self._due)
            self._due = None

    def _sleep(self, engine: RolloutEngine) -> int:
        before = _held(self.device)
        engine.sleep()
        after = _held(self.device)
        self._give_back()  # learning may be in another process
        return max(0, *(b - a for b, a in zip(before, after, strict=True)))

    def _give_back(self) -> None:
        if self.device.kind != "cpu":
            torch.accelerator.empty_cache()


def _held(device: Device) -> tuple[int, int]:
    """Return bytes in use by this process's count and by the device's: an engine may allocate outside torch."""
    memory = device.memory()
    if device.kind == "cpu":
        return memory.reserved, memory.reserved
    return torch.accelerator.memory_allocated(device.torch_device), memory.total - memory.free


def kept_tensors(policy: Any, device: torch.device, found: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of learning that are on the device and can be freed: all but the policy, which rollout
    reads."""
    stays = {_storage(t) for t in (*policy.parameters(), *policy.buffers())}
    own = {id(t): t for t in found}.values()
    return [t for t in own if t.device.type == device.type and _storage(t) not in stays and _is_ours(t)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_ours(tensor: Tensor) -> bool:
    """Say whether a tensor's memory can be freed: memory mapped from a file or shared with other processes cannot."""
    return bool(tensor.untyped_storage().resizable())
