import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reshard import ranks
from tests.reshard.ranks import DENSE
from tidemill.errors import ReshardError
from tidemill.reshard import parallel
from tidemill.reshard.delta import Base, decode, encode, move_delta, remember
from tidemill.reshard.move import BufferRing, GroupWire, Job, move
from tidemill.reshard.plan import plan
from tidemill.reshard.serve import Serving, joining, shared


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    st.integers(1, 3000),
    st.sampled_from([0.0, 0.005, 0.2, 1.0]),
    st.integers(0, 10**6),
)
def test_a_delta_makes_the_new_version_of_the_old_bit_for_bit(dtype, count, share, seed):
    torch.manual_seed(seed)
    old = torch.randn(count).to(dtype)
    new = torch.where(torch.rand(count) < share, torch.randn(count), old.float()).to(dtype)
    message = torch.cat(encode(old, new))
    made, end = decode(message, 0, old, "w")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(made.view(bits), new.view(bits))
    assert end == message.numel()
    assert message.numel() <= 64 + 8 + count * dtype.itemsize  # never longer than sending it all


def test_few_changes_make_a_short_message_and_signed_zeros_and_nans_are_kept():
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    new = old.clone()
    new[5], new[77_777] = -0.0, float("nan")
    message = torch.cat(encode(old, new))
    assert message.numel() < 100
    made, _ = decode(message, 0, old, "w")
    assert torch.equal(made.view(torch.int16), new.view(torch.int16))


def test_another_base_or_a_damaged_delta_is_refused():
    old, new = torch.zeros(1000), torch.ones(1000)
    message = torch.cat(encode(old, new))
    with pytest.raises(ReshardError, match="base is not the one"):
        decode(message, 0, old + 1, "w")
    message[200] ^= 1
    with pytest.raises(ReshardError, match="damaged"):
        decode(message, 0, old, "w")


SOURCE = parallel.learner(DENSE, parallel.parse("fsdp2"))
TARGET = parallel.engine(DENSE, parallel.parse("tp2"), first=2, dtype="bfloat16")


def follow(rank, size, say, port):
    """Version 1 whole, version 2 as a delta, then a delta from a base that one engine does not have."""
    ranks.join(rank, size, port)
    made = plan(SOURCE, TARGET, direct=True)
    full = ranks.whole(DENSE)
    sources = ranks.cut(SOURCE, rank, full)
    served, following = ranks.empty(TARGET, rank), ranks.empty(TARGET, rank)
    first = move(Job(made, rank, sources, served, 1, "all"), GroupWire(BufferRing(2, 1 << 16), timeout_s=30))
    sent = remember(1, sources)
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        full[name] = full[name] * 1.5
    sources = ranks.cut(SOURCE, rank, full)
    moved = move_delta(Job(made, rank, sources, following, 2), sent, Base(1, served), timeout_s=30)
    say((ranks.same(following, ranks.cut(TARGET, rank, full)), first.received_bytes, moved.received_bytes))
    try:
        wrong = Base(1 if rank == 3 else 2, following)
        move_delta(Job(made, rank, sources, served, 3), remember(2, sources), wrong, timeout_s=30)
        say("taken")
    except ReshardError as error:
        say(str(error))


def test_engines_follow_by_deltas_and_all_refuse_when_one_lacks_the_base():
    said = ranks.run(follow, 4, ranks.free_port())
    assert all(words[0][0] for words in said.values())
    for rank in (2, 3):
        _, whole, delta = said[rank][0]
        assert delta < whole / 4
    assert "from version 2 to 3; this rank serves 1" in said[3][1]
    assert all("another rank could not take" in said[r][1] for r in (0, 1, 2))


def join_late(rank, size, say, port):
    """Engines 1 and 2 serve what learner 0 published; engine 3 comes late and asks them, while the learner learns."""
    ranks.join(rank, size, port)
    full = ranks.whole(DENSE)
    source = parallel.learner(DENSE, parallel.parse("dp1"))
    serving = parallel.engine(DENSE, parallel.parse("dp2"), first=1)
    newcomer = parallel.engine(DENSE, parallel.parse("dp1"), first=3)
    wire = GroupWire(BufferRing(2, 1 << 14), timeout_s=30)
    engine = Serving(ranks.empty(serving, rank), 0, "device")
    engine.receive(Job(plan(source, serving), rank, ranks.cut(source, rank, full), {}, 7, "all"), wire)
    engine.flip()
    late = joining(serving, [1, 2], newcomer)
    mine = ranks.empty(newcomer, rank)
    moved = move(Job(late, rank, engine.tensors, mine, 7, "all"), wire)
    say((moved.sent_bytes, ranks.same(mine, ranks.cut(newcomer, rank, full))))


def test_a_late_engine_pulls_from_its_peers_and_not_from_the_learner():
    said = ranks.run(join_late, 4, ranks.free_port())
    sent = [words[0][0] for words in said.values()]
    assert sent[0] == sent[3] == 0
    assert min(sent[1:3]) > 0.8 * max(sent[1:3])
    assert all(words[0][1] for words in said.values())


def test_in_one_process_the_engine_reads_the_learners_own_tensors():
    layout = parallel.learner(DENSE, parallel.parse("dp1"))
    sources = ranks.cut(layout, 0, ranks.whole(DENSE))
    made = plan(layout, parallel.engine(DENSE, parallel.parse("dp1"), fused=False))
    assert all(t is sources[n] for n, t in shared(made, sources).items())
    with pytest.raises(ReshardError, match="layouts differ"):
        shared(plan(layout, parallel.engine(DENSE, parallel.parse("dp1"))), sources)
