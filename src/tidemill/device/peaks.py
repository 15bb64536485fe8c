"""The most memory that this process held while it did something: on its device by the allocator's own peak, on the
host by the kernel's. Both are counters of the whole process that can be set back, so one object reads them, when what
is done changes."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass

from tidemill.device import host


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes; 0: unknown, or nothing was held."""

    device: int = 0
    host: int = 0

    def or_more(self, other: Peak) -> Peak:
        return Peak(max(self.device, other.device), max(self.host, other.host))


class Peaks:
    """Work that follows work of the same name costs no reading: a rollout engine makes hundreds of steps a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()
        self._last = ""  # what was done last, where nothing is done now
        self._found: dict[str, Peak] = {}
        self._whole = Peak()

    def begin(self, name: str) -> None:
        with self._lock:
            if not (name in self._active or (not self._active and name == self._last)):
                self._note()
            self._active[name] += 1
            self._last = name

    def end(self, name: str) -> None:
        with self._lock:
            self._active[name] -= 1
            if self._active[name] <= 0:
                del self._active[name]
                if self._active:  # others go on without it
                    self._note(name)

    def drain(self) -> dict[str, Peak]:
        """Return the peaks since the last call by what was done, and forget them."""
        with self._lock:
            self._note()
            found, self._found = self._found, {}
            return found

    def whole(self) -> Peak:
        """Return the most since the process began."""
        with self._lock:
            self._note()
            return self._whole

    def _note(self, *ended: str) -> None:
        """Read both counters for all that was at work since they were read last, and set them back."""
        peak = Peak(_device_peak(), host.resident_peak())
        self._whole = self._whole.or_more(peak)
        for name in {*self._active, *ended} or ({self._last} - {""}):
            self._found[name] = self._found.get(name, Peak()).or_more(peak)


def _device_peak() -> int:
    """Bytes that torch's allocator held at most, and memory that this process mapped without it. 0 in a process that
    has not touched its device: asking would open it."""
    if "torch" not in sys.modules:
        return 0
    import torch

    from tidemill.device import mapped

    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return 0
    found = int(torch.accelerator.max_memory_allocated())
    torch.accelerator.reset_peak_memory_stats()
    return found + mapped.most_bytes_lately()


PEAKS = Peaks()  # one for the process, as its allocator is
