import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tidemill.errors import ReshardError
from tidemill.reshard.layouts import parallel
from tidemill.reshard.layouts.dtensor import from_tensors, local_tensors
from tidemill.reshard.layouts.layout import merge
from tidemill.reshard.layouts.parallel import decoder, engine, learner, parse


@pytest.fixture
def fake_rank():
    """Be any one rank of a group of eight, without the others."""

    def become(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        return init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


PLACED = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Replicate(), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),  # FSDP2 over tensor parallelism
]


@pytest.mark.parametrize("shape", [(16, 8), (10, 6), (3, 16)])
@pytest.mark.parametrize("placements", PLACED, ids=str)
def test_a_dtensor_lies_where_torch_says(fake_rank, placements, shape):
    if isinstance(placements[0], _StridedShard) and shape[0] % 8:
        pytest.skip("torch itself gives no single box for an uneven strided shard")
    for rank in (0, 3, 7):
        mesh = fake_rank(rank)
        size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        tensor = DTensor.from_local(
            torch.zeros(size), mesh, placements, shape=torch.Size(shape), stride=(shape[1], 1), run_check=False
        )
        layout = from_tensors({"w": tensor}, rank)
        mine = [p.box for p in layout.pieces("w") if p.rank == rank]
        wanted = tuple((o, o + n) for o, n in zip(offset, size))
        assert mine == ([wanted] if all(size) else [])
        assert layout.homes(rank)["w"] == (tuple(size), "float32")
        assert local_tensors({"w": tensor})["w"].shape == torch.Size(size)


def test_partial_sums_are_refused(fake_rank):
    mesh = fake_rank(0)
    tensor = DTensor.from_local(torch.zeros(4, 4), mesh, (Partial(), Replicate()), run_check=False)
    with pytest.raises(ReshardError, match="reduction"):
        from_tensors({"w": tensor}, 0)


def test_what_stages_tell_of_themselves_makes_one_layout(fake_rank):
    mesh = fake_rank(0)
    shared = distribute_tensor(torch.zeros(8, 4), mesh, (Shard(0), Replicate()), src_data_rank=None)
    first = from_tensors({"a": torch.zeros(3), "shared": shared}, 0)
    second = from_tensors({"b": torch.zeros(3), "shared": shared}, 1)
    layout = merge([first, second])
    assert set(layout.by_name) == {"a", "b", "shared"}
    assert len(layout.by_name["shared"]) == 1
    assert [p.rank for p in layout.pieces("b")] == [1]


def test_experts_that_are_modules_of_their_own_are_slices_of_one_tensor():
    mine = {f"m.experts.{i}.up_proj.weight": torch.zeros(6, 4) for i in (2, 3)}
    layout = from_tensors(mine, 0, experts=8)
    assert layout.by_name.keys() == {"m.experts.up_proj.weight"}
    assert [(p.box, p.home) for p in layout.pieces("m.experts.up_proj.weight")] == [
        (((2, 3), (0, 6), (0, 4)), "m.experts.2.up_proj.weight"),
        (((3, 4), (0, 6), (0, 4)), "m.experts.3.up_proj.weight"),
    ]


MODEL = decoder(
    "m", layers=2, hidden=16, heads=8, kv_heads=2, head_dim=4, ffn=24, vocabulary=100, bias=True, experts=4,
    expert_ffn=6, dense_layers=1,
)  # fmt: skip


def test_queries_keys_and_values_lie_behind_one_another_on_every_engine_rank():
    layout = engine(MODEL, parse("tp4"))
    at = "model.layers.0.self_attn"
    assert layout.homes(1)[f"{at}.qkv_proj.weight"] == ((8 + 4 + 4, 16), "bfloat16")
    spots = {n: [(p.at, p.box) for p in layout.pieces(f"{at}.{n}.weight") if p.rank == 3] for n in ("q_proj", "v_proj")}
    assert spots["q_proj"] == [((0, 0), ((24, 32), (0, 16)))]
    assert spots["v_proj"] == [((12, 0), ((4, 8), (0, 16)))]  # two key heads over four ranks: rank 3 has the second
    assert layout.homes(1)[f"{at}.qkv_proj.bias"] == ((16,), "bfloat16")


def test_gates_and_stacked_experts_lie_as_an_engine_wants_them():
    layout = engine(MODEL, parse("tp2"))
    assert layout.homes(0)["model.layers.0.mlp.gate_up_proj.weight"] == ((24, 16), "bfloat16")
    assert layout.homes(0)["model.layers.1.mlp.experts.w13_weight"] == ((4, 6, 16), "bfloat16")
    assert layout.homes(0)["model.layers.1.mlp.experts.w2_weight"] == ((4, 16, 3), "bfloat16")
    by_expert = engine(MODEL, parse("tp2,ep2"))
    assert by_expert.homes(1)["model.layers.1.mlp.experts.w13_weight"] == ((2, 12, 16), "bfloat16")
    up = [p for p in by_expert.pieces("model.layers.1.mlp.experts.up_proj.weight") if p.rank == 1]
    assert [(p.at, p.box) for p in up] == [((0, 6, 0), ((2, 4), (0, 6), (0, 16)))]


def test_a_padded_vocabulary_is_cut_where_the_engine_cuts_it():
    layout = engine(MODEL, parse("tp4"))  # 100 tokens padded to 128: 32 a rank
    assert [p.box[0] for p in layout.pieces("lm_head.weight")] == [(0, 32), (32, 64), (64, 96), (96, 100)]


def test_a_stage_holds_its_layers_and_a_tied_embedding_lies_at_both_ends():
    tied = decoder("t", layers=4, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=8, vocabulary=16, tied=True)
    layout = learner(tied, parse("pp2,tp2"))
    assert {p.rank for p in layout.pieces("model.layers.1.mlp.up_proj.weight")} == {0, 1}
    assert {p.rank for p in layout.pieces("model.layers.2.mlp.up_proj.weight")} == {2, 3}
    assert {p.rank for p in layout.pieces("model.embed_tokens.weight")} == {0, 1, 2, 3}


def test_sizes_that_cannot_be_cut_are_refused():
    with pytest.raises(ReshardError, match="heads 8 cannot be cut by tp3"):
        engine(MODEL, parse("tp3"))
    with pytest.raises(ReshardError, match="experts 4 cannot be cut by ep8"):
        learner(MODEL, parse("fsdp8,ep8"))


PUBLISHED = [("qwen2.5-0.5b", 0.494), ("qwen2.5-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("deepseek-v3-671b", 671.03)]


@pytest.mark.parametrize(("name", "billions"), PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name, billions):
    from tidemill.estimate.weight_flow import published

    assert parallel.count(published(name)) / 1e9 == pytest.approx(billions, rel=1e-3)
