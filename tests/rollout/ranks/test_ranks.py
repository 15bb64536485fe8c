"""An engine over ranks makes what one rank makes, whatever its sizes; experts go where their load says."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks import engines
from benchmarks.engines import Case, Skewed
from tests.rollout.tiny import tiny_model

from tidemill.errors import ModelError
from tidemill.models.buffers import carried
from tidemill.reshard.layouts.layout import volume
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.ranks import share
from tidemill.rollout.native.ranks.balance import balanced, busiest, part_loads
from tidemill.rollout.native.ranks.grid import Grid
from tidemill.rollout.native.ranks.links import Links
from tidemill.rollout.native.ranks.replicas import Replicas

SAMPLE = [
    Case("dense", Grid(tp=4)),  # more ranks than key/value heads
    Case("dense", Grid(tp=2, pp=2)),
    Case("qwen3_moe", Grid(tp=2, dp=2, ep=4)),
    Case("qwen3_moe", Grid(tp=4, ep=2)),  # experts cut by number and by width
    Case("deepseek_v3", Grid(dp=2, pp=2, ep=2)),
    Case("deepseek_v3", Grid(tp=2, dp=2, ep=2)),
    Case("gpt_oss", Grid(tp=4, ep=1)),
    Case("gpt_oss", Grid(dp=4)),
]


def test_products_of_sizes_make_the_tokens_routes_and_kept_mass_of_one_rank() -> None:
    found = engines.compare([replace(case, layers=2) for case in SAMPLE], seconds=120)
    assert found.products == len(SAMPLE) and not found.unequal
    assert found.tokens > 100 * len(SAMPLE)
    assert found.largest_gap < 1e-5


HOST_BYTES = 1 << 22


def _crowded(rank: int, case: Case, groups: dict[tuple[int, ...], Any]) -> tuple[engines.Samples, list[list[int]]]:
    """What ranks make in a cache too small for it, and of each what went to the host and what was read again."""
    model = engines.make_model(case.family, case.layers)
    share.cut(model, case.grid, rank)
    links = Links(case.grid, dist.group.WORLD, made=groups)
    options = {"max_seqs": 8, "max_len": 96, "page_size": 4, "cache_tokens": 80, "step_tokens": 40}
    inner = NativeEngine(model, eos_ids=[2], links=links, host_bytes=HOST_BYTES >> rank, **options)
    made = engines.samples(Replicas(inner, links), engines.requests())
    host = inner.scheduler.host
    counts = [host.pages_out, host.pages_in, inner.scheduler.recomputed, host.rows, host.used]
    told: list[list[int]] = [[] for _ in range(case.grid.ranks)]
    dist.all_gather_object(told, counts)
    return made, told


@pytest.mark.parametrize("grid", [Grid(tp=2), Grid(pp=2)], ids=str)
@pytest.mark.parametrize("family", ["dense", "deepseek_v3"])
def test_ranks_page_their_parts_of_the_cache_to_the_host_alike(family: str, grid: Grid) -> None:
    case = Case(family, grid, layers=2)
    alone = NativeEngine(engines.make_model(family, 2), eos_ids=[2], max_seqs=8, max_len=96, step_tokens=40)
    wanted = engines.samples(alone, engines.requests())
    made, told = next(engines.over_ranks(2, _crowded, [case], 60))
    assert told[0] == told[1]  # as many rows too, though one was given half the bytes
    pages_out, pages_in, recomputed, _, used = told[0]
    assert pages_out >= pages_in > 0 and recomputed == used == 0
    assert {key: tokens for key, (tokens, *_) in made.items()} == {key: tokens for key, (tokens, *_) in wanted.items()}
    gaps = [abs(a - b) for key in wanted for a, b in zip(made[key][1], wanted[key][1])]
    assert max(gaps) < 1e-5


def _shares(rank: int, case: Case, groups: dict[tuple[int, ...], Any]) -> list[str]:
    """What is wrong with a rank's share; the whole model comes back from all of them."""
    model = engines.make_model(case.family, case.layers)
    whole = {name: tensor.detach().clone() for name, tensor in carried(model).items()}
    own = share.cut(model, case.grid, rank, spare=1)
    wrong = []
    held = {n: shape for n, (shape, _) in own.layout().homes(rank).items()}
    if {n: tuple(t.shape) for n, t in carried(model).items()} != held:
        wrong.append("tensors that the layout does not list, or of another shape")
    for piece in (p for name in whole for p in own.layout().pieces(name) if p.rank == rank):
        tensor = carried(model)[piece.home]
        if tensor.untyped_storage().nbytes() > 4 * tensor.numel() and tensor.numel() < volume(piece.box):
            wrong.append(f"{piece.home} holds more memory than its share")
    found = share.gathered(model, dist.group.WORLD)
    if found.keys() != (whole.keys() if rank == 0 else set()):
        wrong.append(f"gathered {len(found)} tensors")
    wrong += [name for name, tensor in found.items() if not torch.equal(tensor, whole[name])]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, wrong)
    return [f"rank {r}: {text}" for r, own_wrong in enumerate(told) for text in own_wrong]


