import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.errors import ReshardError
from tidemill.reshard.layouts import parallel
from tidemill.reshard.layouts.layout import ITEM_BYTES, Layout, LayoutEntry, Mesh, Replicate, Shard, mesh
from tidemill.reshard.plan import Topology, plan

SHAPES = [(7,), (12, 5), (16, 8), (3, 1, 4), (1, 1), (9, 6)]
MODEL = parallel.decoder(
    "small", layers=3, hidden=16, heads=8, kv_heads=2, head_dim=4, ffn=24, vocabulary=100, tied=True, experts=8,
    expert_ffn=12, dense_layers=1, dtype="float32",
)  # fmt: skip


@st.composite
def layouts(draw, shapes, most_ranks=6):
    """Random meshes over random subsets of ranks, random cuts in random order."""
    entries = []
    for i, shape in enumerate(shapes):
        size = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 4)]))
        count = math.prod(size)
        ranks = draw(st.permutations(range(max(most_ranks, count))))[:count]
        places = tuple(
            draw(st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, len(shape) - 1)))) for _ in size
        )
        order = tuple(draw(st.permutations(range(len(size)))))
        axes = tuple("ab"[: len(size)])
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        entries.append(LayoutEntry(f"t{i}", shape, dtype, Mesh(axes, size, tuple(ranks)), places, order=order))
    return Layout(tuple(entries))


@st.composite
def pairs(draw):
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    return draw(layouts(shapes)), draw(layouts(shapes))


def holdings(layout):
    """Element ids held by each (rank, name), worked out one element at a time."""
    found = {}
    for name, entries in layout.by_name.items():
        ids = np.arange(math.prod(entries[0].shape)).reshape(entries[0].shape)
        for piece in layout.pieces(name):
            found.setdefault((piece.rank, name), []).append(ids[tuple(slice(*b) for b in piece.box)].ravel())
    return {key: np.unique(np.concatenate(parts)) for key, parts in found.items()}


def fewest_bytes(source, target):
    held, wanted = holdings(source), holdings(target)
    none = np.array([], dtype=int)
    return sum(
        len(np.setdiff1d(ids, held.get(key, none)))
        * min(ITEM_BYTES[layout.by_name[key[1]][0].dtype] for layout in (source, target))
        for key, ids in wanted.items()
    )


def simulate(made, source, target):
    """Run a plan on integers: each element's value is its id. Counts how often each target element is written."""
    full = {
        n: np.arange(math.prod(e[0].shape)).reshape(e[0].shape) + 1000 * i
        for i, (n, e) in enumerate(source.by_name.items())
    }
    local = {(r, h): np.full(s, -1) for r in source.ranks for h, (s, _) in source.homes(r).items()}
    result = {(r, h): np.full(s, -1) for r in target.ranks for h, (s, _) in target.homes(r).items()}
    writes = {key: np.zeros(value.shape, int) for key, value in result.items()}
    for name in source.by_name:
        for p in source.pieces(name):
            _view(local[p.rank, p.home], p.at, p.box)[...] = _shaped(full[name], p.box, local[p.rank, p.home].ndim)
    for t in sorted([*made.copies, *made.transfers], key=lambda t: t.hop):
        origin = result if t.hop else local
        values = _view(origin[t.sender, t.source.home], t.source.at, t.box)
        assert (values >= 0).all(), "sent what it does not hold"
        for spot in t.targets:
            place = result[t.receiver, spot.home]
            _view(place, spot.at, t.box)[...] = values.reshape(_view(place, spot.at, t.box).shape)
            _view(writes[t.receiver, spot.home], spot.at, t.box)[...] += 1
    return full, result, writes


def _view(array, at, box):
    sizes = [high - low for low, high in box]
    lead = len(sizes) - array.ndim
    sizes = sizes[lead:] if lead > 0 else [1] * -lead + sizes
    return array[tuple(slice(a, a + n) for a, n in zip(at, sizes))]


def _shaped(full, box, ndim):
    block = full[tuple(slice(*b) for b in box)]
    return block.reshape(block.shape[-ndim:] if block.ndim > ndim else (1,) * (ndim - block.ndim) + block.shape)


def check(source, target, topology):
    made = plan(source, target, topology)
    full, result, writes = simulate(made, source, target)
    for name in target.by_name:
        for p in target.pieces(name):
            found = _view(result[p.rank, p.home], p.at, p.box)
            assert (found == _shaped(full[name], p.box, found.ndim)).all()
            assert (_view(writes[p.rank, p.home], p.at, p.box) == 1).all()
    assert fewest_bytes(source, target) == made.lower_bound_bytes
    assert made.bytes <= 1.05 * made.lower_bound_bytes


@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([0, 1, 2, 4]))
def test_every_target_element_is_written_once_from_a_right_source_with_the_fewest_bytes(pair, per_node):
    check(*pair, Topology(per_node))


