"""Context parallel computes what one rank does: attention by itself, and a whole loss with its gradients."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.learn.parallel.models import config, gradients, model, over_all, samples
from tidemill.algorithms.shared.aggregate import local_weights
from tidemill.algorithms.shared.registry import get
from tidemill.errors import ConfigError
from tidemill.learn.forward import forward
from tidemill.learn.parallel import context
from tidemill.learn.parallel.context import Shares, check, cut, key_heads, parallel
from tidemill.learn.parallel.ring import AttentionRing, make_plan, within
from tidemill.learn.rows.packing import pack
from tidemill.learn.rows.tokens import token_batch
from tidemill.models.attention.contexts import KINDS
from tidemill.models.attention.flex import Sight
from tidemill.models.attention.registry import AttentionForm

CPU = torch.device("cpu")
LENGTHS = [7, 30, 1, 12, 3]
SHARED = ([5, 9], [8, 3, 12, 0, 6], [0, 0, 1, 1, 1])


def sights():
    return {"packed": Sight.packed(LENGTHS), "shared": Sight.shared(*SHARED)}


def inputs(tokens, heads, kv_heads, dim=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, h, dim, generator=draw) for h in (heads, kv_heads, kv_heads, heads)]


def base(kind):
    made = KINDS["blocks"]
    return made.packed(LENGTHS, CPU) if kind == "packed" else made.shared(*SHARED, CPU)


def form_of(window, softcap, chunk, has_sinks, heads):
    sinks = torch.linspace(-1.0, 2.0, heads).requires_grad_() if has_sinks else None
    return AttentionForm(0.5, window, softcap, chunk, sinks)


def whole_attention(kind, heads, kv_heads, *how):
    q, k, v, grad = inputs(len(sights()[kind].start), heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    form = form_of(*how, heads)
    out = base(kind).attend(0, q, k, v, form)
    out.backward(grad)
    return out.detach(), q.grad, k.grad, v.grad, None if form.sinks is None else form.sinks.grad


def rank_attention(cases):
    over, found = over_all(), []
    for kind, form, heads, kv_heads, *how in cases:
        sight = sights()[kind]
        shares = Shares.of(len(sight.start), over.size)
        if form == "ring":
            here = AttentionRing(sight, shares, over, CPU, tile=4)  # small tiles: some empty, some full, some cut
        else:
            here = context.Ulysses(base(kind), shares, over, CPU)
        own = torch.from_numpy(shares.tokens(over.rank))
        q, k, v, grad = (x[own] for x in inputs(len(sight.start), heads, kv_heads))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        seen = form_of(*how, heads)
        out = here.attend(0, q, k, v, seen)
        out.backward(grad)
        grads = [q.grad, k.grad, v.grad]
        found.append((own, [out.detach(), *grads], None if seen.sinks is None else seen.sinks.grad))
    return found


CASES = [
    *(
        (kind, form, 8, kv, None, None, None, False)
        for kind in ("packed", "shared")
        for form in ("ring", "ulysses")
        for kv in (8, 2)
    ),
    ("packed", "ring", 3, 1, 5, None, None, False),
    ("shared", "ring", 4, 2, 5, 2.0, None, False),
    ("packed", "ring", 4, 4, None, 2.0, None, True),
    ("shared", "ring", 4, 2, None, None, 3, True),
    ("packed", "ring", 4, 2, None, None, 5, False),
    ("shared", "ulysses", 8, 4, 5, 2.0, None, False),
    ("shared", "ulysses", 8, 4, None, None, 4, True),
]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_attention_over_ranks_equals_that_of_one(ranks, count):
    for case, parts in zip(CASES, zip(*ranks.call(rank_attention, CASES, on=count))):
        kind, _, heads, kv_heads, *how = case
        *wanted, wanted_sinks = whole_attention(kind, heads, kv_heads, *how)
        for name, at, whole in zip(("out", "q", "k", "v"), range(4), wanted):
            found = torch.empty_like(whole)
            for own, tensors, _ in parts:
                found[own] = tensors[at]
            torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5, msg=f"{name} of {case}")
        if wanted_sinks is not None:  # a rank has those of its own tokens or heads
            summed = sum(sinks for _, _, sinks in parts)
            torch.testing.assert_close(summed, wanted_sinks, atol=1e-5, rtol=1e-5, msg=f"sinks of {case}")


def loss_of(made, batch, settings, attention, share):
    packed = pack(batch, CPU, share, attention)
    if isinstance(packed.context, context.Ulysses | AttentionRing):
        part = cut(packed)
        scores = tuple(part.whole(x) for x in forward(made, part.packed, settings))
    else:
        scores = forward(made, packed, settings)
    batch = batch.merge({"weight": local_weights(batch, settings)})
    return get("grpo").loss(token_batch(batch, packed, scores), settings)[0]


SETTINGS = {"algorithm": {"name": "grpo", "entropy_coef": 0.01}}


def rank_loss(name, form, share, batch):
    made, settings = model(name), config(**SETTINGS)
    attention = parallel(KINDS["blocks"], over_all(), form, made.config.num_attention_heads)
    loss = loss_of(made, batch, settings, attention, share)
    loss.backward()
    for p in made.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
    return loss.item(), gradients(made) if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("name", "count", "form", "share"),
    [
        ("qwen2", 2, "ulysses", False),
        ("qwen2", 4, "ring", True),
        ("qwen3-untied", 8, "ulysses", True),  # 2 key heads over 8 ranks
        ("llama-4kv", 2, "ring", False),
        ("gemma2", 4, "ring", False),  # window and softcap
        ("gemma2", 2, "ulysses", True),
        ("qwen3-moe", 4, "ring", True),
    ],
)
def test_loss_and_gradients_over_ranks_equal_those_of_one(ranks, name, count, form, share):
    batch = samples()
    made = model(name)
    loss = loss_of(made, batch, config(**SETTINGS), KINDS["blocks"], share)
    loss.backward()
    found = ranks.call(rank_loss, name, form, share, batch, on=count)
    assert {value for value, _ in found} == {found[0][0]}  # every rank computes the same number
    assert found[0][0] == pytest.approx(loss.item(), abs=1e-5)
    for parameter, grad in gradients(made).items():
        torch.testing.assert_close(found[0][1][parameter], grad, atol=1e-5, rtol=1e-4)


def test_a_row_shorter_than_the_ranks_leaves_some_with_nothing_to_do(ranks):
    batch = samples(groups=1, each=1, longest=2)
    assert batch["tokens"].lengths.sum() - 1 < 16
    made = model("qwen2")
    loss = loss_of(made, batch, config(**SETTINGS), KINDS["blocks"], False)
    loss.backward()
    for form in ("ring", "ulysses"):
        found = ranks.call(rank_loss, "qwen2", form, False, batch, on=8)
        assert found[0][0] == pytest.approx(loss.item(), abs=1e-5)
        for parameter, grad in gradients(made).items():
            torch.testing.assert_close(found[0][1][parameter], grad, atol=1e-5, rtol=1e-4)


def test_shares_cover_the_row_once_and_pair_early_with_late():
    for tokens in (0, 1, 7, 64, 101):
        shares = Shares.of(tokens, 4)
        together = np.concatenate([shares.tokens(r) for r in range(4)])
        assert sorted(together) == list(range(tokens))
        assert max(shares.counts) - min(shares.counts) <= 2
    assert Shares.of(64, 4).slices[1] == (range(8, 16), range(48, 56))


def test_causal_work_of_one_long_sample_is_even_over_ranks():
    sight, shares = Sight.packed([4096]), Shares.of(4096, 4)
    work = [sum(len(tiles) for tiles in make_plan(sight, shares, r, CPU, 128).tiles) for r in range(4)]
    assert max(work) == min(work)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_tiles_hold_exactly_what_is_seen(window):
    for sight in sights().values():
        shares = Shares.of(len(sight.start), 3)
        found = np.zeros((len(sight.start),) * 2, bool)
        for rank in range(3):
            narrow = sight if window is None else within(sight, window)
            plan = make_plan(narrow, shares, rank, CPU, 4)
            own = shares.tokens(rank)
            for tiles in plan.tiles:
                for tile in tiles:
                    mask = plan.mask(tile)
                    keys = np.arange(tile.key_at, tile.key_at + tile.keys.stop - tile.keys.start)
                    found[np.ix_(own[tile.queries], keys)] |= True if mask is None else mask.numpy()
        np.testing.assert_array_equal(found, sight.dense(window))


def test_key_heads_go_to_the_ranks_whose_queries_they_serve():
    assert key_heads(8, 4, 2) == [0, 1, 2, 3]
    assert key_heads(8, 2, 4) == [0, 0, 1, 1]
    assert key_heads(12, 4, 3) == [h // 3 for h in range(12)]


def test_heads_that_cannot_be_shared_out_are_refused_with_what_would_do():
    assert check("auto", 6, 4) == "ring" and check("auto", 8, 4) == "ulysses"
    with pytest.raises(ConfigError, match="6 query heads") as error:
        check("ulysses", 6, 4)
    assert "2, 3, 6" in error.value.remedy
