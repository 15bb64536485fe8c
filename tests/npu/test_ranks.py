"""Two NPUs: a learner over both computes one device's numbers, and weights cut over both arrive whole on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.npu.test_learning import run, same
from tests.reshard import ranks as on_ranks
from tests.reshard.ranks import DENSE
from tidemill.cluster.start.ranks import Ranks
from tidemill.reshard.layouts import parallel
from tidemill.reshard.move import BufferRing, GroupWire, Job, move
from tidemill.reshard.plan import plan

TWO = {"sharded": ("learn.parallel.fsdp=2",), "tensor-parallel": ("learn.parallel.tp=2",)}


@pytest.fixture(autouse=True)
def _two(npu: torch.device) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("two devices are needed")


@pytest.mark.parametrize("how", TWO)
def test_a_learner_over_two_computes_the_numbers_of_one(how: str, tmp_path: Path) -> None:
    wanted = run(tmp_path / "one", "cpu")
    same(run(tmp_path / "two", "npu", TWO[how]), wanted)


def reshard() -> bool:
    rank = dist.get_rank()
    device = torch.device("npu", rank)
    torch.accelerator.set_device_index(rank)
    source = parallel.learner(DENSE, parallel.parse("tp2"))
    target = parallel.engine(DENSE, parallel.parse("tp1"), first=1, dtype="float32")
    full = on_ranks.whole(DENSE)

    def there(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t.to(device) for name, t in tensors.items()}

    targets = there(on_ranks.empty(target, rank))
    job = Job(plan(source, target), rank, there(on_ranks.cut(source, rank, full)), targets, 1, "all")
    move(job, GroupWire(BufferRing(2, 1 << 14, device), timeout_s=60))
    found = {name: t.cpu() for name, t in targets.items()}
    return on_ranks.same(found, on_ranks.cut(target, rank, full))


def test_weights_cut_over_two_arrive_whole_on_one() -> None:
    with Ranks(2, kind="npu", timeout_s=60.0, preload=["tests.npu.test_ranks"]) as made:
        assert made.call(reshard) == [True, True]


def gradient_norm() -> Any:
    import numpy as np

    from tests.learn.grouped import grouped
    from tests.npu.test_learning import a_learner
    from tidemill.learn.parallel import mesh
    from tidemill.recipe.config import ParallelSettings

    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank)
    learner = a_learner("qwen2", torch.device("npu", rank))
    learner.join(mesh.build(ParallelSettings(replicate=2), "npu"))
    learner.accumulate_own(grouped(np.random.default_rng(rank), 2, 2))
    return learner.update()["grad_norm"]


def test_copies_of_a_learner_agree_on_what_was_added_up() -> None:
    with Ranks(2, kind="npu", timeout_s=60.0, preload=["tests.npu.test_ranks"]) as made:
        one, other = made.call(gradient_norm)
    assert one == other > 0
