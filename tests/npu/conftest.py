"""Tests for NPUs: on the machine's own where torch_npu is installed, else on a stand-in. `make test-npu` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

HAS_NPU = hasattr(torch, "npu") and torch.npu.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/npu/" in str(item.path) and not HAS_NPU:
            item.add_marker(pytest.mark.skip(reason="no device npu: `make test-npu` brings a stand-in"))


@pytest.fixture
def npu() -> torch.device:
    return torch.device("npu:0")


class Counter:
    """What was asked of the device since the last `reset`. On a real one nothing is counted."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def reset(self) -> None:
        if self.native is not None:
            self.native.reset()

    @property
    def is_real(self) -> bool:
        return self.native is None

    def __getattr__(self, name: str) -> Any:
        if self.native is None:
            pytest.skip("a real device counts nothing")
        return self.native.counts()[name]


@pytest.fixture
def counts() -> Iterator[Counter]:
    """Fails a test in which the device refused something that was not asked for on purpose."""
    try:
        import _fake_npu as native
    except ImportError:
        native = None
    counter = Counter(native)
    counter.reset()
    yield counter
    if native is not None:
        native.listen(None)


@pytest.fixture
def stand_in(counts: Counter) -> Any:
    if counts.is_real:
        pytest.skip("of the stand-in alone")
    return counts.native
