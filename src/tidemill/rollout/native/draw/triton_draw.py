"""From logits to tokens as Triton kernels: what `sampling.draw` does, without a sort and without the host.

A row's logits are cut into blocks. The plain draw reads them once, and the block with the token once more. Truncation
keeps the logits above a floor; the floor is found by narrowing an interval down to the few logits that matter, block
by block, passing over blocks whose largest lies below. The same tokens come out wherever no sum rounds to the other
side.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Arguments of a kernel are pointers and constants of Triton's own language, which has no types to name.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits reduced by one program of the draw; of a truncated one, where more and smaller blocks are passed over.
VOCAB_BLOCK = 4096
CUT_BLOCK = 1024
# An interval with at most so many logits is searched in registers; one with more is cut by so many pivots a pass.
ROOM = 1024
PIVOTS = 4
# Halvings of the range of block maxima: enough for a bound, which need not be tight.
PEAK_STEPS = tl.constexpr(12)
# So far below the largest logit an exponential is 0 in float32.
NO_WEIGHT = tl.constexpr(104.0)


@triton.jit
def _reduce(logits, source, slot, temperature, peaks, sums, bests, vocab, blocks, BLOCK_V: tl.constexpr):
    """Of one block of a row's logits: the largest, the sum of exponentials relative to it, and where it is."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    where = tl.load(source + row).to(tl.int64) * vocab
    heat = tl.load(temperature + tl.load(slot + row))
    x = tl.load(logits + where + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat
    peak = tl.max(x, 0)
    cell = row * blocks + block
    tl.store(peaks + cell, peak)
    tl.store(sums + cell, tl.sum(tl.exp(x - peak), 0))
    tl.store(bests + cell, tl.argmax(x, 0) + block * BLOCK_V)


@triton.jit
def _choose(
    logits, source, slot, temperature, greedy, key, position, peaks, sums, bests, tokens, logprobs, latest,
    vocab, blocks, BLOCK_V: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    """The row's token: the first whose cumulative probability exceeds the row's random number."""
    row = tl.program_id(0)
    where = tl.load(source + row).to(tl.int64) * vocab
    mine = tl.load(slot + row)
    heat = tl.load(temperature + mine)
    b = tl.arange(0, BLOCKS_PAD)
    peak = tl.load(peaks + row * blocks + b, mask=b < blocks, other=-float("inf"))
    part = tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0)
    top = tl.max(peak, 0)
    mass = part * tl.exp(peak - top)
    total = tl.sum(mass, 0)
    target = _uniform(tl.load(key + mine), tl.load(position + row).to(tl.int64)) * total
    chosen, before = _block_of(target, mass, b, blocks)
    at = chosen * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits + where + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat
    inner = before + tl.cumsum(tl.exp(x - top), 0)
    token = chosen * BLOCK_V + tl.sum((inner <= target).to(tl.int32), 0)
    # Rounding can leave the target beyond the last sum: the most likely token of the block is then as good as any.
    most = tl.argmax(peak, 0)
    best = tl.load(bests + row * blocks + most)
    last = tl.minimum((chosen + 1) * BLOCK_V, vocab)
    token = tl.where(token >= last, tl.load(bests + row * blocks + chosen), token)
    token = tl.where(tl.load(greedy + mine) != 0, best, token)
    value = tl.load(logits + where + token).to(tl.float32) / heat
    tl.store(tokens + row, token)
    tl.store(logprobs + row, value - top - tl.log(total))
    tl.store(latest + mine, token.to(tl.int64))


@triton.jit
def _block_of(target, mass, b, blocks):
    """The block in which the running sum of `mass` passes the target, and the sum before it."""
    summed = tl.cumsum(mass, 0)
    chosen = tl.minimum(tl.sum((summed <= target).to(tl.int32), 0), blocks - 1)
    return chosen, tl.sum(tl.where(b < chosen, mass, 0.0), 0)


@triton.jit
def _uniform(key, position):
    """`sampling.uniform`: the same number from the same key and position."""
    z = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit
def _collect(logits, peaks, spare, low, high, top, heat, vocab, blocks, BLOCK_V: tl.constexpr, ROOM: tl.constexpr):
    """The logits in (low, high], into `spare` as far as they fit; how many there are, and their mass."""
    count = 0
    mass = 0.0
    for block in range(blocks):
        if tl.load(peaks + block) > low:
            at = block * BLOCK_V + tl.arange(0, BLOCK_V)
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat
            inside = (x > low) & (x <= high)
            here = inside.to(tl.int32)
            if count <= ROOM:
                place = count + tl.cumsum(here, 0) - 1
                tl.store(spare + place, x, mask=inside & (place < ROOM))
            count += tl.sum(here, 0)
            mass += tl.sum(tl.where(inside, tl.exp(x - top), 0.0), 0)
    return count, mass


@triton.jit
def _measure(logits, peaks, low, high, top, heat, vocab, blocks, BLOCK_V: tl.constexpr, PIVOTS: tl.constexpr):
    """Pivots between low and high; how many logits lie above each, and their mass."""
    pivot = low + (high - low) * ((tl.arange(0, PIVOTS) + 1).to(tl.float32) / (PIVOTS + 1))
    counts = tl.zeros((BLOCK_V, PIVOTS), tl.int32)
    masses = tl.zeros((BLOCK_V, PIVOTS), tl.float32)
    for block in range(blocks):
        if tl.load(peaks + block) > low:
            at = block * BLOCK_V + tl.arange(0, BLOCK_V)
            x = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat
            above = x[:, None] > pivot[None, :]
            counts += above.to(tl.int32)
            masses += tl.where(above, tl.exp(x - top)[:, None], 0.0)
    return pivot, tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _floor(
    logits, peaks, spare, low, top, goal, whole, heat, vocab, blocks,
    BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr, ROOM: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The highest number that leaves at least `goal` above it: so many logits, or with BY_MASS that share of `whole`
    (below 0: of what lies above `low`). Equal logits stay together. -inf where all above `low` are too few."""
    high = top
    n_low, w_low = _collect(logits, peaks, spare, low, high, top, heat, vocab, blocks, BLOCK_V, ROOM)
    n_high = 0
    w_high = 0.0
    if BY_MASS:
        goal = goal * tl.where(whole < 0, w_low, whole)
        is_enough = w_low >= goal
    else:
        is_enough = n_low >= goal
    is_wide = is_enough & (n_low > ROOM)
    was_wide = is_wide
    while is_wide:
        pivot, n, w = _measure(logits, peaks, low, high, top, heat, vocab, blocks, BLOCK_V, PIVOTS)
        if BY_MASS:
            reaches = w >= goal
        else:
            reaches = n >= goal
        lower = tl.maximum(low, tl.max(tl.where(reaches, pivot, low), 0))
        upper = tl.minimum(high, tl.min(tl.where(reaches, high, pivot), 0))
        n_low = tl.minimum(n_low, tl.min(tl.where(reaches, n, n_low), 0))
        n_high = tl.maximum(n_high, tl.max(tl.where(reaches, n_high, n), 0))
        w_high = tl.maximum(w_high, tl.max(tl.where(reaches, w_high, w), 0))
        # With no number between the two, all that is left are equals, however many.
        is_wide = ((lower > low) | (upper < high)) & (n_low - n_high > ROOM)
        low = lower
        high = upper
    if was_wide:
        _collect(logits, peaks, spare, low, high, top, heat, vocab, blocks, BLOCK_V, ROOM)
    tl.debug_barrier()  # what one thread wrote another reads
    i = tl.arange(0, ROOM)
    few = tl.load(spare + i, mask=i < n_low - n_high, other=-float("inf"))
    tl.debug_barrier()  # and the next search writes over it
    weight = tl.exp(few - top)
    n_base = n_high
    w_base = w_high
    is_open = is_enough & (n_low - n_high > 1)
    while is_open:
        middle = 0.5 * low + 0.5 * high
        above = few > middle
        n = n_base + tl.sum(above.to(tl.int32), 0)
        if BY_MASS:
            reaches = w_base + tl.sum(tl.where(above, weight, 0.0), 0) >= goal
        else:
            reaches = n >= goal
        is_between = (middle > low) & (middle < high)
        rises = is_between & reaches
        falls = is_between & (reaches == 0)
        low = tl.where(rises, middle, low)
        high = tl.where(falls, middle, high)
        n_low = tl.where(rises, n, n_low)
        n_high = tl.where(falls, n, n_high)
        is_open = is_between & (n_low - n_high > 1)
    return tl.where(is_enough, low, -float("inf"))


@triton.jit
def _bound_by_peaks(peak, k, low, high):
    """A number with at least k block maxima above it, near the highest such; `low` where there are fewer."""
    for _ in range(PEAK_STEPS):
        middle = 0.5 * low + 0.5 * high
        reaches = tl.sum((peak > middle).to(tl.int32), 0) >= k
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
    return low


@triton.jit
def _cut(
    logits, source, slot, temperature, top_k, top_p, min_p, peaks, sums, spare, floors, edges, vocab, blocks,
    BLOCK_V: tl.constexpr, BLOCKS_PAD: tl.constexpr, ROOM: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """What a row keeps: logits above its floor (top-k, then top-p of those) and not below its edge (min-p)."""
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(source + row).to(tl.int64) * vocab
    peaks += row * blocks
    spare += row * ROOM
    mine = tl.load(slot + row)
    heat = tl.load(temperature + mine)
    k = tl.load(top_k + mine)
    p = tl.load(top_p + mine)
    b = tl.arange(0, BLOCKS_PAD)
    peak = tl.load(peaks + b, mask=b < blocks, other=-float("inf"))
    part = tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0)
    top = tl.max(peak, 0)
    total = tl.sum(part * tl.exp(peak - top), 0)
    bottom = top - NO_WEIGHT
    floor = top - float("inf")
    if k < vocab:
        low = _bound_by_peaks(peak, k, bottom, top)
        floor = _floor(logits, peaks, spare, low, top, k, total, heat, vocab, blocks, False, BLOCK_V, ROOM, PIVOTS)
    if p < 1.0:
        # All logits up to `deep` together weigh less than what top-p leaves out.
        deep = top + tl.log((1.0 - p) * total / vocab) - 0.001
        has_floor = floor > bottom
        low = tl.where(has_floor, floor, tl.maximum(bottom, deep))
        whole = tl.where(has_floor, -1.0, total)
        found = _floor(logits, peaks, spare, low, top, p, whole, heat, vocab, blocks, True, BLOCK_V, ROOM, PIVOTS)
        floor = tl.maximum(floor, found)
    tl.store(floors + row, floor)
    tl.store(edges + row, top + tl.log(tl.load(min_p + mine)))


@triton.jit
def _reduce_kept(
    logits, source, slot, temperature, peaks, floors, edges, sums, vocab, blocks, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Of one block of a row's logits: the sum of exponentials of those kept, relative to the block's largest."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    cell = row * blocks + block
    peak = tl.load(peaks + cell)
    floor, edge = tl.load(floors + row), tl.load(edges + row)
    total = 0.0
    if (peak > floor) & (peak >= edge):
        at = block * BLOCK_V + tl.arange(0, BLOCK_V)
        where = tl.load(source + row).to(tl.int64) * vocab
        heat = tl.load(temperature + tl.load(slot + row))
        x = tl.load(logits + where + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat
        total = tl.sum(tl.where((x > floor) & (x >= edge), tl.exp(x - peak), 0.0), 0)
    tl.store(sums + cell, total)


@triton.jit
def _choose_kept(
    logits, source, slot, temperature, greedy, key, position, peaks, sums, bests, kept_sums, floors, edges, tokens,
    logprobs, kept, latest, vocab, blocks, BLOCK_V: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    """`_choose` among what a row keeps; its log-probability stays that of the whole distribution."""
    row = tl.program_id(0)
    where = tl.load(source + row).to(tl.int64) * vocab
    mine = tl.load(slot + row)
    heat = tl.load(temperature + mine)
    b = tl.arange(0, BLOCKS_PAD)
    cell = row * blocks + b
    peak = tl.load(peaks + cell, mask=b < blocks, other=-float("inf"))
    top = tl.max(peak, 0)
    scale = tl.exp(peak - top)
    total = tl.sum(tl.load(sums + cell, mask=b < blocks, other=0.0) * scale, 0)
    mass = tl.load(kept_sums + cell, mask=b < blocks, other=0.0) * scale
    kept_total = tl.sum(mass, 0)
    target = _uniform(tl.load(key + mine), tl.load(position + row).to(tl.int64)) * kept_total
    chosen, before = _block_of(target, mass, b, blocks)
    at = chosen * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits + where + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / heat
    is_kept = (x > tl.load(floors + row)) & (x >= tl.load(edges + row))
    inner = before + tl.cumsum(tl.where(is_kept, tl.exp(x - top), 0.0), 0)
    token = tl.min(tl.where(is_kept & (inner > target), at, vocab), 0)
    # Rounding can leave the target beyond the last sum: the last one kept is then the right one.
    token = tl.where(token < vocab, token, tl.max(tl.where(is_kept, at, -1), 0))
    best = tl.load(bests + row * blocks + tl.argmax(peak, 0))
    token = tl.where((token < 0) | (tl.load(greedy + mine) != 0), best, token)
    value = tl.load(logits + where + token).to(tl.float32) / heat
    tl.store(tokens + row, token)
    tl.store(logprobs + row, value - top - tl.log(total))
    tl.store(kept + row, tl.log(kept_total / total))
    tl.store(latest + mine, token.to(tl.int64))


def draw(logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of rows whose logits are `logits[source]`; `state` has, by slot, temperature,
    greedy, key and latest token, and takes the new one."""
    rows, vocab = slot.shape[0], logits.shape[1]
    blocks = triton.cdiv(vocab, VOCAB_BLOCK)
    peaks, sums, tokens, logprobs = _room(logits, (rows, blocks), (rows, blocks), (rows,), (rows,))
    bests, tokens = torch.empty_like(peaks, dtype=torch.int32), tokens.view(torch.int32)
    _reduce[(rows, blocks)](
        logits, source, slot, state.temperature, peaks, sums, bests, vocab, blocks, VOCAB_BLOCK, num_warps=8
    )
    _choose[(rows,)](
        logits, source, slot, state.temperature, state.greedy, state.key, position, peaks, sums, bests, tokens,
        logprobs, state.latest, vocab, blocks, VOCAB_BLOCK, triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


def draw_truncated(
    logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` from what top-k, top-p and min-p keep of each row, by slot in `state`; also the log of the mass kept."""
    return _draw_cut(logits, source, slot, position, state)[:3]


def draw_steered(
    logits: Tensor, steered: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw_truncated` from `steered` (rows, vocab); log-probability and mass are those of `logits[source]`."""
    rows = torch.arange(slot.shape[0], dtype=torch.int32, device=slot.device)
    tokens, _, _, floors, edges = _draw_cut(steered, rows, slot, position, state)
    heat = state.temperature[slot.long()].unsqueeze(1)
    drawn, whole = steered / heat, logits.index_select(0, source.long()).float() / heat
    has_weight = drawn > drawn.amax(1, keepdim=True) - NO_WEIGHT.value
    is_kept = (drawn > floors.unsqueeze(1)) & (drawn >= edges.unsqueeze(1)) & has_weight
    total = whole.logsumexp(1)
    kept = whole.masked_fill(~is_kept, -float("inf")).logsumexp(1) - total
    return tokens, whole.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - total, kept


def _draw_cut(
    logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Also what each row keeps: logits, at its temperature, above a floor and not below an edge."""
    rows, vocab = slot.shape[0], logits.shape[1]
    blocks = triton.cdiv(vocab, CUT_BLOCK)
    pad = triton.next_power_of_2(blocks)
    cells = (rows, blocks)
    peaks, sums, kept_sums, spare = _room(logits, cells, cells, cells, (rows, ROOM))
    floors, edges, tokens, logprobs, kept = _room(logits, *[(rows,)] * 5)
    bests, tokens = torch.empty_like(peaks, dtype=torch.int32), tokens.view(torch.int32)
    _reduce[cells](logits, source, slot, state.temperature, peaks, sums, bests, vocab, blocks, CUT_BLOCK, num_warps=4)
    _cut[(rows,)](
        logits, source, slot, state.temperature, state.top_k, state.top_p, state.min_p, peaks, sums, spare, floors,
        edges, vocab, blocks, CUT_BLOCK, pad, ROOM, PIVOTS, num_warps=4,
    )  # fmt: skip
    _reduce_kept[cells](
        logits, source, slot, state.temperature, peaks, floors, edges, kept_sums, vocab, blocks, CUT_BLOCK, num_warps=4
    )
    _choose_kept[(rows,)](
        logits, source, slot, state.temperature, state.greedy, state.key, position, peaks, sums, bests, kept_sums,
        floors, edges, tokens, logprobs, kept, state.latest, vocab, blocks, CUT_BLOCK, pad, num_warps=4,
    )  # fmt: skip
    return tokens, logprobs, kept, floors, edges


def _room(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float32, device=like.device) for shape in shapes]
