import pytest
import torch

from tests.reshard import ranks
from tidemill.errors import ReshardError
from tidemill.reshard import parallel
from tidemill.reshard.layout import Layout, LayoutEntry, Replicate, Shard, mesh
from tidemill.reshard.move import BufferRing, GroupWire, Job, move
from tidemill.reshard.one import OneProcessWire
from tidemill.reshard.pack import BlockMerge
from tidemill.reshard.plan import Topology, plan
from tidemill.reshard.quantise import LARGEST, SCALE, dequantised, quantised

MODEL = parallel.decoder(
    "wide", layers=2, hidden=32, heads=8, kv_heads=4, head_dim=4, ffn=64, vocabulary=80, experts=4, expert_ffn=16,
    dense_layers=1, dtype="float32",
)  # fmt: skip
NAMES = [n for n in MODEL.shapes if n.endswith("_proj.weight")]
GROUP = 4


def plainly(weight, dtype, group):
    """Group by group, in loops."""
    values, scales = torch.zeros_like(weight), torch.zeros(*weight.shape[:-1], -(-weight.shape[-1] // group))
    for row in range(weight.shape[0]):
        for g in range(scales.shape[-1]):
            part = weight[row, g * group : (g + 1) * group]
            scales[row, g] = part.abs().max() / LARGEST[dtype]
            q = part / scales[row, g] if scales[row, g] > 0 else part
            values[row, g * group : (g + 1) * group] = q.round() if dtype == "int8" else q
    return values.to(getattr(torch, dtype)), scales


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("columns", [16, 18])
def test_values_and_scales_are_those_of_a_plain_loop(dtype, columns):
    weight = torch.randn(6, columns)
    weight[2, 4:8] = 0
    entry = LayoutEntry("w", (6, columns), "float32", mesh(x=1), (Replicate(),))
    source, target, changes = quantised(Layout((entry,)), Layout((entry,)), ["w"], dtype=dtype, group=GROUP)
    targets = ranks.empty(target, 0, fill=1.0)
    move(Job(plan(source, target), 0, {"w": weight}, targets, 1, "all", changes), OneProcessWire())
    values, scales = plainly(weight, dtype, GROUP)
    assert torch.equal(targets["w"].float(), values.float()) and torch.equal(targets["w" + SCALE], scales)
    error = (dequantised(targets["w"], targets["w" + SCALE], GROUP) - weight).abs()
    step = scales.repeat_interleave(GROUP, -1)[:, :columns]
    assert (error <= step * (0.5001 if dtype == "int8" else 16.01)).all()


def quantised_pairs(rank, size, say, port):
    """However the learner is cut, the engine's tensors are those that one rank would have made."""
    ranks.join(rank, size, port)
    full = ranks.whole(MODEL)
    wire = GroupWire(BufferRing(3, 1 << 13), timeout_s=60)
    version = 0
    for dtype in ("int8", "float8_e4m3fn"):
        for engine in ("tp2,dp2", "tp4"):
            found = []
            for learner in ("fsdp4", "tp2,fsdp2", "tp4", "pp2,tp2"):
                version += 1
                plain = (
                    parallel.learner(MODEL, parallel.parse(learner)),
                    parallel.engine(MODEL, parallel.parse(engine), dtype="float32"),
                )
                source, target, changes = quantised(*plain, NAMES, dtype=dtype, group=GROUP)
                made = plan(source, target, Topology(2))
                targets = ranks.empty(target, rank, fill=0.0)
                move(Job(made, rank, ranks.cut(plain[0], rank, full), targets, version, "all", changes), wire)
                found.append({n: t.float() for n, t in targets.items()})
            say((dtype, engine, all(ranks.same(found[0], other) for other in found[1:])))


def test_the_cut_of_the_learner_does_not_show():
    for words in ranks.run(quantised_pairs, 4, ranks.free_port()).values():
        assert len(words) == 4 and all(same for _, _, same in words), words


def test_eight_bits_and_their_scales_travel():
    held = LayoutEntry("w", (64, 256), "bfloat16", mesh(fsdp=2), (Shard(0),))
    wanted = LayoutEntry("w", (64, 256), "bfloat16", mesh(dp=2), (Replicate(),))
    source, target, _ = quantised(Layout((held,)), Layout((wanted,)), ["w"], group=128)
    assert plan(Layout((held,)), Layout((wanted,))).bytes == 2 * 64 * 256
    assert plan(source, target).bytes == 64 * 256 + 4 * 64 * 2


def test_a_cut_through_a_group_is_refused():
    entry = LayoutEntry("w", (4, 24), "float32", mesh(tp=2), (Shard(1),))
    with pytest.raises(ReshardError, match="24 columns in 2 parts hold no whole groups of 8"):
        quantised(Layout((entry,)), Layout((entry,)), ["w"], group=8)


def test_an_adapter_is_merged_with_the_magnitudes_of_its_rows():
    weight, down, up, rows = torch.randn(6, 8), torch.randn(2, 8), torch.randn(6, 2), torch.rand(6)
    entry = LayoutEntry("w", (6, 8), "float32", mesh(x=1), (Replicate(),))
    targets = {"w": torch.zeros(6, 8)}
    job = Job(
        plan(Layout((entry,)), Layout((entry,))),
        0,
        {"w": weight},
        targets,
        1,
        "all",
        {"w": BlockMerge(down, up, 0.5, rows)},
    )
    move(job, OneProcessWire(64))
    assert torch.allclose(targets["w"], (weight + 0.5 * up @ down) * rows[:, None], atol=1e-6)
