"""A learner as torch cuts it: FSDP2 over tensor parallelism, moved to an engine of plain fused tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.reshard import ranks
from tidemill.reshard.layouts import parallel
from tidemill.reshard.layouts.dtensor import from_tensors, local_tensors
from tidemill.reshard.layouts.layout import merge
from tidemill.reshard.move import BufferRing, GroupWire, Job, move
from tidemill.reshard.plan import plan

MODEL = parallel.decoder(
    "m", layers=1, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocabulary=64, tied=True, dtype="float32"
)


class Feed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(24, 16, bias=False)
        self.names = {n: f"model.layers.{layer}.mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}


def learn_and_publish(rank, size, say, port):
    ranks.join(rank, size, port)
    full = {n: t for n, t in ranks.whole(MODEL).items() if ".mlp." in n}
    feed = Feed(0)
    with torch.no_grad():
        for short, name in feed.names.items():
            getattr(feed, short).weight.copy_(full[name])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    ways = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(feed, grid["tp"], ways)
    fully_shard(feed, mesh=grid["fsdp"])
    tensors = {name: getattr(feed, short).weight for short, name in feed.names.items()}
    told = [None] * size
    dist.all_gather_object(told, from_tensors(tensors, rank))
    source = merge(told)
    wanted = parallel.engine(MODEL, parallel.parse("tp2,dp2"), dtype="bfloat16")
    target = type(wanted)(tuple(e for e in wanted.entries if ".mlp." in e.name))
    targets = ranks.empty(target, rank)
    made = plan(source, target)
    move(Job(made, rank, local_tensors(tensors), targets, 1, "all"), GroupWire(BufferRing(2, 1 << 14), timeout_s=30))
    places = [str(p) for p in tensors["model.layers.0.mlp.up_proj.weight"].placements]
    say((ranks.same(targets, ranks.cut(target, rank, full)), places, sorted(targets)))


@pytest.mark.slow
def test_what_fsdp2_over_tensor_parallelism_holds_reaches_an_engine_bit_for_bit():
    said = ranks.run(learn_and_publish, 4, ranks.free_port())
    for words in said.values():
        exact, places, homes = words[0]
        assert exact
        assert "Strided" in places[0] or "_S" in places[0], places  # FSDP cut what tensor parallelism left
        assert homes == ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"]
