"""The stand-in refuses what a 910B refuses, counts what costs, and replays what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

REFUSED: dict[str, Callable[[torch.device], Any]] = {
    "float64 made there": lambda d: torch.zeros(3, dtype=torch.float64, device=d),
    "float64 brought there": lambda d: torch.zeros(3, dtype=torch.float64).to(d),
    "float64 as a result": lambda d: torch.ones(3, device=d).double(),
    "a dtype of later chips": lambda d: torch.zeros(4, device=d).to(torch.float8_e4m3fn),
    "an operator left to the host": lambda d: torch.nextafter(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "a sparse layout": lambda d: torch.eye(3, device=d).to_sparse_csr(),
    "two devices in one product": lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_910b_refuses_is_refused(what: str, npu: torch.device, stand_in: Any) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        REFUSED[what](npu)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "a number read": lambda x: x.sum().item(),
    "a list": lambda x: x.tolist(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy from memory that is not pinned": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "places that are not 0": lambda x: x.nonzero(),
    "a mask as an index": lambda x: x[x > 0],
    "an event": lambda x: _recorded(x).synchronize(),
}


def _recorded(x: Tensor) -> torch.Event:
    event = torch.Event(device=x.device)
    event.record()
    return event


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_of_the_host_is_counted_and_refused_inside_a_captured_graph(
    what: str, npu: torch.device, stand_in: Any, counts: Any
) -> None:
    x = torch.ones(4, device=npu)
    counts.reset()
    WAITS[what](x)
    assert counts.syncs == 1
    with pytest.raises(RuntimeError, match="inside a captured graph"), torch.npu.graph(torch.npu.NPUGraph()):
        WAITS[what](x)


def test_pinned_memory_goes_over_without_waiting_and_comes_back_when_waited_for(
    npu: torch.device, stand_in: Any, counts: Any
) -> None:
    there = torch.arange(4.0).pin_memory().to(npu, non_blocking=True)
    back = torch.zeros(4, pin_memory=True)
    back.copy_(there, non_blocking=True)
    assert counts.syncs == 0 and back.tolist() == [0.0] * 4
    _recorded(there).synchronize()
    assert counts.syncs == 1 and back.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (counts.to_device, counts.to_host) == (16, 16)


def test_a_captured_graph_computes_again_from_what_its_inputs_hold(npu: torch.device) -> None:
    x, seen = torch.ones(3, device=npu), torch.zeros(3, device=npu)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x * 2).exp()
        seen.add_(x)
    x.fill_(0.5)
    seen.zero_()
    graph.replay()
    graph.replay()
    torch.testing.assert_close(y.cpu(), torch.full((3,), 1.0).exp())
    torch.testing.assert_close(seen.cpu(), torch.ones(3))


def test_a_part_of_a_tensor_in_a_private_format_is_refused(npu: torch.device, stand_in: Any) -> None:
    weight = torch.randn(32, 16, device=npu)
    stand_in.set_format(weight, 29)
    x = torch.randn(4, 16, device=npu)
    torch.nn.functional.linear(x, weight)
    with pytest.raises(RuntimeError, match="private format"):
        torch.nn.functional.linear(x, weight[:16])


@pytest.fixture
def world(npu: torch.device, tmp_path: Any) -> Any:
    dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


COLLECTIVES: dict[str, Callable[[torch.device], Any]] = {
    "unsigned numbers": lambda d: dist.all_reduce(torch.ones(4, dtype=torch.uint8, device=d)),
    "truth values": lambda d: dist.all_reduce(torch.ones(4, dtype=torch.bool, device=d)),
    "what is not contiguous": lambda d: dist.all_reduce(torch.ones(3, 4, device=d).t()),
}


@pytest.mark.parametrize("what", COLLECTIVES)
def test_hccl_reduces_no(what: str, npu: torch.device, stand_in: Any, world: Any) -> None:
    with pytest.raises(RuntimeError, match="HCCL"):
        COLLECTIVES[what](npu)


def test_hccl_reduces_numbers_and_passes_on_bytes(npu: torch.device, world: Any, counts: Any) -> None:
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16):
        x = torch.ones(4, dtype=dtype, device=npu)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 4
    dist.broadcast(torch.ones(4, dtype=torch.uint8, device=npu), 0)
    if not counts.is_real:
        assert counts.sent == 4 * (4 + 8 + 2 + 4 + 2 + 1)