LEARNERS = ["fsdp2", "fsdp8", "tp2,fsdp2", "tp4", "pp2,tp2", "ep2,fsdp2", "ep4,fsdp4", "pp3,dp2,ep2"]
ENGINES = ["dp4", "tp2,dp2", "tp4", "tp8", "ep2,tp2", "ep4,tp2,dp2"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rollout", ENGINES)
@pytest.mark.parametrize("learner", LEARNERS)
def test_parallel_forms_of_a_mixture_with_tied_embeddings_are_planned_exactly(learner, rollout, fused):
    source = parallel.learner(MODEL, parallel.parse(learner))
    target = parallel.engine(MODEL, parallel.parse(rollout), dtype="bfloat16", fused=fused)
    check(source, target, Topology(4))


def test_a_plan_is_the_same_wherever_it_is_made():
    def made():
        source = parallel.learner(MODEL, parallel.parse("fsdp4"))
        return plan(source, parallel.engine(MODEL, parallel.parse("tp2,dp2"), first=4), Topology(4))

    assert made().transfers == made().transfers


def test_sends_are_spread_over_all_ranks_that_hold_the_bytes():
    source = parallel.learner(MODEL, parallel.parse("dp4"))  # four whole copies
    made = plan(source, parallel.engine(MODEL, parallel.parse("dp4"), first=4), Topology())
    sent = list(made.egress.values())
    assert len(sent) == 4
    assert max(sent) <= 1.1 * min(sent)


def test_the_nearest_holder_sends():
    source = Layout((LayoutEntry("w", (8, 8), "float32", mesh(dp=4), (Replicate(),)),))
    target = Layout((LayoutEntry("w", (8, 8), "float32", mesh([4, 5], dp=2), (Replicate(),)),))
    made = plan(source, target, Topology(per_node=2, devices=(0, 1, 2, 3, 2, 1)))
    assert {(t.sender, t.receiver) for t in made.transfers} == {(2, 4), (1, 5)}  # those on the same devices
    assert made.by_distance["same device"] == made.bytes == 2 * 8 * 8 * 4


def test_what_a_node_lacks_crosses_the_slow_link_once():
    shape = (1024, 256)
    source = Layout((LayoutEntry("w", shape, "float32", mesh(fsdp=4), (Shard(0),)),))
    target = Layout((LayoutEntry("w", shape, "float32", mesh(4, dp=4), (Replicate(),)),))
    made = plan(source, target, Topology(per_node=4))
    size = 4 * math.prod(shape)
    assert made.by_distance["other node"] == size
    assert made.by_distance["same node"] == 3 * size
    assert made.busiest_bytes <= 1.01 * made.lower_bound_busiest_bytes


def test_one_source_does_not_send_the_same_bytes_to_everyone_itself():
    shape = (1024, 256)
    source = Layout((LayoutEntry("w", shape, "float32", mesh(one=1), (Replicate(),)),))
    target = Layout((LayoutEntry("w", shape, "float32", mesh(1, dp=4), (Replicate(),)),))
    made = plan(source, target)
    assert made.egress[0] == 4 * math.prod(shape)
    assert plan(source, target, direct=True).egress[0] == 4 * 4 * math.prod(shape)


def test_the_same_layout_twice_moves_nothing():
    layout = parallel.engine(MODEL, parallel.parse("tp2,dp2"))
    made = plan(layout, layout)
    assert made.bytes == 0
    assert made.is_identity


def test_a_fused_target_is_not_the_source_itself():
    one = parallel.parse("dp1")
    assert not plan(parallel.learner(MODEL, one), parallel.engine(MODEL, one)).is_identity
    assert plan(parallel.learner(MODEL, one), parallel.engine(MODEL, one, fused=False)).is_identity


def test_a_tensor_that_nobody_holds_is_named():
    source = Layout((LayoutEntry("model.norm.weight", (4,), "float32", mesh(dp=1), (Replicate(),)),))
    target = Layout((LayoutEntry("model.norms.weight", (4,), "float32", mesh(dp=1), (Replicate(),)),))
    with pytest.raises(ReshardError, match=r"model\.norms\.weight.*did you mean model\.norm\.weight"):
        plan(source, target)


def test_bytes_that_went_with_a_dead_rank_are_missed():
    layout = Layout((LayoutEntry("w", (8,), "float32", mesh(fsdp=2), (Shard(0),)),))
    target = Layout((LayoutEntry("w", (8,), "float32", mesh(2, dp=1), (Replicate(),)),))
    with pytest.raises(ReshardError, match="no source rank holds all of w"):
        plan(layout.without([1]), target)


@pytest.mark.parametrize("word", ["tp", "pt4", "tp0", "tp2,tp4", "ep3,tp2"])
def test_a_layout_word_that_means_nothing_is_refused(word):
    with pytest.raises(ReshardError):
        parallel.parse(word)
