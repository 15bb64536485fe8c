"""The module `torch.npu`: what torch and Tidemill ask of a device's module, by torch_npu's names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import _fake_npu as native
import torch

NAME = os.environ.get("FAKE_NPU_NAME", "Ascend910B3")
TOTAL = 64 << 30
Event, Stream = torch.Event, torch.Stream
_is_in_bad_fork = lambda: False  # noqa: E731


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing needs it."""


_lazy_init = init


def _lazy_call(call: Any, **_: Any) -> None:
    call()


def device_count() -> int:
    return int(native.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(device if isinstance(device, int) else torch.device(device).index or 0)


class device:
    """Makes a device current inside."""

    def __init__(self, which: Any) -> None:
        self.index = which if isinstance(which, int) else torch.device(which).index

    def __enter__(self) -> None:
        self.before = current_device()
        if self.index is not None and self.index >= 0:
            set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        set_device(self.before)


def get_device_name(index: Any = None) -> str:
    return NAME


def mem_get_info(index: Any = None) -> tuple[int, int]:
    return TOTAL - native.counts()["allocated"], TOTAL


def memory_allocated(index: Any = None) -> int:
    return int(native.counts()["allocated"])


memory_reserved = memory_allocated


def max_memory_allocated(index: Any = None) -> int:
    return int(native.counts()["most_allocated"])


def memory_stats(index: Any = None) -> dict[str, int]:
    return {"allocated_bytes.all.current": memory_allocated(), "allocated_bytes.all.peak": max_memory_allocated()}


def reset_peak_memory_stats(index: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats()


def empty_cache() -> None:
    """Nothing is cached."""


def synchronize(index: Any = None) -> None:
    torch.accelerator.synchronize()


def current_stream(index: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def default_stream(index: Any = None) -> torch.Stream:
    return current_stream()


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(given: torch.Stream | None) -> Any:
    if given is None:
        yield
        return
    before = current_stream()
    set_stream(given)
    try:
        yield
    finally:
        set_stream(before)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def _generators() -> list[torch.Generator]:
    return [torch._C._get_accelerator_default_generator(i) for i in range(device_count())]  # type: ignore[attr-defined]


def manual_seed(seed: int) -> None:
    _draws().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed_all() -> None:
    manual_seed_all(torch.initial_seed())


def get_rng_state(index: Any = None) -> torch.Tensor:
    return _draws().get_state()


def set_rng_state(state: torch.Tensor, index: Any = None) -> None:
    _draws().set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()] * device_count()


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for state in states:
        set_rng_state(state)


def _draws() -> torch.Generator:
    return native.default_generator()


# -- captured graphs, as torch_npu/npu/graphs.py has them -------------------------------------------------------------


class NPUGraph:
    def __init__(self) -> None:
        self.auto_dispatch_capture = False
        self._graph = native.Graph()
        self._pool: Any = object()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"capture_error_mode {capture_error_mode!r}")
        self._pool = pool if pool is not None else self._pool
        self._graph.begin(self.auto_dispatch_capture)

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph = native.Graph()

    def pool(self) -> Any:
        return self._pool

    def update(self, cpu_update_input: list[Mapping[str, list[int]]]) -> None:
        if not self.auto_dispatch_capture:
            raise RuntimeError("capture with auto_dispatch_capture=True before an update")
        self._graph.update([dict(one) for one in cpu_update_input])


class graph:
    """Captures what is asked inside, on a stream of its own."""

    def __init__(
        self, npu_graph: NPUGraph, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:  # fmt: skip
        self.graph, self.pool, self.mode = npu_graph, pool, capture_error_mode
        npu_graph.auto_dispatch_capture = auto_dispatch_capture

    def __enter__(self) -> None:
        synchronize()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.graph.capture_end()


def graph_pool_handle() -> Any:
    return object()


def is_current_stream_capturing() -> bool:
    return bool(native.is_capturing())
