import pytest
import torch

from tests.reshard import ranks
from tests.reshard.ranks import DENSE, MIXTURE
from tidemill.reshard import pack
from tidemill.reshard.layouts import parallel
from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Replicate, Shard, mesh
from tidemill.reshard.move import BufferRing, GroupWire, Job, move
from tidemill.reshard.pack import BlockMerge
from tidemill.reshard.plan import Topology, plan
from tidemill.reshard.schedule import rounds
from tidemill.reshard.wires.one_node import SharedWire

LEARNERS = ["fsdp2", "fsdp4", "fsdp8", "tp2,fsdp2", "tp4", "pp2,tp2"]
EXPERT_LEARNERS = ["ep2,fsdp2", "ep4,fsdp4"]
ENGINES = ["dp4", "tp2,dp2", "tp4", "tp8"]
EXPERT_ENGINES = ["ep2,tp2"]
GRID = [(DENSE, a, b) for a in LEARNERS for b in ENGINES]
GRID += [(MIXTURE, a, b) for a in LEARNERS + EXPERT_LEARNERS for b in ENGINES + EXPERT_ENGINES]


def all_pairs(rank, size, say, port):
    """Every pair of the grid, over the group (as if nodes had two ranks: bytes are passed on) and over memory."""
    ranks.join(rank, size, port)
    group_wire = GroupWire(BufferRing(3, 1 << 15), timeout_s=60)
    shared_wire = SharedWire(f"test-{port}", rank, size, bucket_bytes=1 << 14, timeout_s=60)
    full = {id(m): ranks.whole(m) for m in (DENSE, MIXTURE)}
    for version, (model, learner, engine) in enumerate(GRID, 1):
        source = parallel.learner(model, parallel.parse(learner))
        # Engines on the learner's ranks and, for every other pair, on ranks of their own where there are enough.
        apart = version % 2 == 0 and parallel.parse(learner).size + parallel.parse(engine).size <= size
        first = parallel.parse(learner).size if apart else 0
        dtype = "bfloat16" if version % 3 == 0 else "float32"
        target = parallel.engine(model, parallel.parse(engine), first=first, dtype=dtype)
        sources, wanted = (ranks.cut(layout, rank, full[id(model)]) for layout in (source, target))
        for name, wire in (("group", group_wire), ("shared", shared_wire)):
            made = plan(source, target, Topology(2 if name == "group" else 0), direct=name == "shared")
            targets = ranks.empty(target, rank)
            moved = move(Job(made, rank, sources, targets, version, "all" if version % 2 else "off"), wire)
            say((model.name, learner, engine, name, ranks.same(targets, wanted), moved.received_bytes, made.bytes))


@pytest.mark.slow
def test_every_pair_of_the_grid_arrives_bit_for_bit():
    said = ranks.run(all_pairs, 8, ranks.free_port())
    assert all(len(words) == 2 * len(GRID) for words in said.values())
    wrong = [(rank, word) for rank, words in said.items() for word in words if not word[4]]
    assert not wrong
    for words in zip(*said.values()):  # what came on all ranks together is the plan's bytes, but for sums and alignment
        assert sum(w[5] for w in words) >= words[0][6]


def some_pairs(rank, size, say, port):
    ranks.join(rank, size, port)
    full = ranks.whole(DENSE)
    source, target = (make(DENSE, parallel.parse("tp2")) for make in (parallel.learner, parallel.engine))
    target = parallel.engine(DENSE, parallel.parse("dp2"), dtype="float32")
    made = plan(source, target)
    sources, wanted = ranks.cut(source, rank, full), ranks.cut(target, rank, full)
    for bucket in (1 << 11, 1 << 20):
        ring = BufferRing(2, bucket)
        targets = ranks.empty(target, rank)
        moved = move(Job(made, rank, sources, targets, 1, "off"), GroupWire(ring, timeout_s=30))
        say((bucket, ranks.same(targets, wanted), moved.rounds, moved.received_bytes, made.ingress[rank]))


def test_a_small_ring_takes_more_rounds_and_gives_the_same():
    said = ranks.run(some_pairs, 2, ranks.free_port())
    for words in said.values():
        (_, small_ok, small_rounds, small_bytes, ingress), (_, large_ok, large_rounds, large_bytes, _) = words
        assert small_ok and large_ok
        assert small_rounds > 10 * large_rounds
        assert max(small_bytes, large_bytes) <= 1.05 * ingress


