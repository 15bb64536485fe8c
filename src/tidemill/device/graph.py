"""Captured work: what a function asks of the accelerator, recorded once and run again at no cost on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tidemill.device.compiling import compiling


class CapturedGraph:
    """`work` reads and writes the same tensors at every replay; `result` is what it gave. Graphs that share a `pool`
    share their scratch memory, so only one of them may run at a time.

    With `has_updates` operators that take an argument from the host can be told it anew by `update`, of NPUs alone."""

    def __init__(self, work: Callable[[], Any], pool: Any = None, has_updates: bool = False) -> None:
        with compiling("graphs"):
            self._capture(work, pool, has_updates)

    def _capture(self, work: Callable[[], Any], pool: Any, has_updates: bool) -> None:
        module: Any = torch.get_device_module()
        # Run once outside: kernels compile, libraries choose algorithms and allocate their workspaces.
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            work()
        module.current_stream().wait_stream(side)
        is_cuda = hasattr(module, "CUDAGraph")
        graph = module.CUDAGraph() if is_cuda else module.NPUGraph()
        # A learner in another thread may allocate and wait while this one captures.
        how: dict[str, Any] = {"capture_error_mode": "thread_local"}
        if not is_cuda:
            how["auto_dispatch_capture"] = has_updates
        with module.graph(graph, pool=pool, **how):
            self.result = work()
        self.pool = graph.pool()
        self.replay: Callable[[], None] = graph.replay
        self._graph = graph

    def update(self, argument: str, values: list[int]) -> None:
        """Give every operator that takes this argument new values. The last replay must have ended: its operators
        read theirs when they run."""
        self._graph.update(cpu_update_input=[{argument: values}])
