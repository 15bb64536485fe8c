"""A step's time in every detail: a Chrome trace (chrome://tracing, ui.perfetto.dev) with our stages' names in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

FOLDER = "profile"


@contextmanager
def profiled(run: Path, steps: Collection[int], step: int) -> Iterator[None]:
    """Around a step; does nothing for steps that are not asked for."""
    if step not in steps:
        yield
        return
    from torch.profiler import profile, supported_activities

    with profile(activities=list(supported_activities())) as trace:  # type: ignore[no-untyped-call]
        yield
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(run / FOLDER / f"step-{step:06d}.json"))


def span(name: str) -> AbstractContextManager[Any]:
    """A stage's name in the trace, where one is being made; nothing otherwise."""
    import torch  # here: who only asks for `profiled` can do without

    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"stage {name}")