@pytest.mark.parametrize("half", [512, 4096])
def test_no_round_holds_more_than_half_a_buffer_and_nothing_is_passed_on_before_it_came(half):
    source = parallel.learner(MIXTURE, parallel.parse("fsdp4"))
    target = parallel.engine(MIXTURE, parallel.parse("dp4"), first=4)
    made = plan(source, target, Topology(4))
    assert any(t.hop for t in made.transfers)
    depth, carried = 3, 0
    for rank in made.ranks:
        came = {}
        for at, step in enumerate(rounds(made, rank, half_bytes=half, depth=depth, check_every=1, version=0)):
            assert sum(m.nbytes for m in step.out.values()) <= half
            assert sum(m.nbytes for m in step.into.values()) <= half
            for message in step.out.values():
                for slot in message.slots:
                    if slot.transfer.hop:
                        assert at >= came[slot.transfer.name, slot.transfer.box] + depth
            for message in step.into.values():
                for slot in message.slots:
                    came.setdefault((slot.transfer.name, slot.transfer.box), at)
                    carried += slot.transfer.nbytes
    assert carried == made.bytes


def test_blocks_are_cut_small_and_lose_nothing():
    source = Layout((LayoutEntry("w", (3, 50, 7), "float32", mesh(fsdp=2), (Shard(1),)),))
    target = Layout((LayoutEntry("w", (3, 50, 7), "float32", mesh(2, dp=1), (Replicate(),)),))
    for transfer in plan(source, target).transfers:
        blocks = list(pack.pieces_of(transfer, 64))
        assert all(b.nbytes <= 64 for b in blocks)
        assert sum(b.nbytes for b in blocks) == transfer.nbytes
        assert len({b.box for b in blocks}) == len(blocks)


def test_a_checksum_sees_a_flipped_bit_and_misplaced_words():
    torch.manual_seed(0)
    block = torch.randn(5000)
    right = pack.checksum(block)
    assert torch.equal(pack.checksum(block.clone()), right)
    for at in (0, 1, 4095, 4999):
        for bit in (0, 7):
            flipped = block.clone()
            flipped.view(torch.uint8)[4 * at + 3] ^= 1 << bit
            assert not torch.equal(pack.checksum(flipped), right)
    for i, j in ((0, 2), (0, 2048), (4998, 6)):
        swapped = block.clone()
        swapped[i], swapped[j] = block[j], block[i]
        assert not torch.equal(pack.checksum(swapped), right)


class Nobody:
    """The wire of one rank alone."""

    def carry(self, job, moved):
        from tidemill.reshard.move import copy_local, own_copies

        for transfer in own_copies(job):
            copy_local(transfer, job, moved, 256)

    def agree(self, ok, version):
        return ok

    def close(self):
        pass


def test_a_low_rank_addition_is_merged_on_the_way():
    shape = (12, 8)
    source = Layout((LayoutEntry("w", shape, "float32", mesh(dp=1), (Replicate(),)),))
    torch.manual_seed(0)
    weight, up, down = torch.randn(shape), torch.randn(12, 2), torch.randn(2, 8)
    targets = {"w": torch.empty(shape, dtype=torch.bfloat16)}
    job = Job(
        plan(source, source.astype("bfloat16")), 0, {"w": weight}, targets, 1, changes={"w": BlockMerge(down, up, 0.5)}
    )
    move(job, Nobody())
    assert torch.allclose(targets["w"].float(), (weight + 0.5 * up @ down).bfloat16().float(), rtol=1e-2)
    assert not torch.allclose(targets["w"].float(), weight, rtol=1e-2)


def test_one_process_with_one_layout_copies_no_byte():
    layout = parallel.learner(DENSE, parallel.parse("dp1"))
    made = plan(layout, layout)
    tensors = ranks.cut(layout, 0, ranks.whole(DENSE))
    moved = move(Job(made, 0, tensors, tensors, 1), Nobody())
    assert (moved.sent_bytes, moved.received_bytes, moved.copied_bytes) == (0, 0, 0)