@pytest.mark.parametrize("family", list(engines.FAMILIES))
def test_shares_are_as_their_layout_says_and_make_up_the_whole(family: str) -> None:
    grids = [Grid(tp=2, pp=2), Grid(tp=2, dp=2, ep=2 if family != "dense" else 4)]
    for wrong in engines.over_ranks(4, _shares, [Case(family, grid, layers=2) for grid in grids], 120):
        assert not wrong


def test_experts_are_laid_out_by_their_load_and_tokens_stay() -> None:
    found = engines.balance(Skewed(Grid(dp=4), layers=2), seconds=120)
    assert found["busiest_before"] > 2 and found["busiest_after"] <= 1.2
    assert found["tokens_unchanged"]


@pytest.mark.parametrize("kind", ["one expert", "one part", "long tail"])
def test_a_skew_of_ten_to_one_is_brought_to_six_fifths(kind: str) -> None:
    dice, parts, experts = random.Random(3), 16, 256
    each = experts // parts
    if kind == "one expert":
        loads = [dice.uniform(80, 120) for _ in range(experts)]
        loads[7] = 10 * 100 * each
    elif kind == "one part":
        loads = [dice.uniform(80, 120) * (10 if e < each else 1) for e in range(experts)]
    else:
        loads = [1000 / (1 + 0.035 * e) for e in range(experts)]
    now = share.spread(experts, parts, spare=1)
    found = balanced(loads, parts, now)
    assert busiest(loads, parts, found) <= 1.2
    assert sorted(set(found)) == list(range(experts)) and len(found) == len(now)
    assert kind == "long tail" or max(part_loads(loads, parts, range(experts))) > 8 * 100 * each


def test_experts_stay_where_they_are_while_that_is_nearly_as_good() -> None:
    loads = [100.0, 101, 99, 100, 102, 98, 100, 100]
    assert balanced(loads, 4, range(8)) == tuple(range(8))
    assert balanced([0.0] * 8, 4, range(8)) == tuple(range(8))


@pytest.mark.parametrize(
    ("name", "grid", "words"),
    [
        ("qwen2", Grid(tp=3), "neither divides the model's 2 key/value heads"),
        ("qwen2", Grid(tp=8), "does not divide the model's heads, 4"),
        ("qwen3-moe", Grid(dp=3), "rollout.ep 3 does not divide the model's experts, 4"),
        ("qwen3-moe", Grid(tp=2, dp=3, ep=4), "rollout.ep is 4"),
        ("deepseek-v3", Grid(pp=4), "more than the model's 3 layers"),
        ("gpt-oss", Grid(tp=4, ep=1, dp=2), ""),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(name: str, grid: Grid, words: str) -> None:
    if not words:
        share.check_divides(tiny_model(name), grid)
        return
    with pytest.raises(ModelError, match=words):
        share.check_divides(tiny_model(name), grid)


def test_every_coordinate_of_a_grid_is_one_rank() -> None:
    grid = Grid(tp=2, dp=4, pp=3, ep=4)
    assert [grid.rank(*grid.place(r)) for r in range(grid.ranks)] == list(range(24))
    assert grid.joined == 2 and grid.inside == 2 and grid.widths == 1
    for rank in range(24):
        shared = {grid.part(r) for first in grid.sharing_tokens(rank) for r in grid.exchanging(first)}
        assert shared == set(range(4))  # among a replica and those it is joined with, every part is held once


class _Alone:
    """Links of an engine whose other replica never has anything to say."""

    crosses = False

    def __init__(self, replicas: int) -> None:
        self.grid, self.at = Grid(dp=replicas), Grid(dp=replicas).place(0)

    def gather(self, own: bytes) -> list[bytes]:
        return [own]

    def drawn(self, draw: Any, *_: Any) -> Any:
        return draw()


def test_requests_go_to_the_replica_with_least_to_do_and_bad_ones_come_back() -> None:
    model: Any = tiny_model("llama")
    inner = NativeEngine(model, eos_ids=[2], max_seqs=4, max_len=32)
    model.__dict__["tide_share"] = SimpleNamespace(slots={})
    inner.runner.spread = {}  # type: ignore[attr-defined]
    engine = Replicas(inner, _Alone(2))  # type: ignore[arg-type]
    heard: list[int] = []
    for id, n in ((0, 3), (1, 2), (2, 1)):
        engine.submit(Request(id, [5, 6], Sampling(max_tokens=2), n=n, on_done=lambda c: heard.append(c.request.id)))
    assert engine._load == [3, 3]
    assert {taken.request.id for taken in engine._taken.values() if taken.home == 1} == {1, 2}
    engine.submit(Request(3, [], Sampling(max_tokens=2)))
    done = [c for _ in range(4) for c in engine.step()]
    assert {(c.request.id, c.error is None) for c in done} == {(0, True), (3, False)}
    assert heard == [0, 0, 0] and engine._load == [0, 3] and engine.has_work
