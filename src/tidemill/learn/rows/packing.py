"""From samples to packed micro-batches: no padding, a token budget each, loads as even as they can be made."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.batch import Batch, Column
from tidemill.errors import DataError
from tidemill.learn.rows.images import Look, Part, Shown
from tidemill.models.attention.contexts import KINDS, Attention
from tidemill.models.attention.registry import Context
from tidemill.models.upload import upload
from tidemill.models.vision.eyes.eyes import Eyes

Ints = npt.NDArray[np.int64]
TRIED_SINGLY = 16  # counts of bins, before the search takes larger steps
STARTS = "starts"  # column: where further trajectories of a sample begin; their prompts differ
MOST_TOGETHER = 16  # units of one bin that a bound on the number of bins looks at


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass. The last token of a sample is only ever predicted, so it is a target and not an input."""

    tokens: Tensor  # (inputs,)
    positions: Tensor  # (inputs,), or (4, inputs) of a model that turns images by time, height and width
    context: Context
    predicts: Tensor  # (targets,) the input whose hidden state predicts each target
    targets: Tensor  # (targets,) response tokens, sample after sample
    row: Tensor  # (targets,) the sample of each
    rows: int
    look: Look | None = None  # the images it shows


Unit = tuple[int, list[int]]  # tokens, and the rows that may not be parted


def microbatches(batch: Batch, budget: int, share_prompts: bool, whole_groups: bool = False) -> list[Ints]:
    """Rows of each micro-batch. With shared prompts a group stays together as far as the budget allows; with whole
    groups it stays together whatever its size, because the loss compares its samples."""
    bins = fill(units(batch, budget, share_prompts, whole_groups), budget)
    return [np.array(sorted(rows), np.int64) for _, rows in bins if rows]


def units(batch: Batch, budget: int, share_prompts: bool, whole_groups: bool) -> list[Unit]:
    return _whole(batch) if whole_groups else _units(batch, budget, share_prompts)


def fill(found: list[Unit], budget: int, multiple: int = 1, at_least: int = 1) -> list[Unit]:
    """Units in bins within the budget, loads as even as they come out; a multiple of `multiple` bins, some empty. One
    that is over the budget has a bin to itself.

    The largest unit goes first, to the lightest bin (Graham 1969), into as few bins as that fits: counts are tried one
    by one from a bound on any packing, and by bisection where many fail."""
    order = sorted(range(len(found)), key=lambda i: -found[i][0])
    sizes = [found[i][0] for i in order]
    rounds = max(at_least, -(-_fewest(sizes, budget) // multiple))
    failed, tried = rounds - 1, 0
    while (places := _dealt(sizes, budget, rounds * multiple)) is None:
        failed, tried = rounds, tried + 1
        rounds += 1 if tried < TRIED_SINGLY else 1 << (tried - TRIED_SINGLY)
    while rounds - failed > 1:
        middle = (failed + rounds) // 2
        fewer = _dealt(sizes, budget, middle * multiple)
        failed, rounds, places = (middle, rounds, places) if fewer is None else (failed, middle, fewer)
    bins: list[tuple[int, list[int]]] = [(0, []) for _ in range(rounds * multiple)]
    for i, place in zip(order, places):
        load, rows = bins[place]
        rows.extend(found[i][1])
        bins[place] = load + found[i][0], rows
    return bins


def shares(
    batch: Batch, ranks: int, budget: int, share_prompts: bool, whole_groups: bool = False, at_least: int = 1
) -> list[list[Ints]]:
    """`[rank][i]`: rows of its i-th micro-batch, empty where it runs a filler. `at_least`: micro-batches per rank.

    Every rank is handed the same rows and makes the same decision, so nothing is exchanged. Micro-batches that run at
    the same time are of like size, for ranks wait for each other in every layer."""
    if ranks == 1 and at_least == 1:  # in the order in which they are found: sums of floats have one order
        return [microbatches(batch, budget, share_prompts, whole_groups)]
    bins = fill(units(batch, budget, share_prompts, whole_groups), budget, multiple=ranks, at_least=at_least)
    bins = sorted(bins, key=lambda b: -b[0])
    dealt: list[list[Ints]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for first in range(0, len(bins), ranks):
        # The heaviest of these goes to the rank that has least so far.
        order = sorted(range(ranks), key=lambda r: loads[r])
        for (load, rows), rank in zip(bins[first : first + ranks], order):
            dealt[rank].append(np.array(sorted(rows), np.int64) if rows else np.empty(0, np.int64))
            loads[rank] += load
    return dealt


def _fewest(sizes: list[int], budget: int) -> int:
    """Bins that any packing needs: for all tokens, and for units of which at most k fit into one."""
    fewest = -(-sum(sizes) // budget)
    own = np.array(sizes, np.int64)
    for k in range(1, MOST_TOGETHER + 1):
        fewest = max(fewest, -(-int((own * (k + 1) > budget).sum()) // k))
    return fewest


def _dealt(sizes: list[int], budget: int, count: int) -> list[int] | None:
    """The bin of each unit, largest first; None where a bin of several goes over the budget."""
    heap = [(0, place) for place in range(count)]
    places, is_last = list[int](), count >= len(sizes)
    has_some = bytearray(count)
    for size in sizes:
        load, place = heap[0]
        if load + size > budget and has_some[place] and not is_last:
            return None
        heapq.heapreplace(heap, (load + size, place))
        has_some[place] = True
        places.append(place)
    return places


def _whole(batch: Batch) -> list[Unit]:
    totals = batch["tokens"].lengths
    return [(int(totals[rows].sum()), rows.tolist()) for rows in group_rows(batch.values("group"))]


def _units(batch: Batch, budget: int, share_prompts: bool) -> list[Unit]:
    """(tokens, rows) that may not be cut further: samples, or groups that share their prompt."""
    totals = batch["tokens"].lengths
    if not share_prompts or STARTS in batch:
        return [(int(n), [row]) for row, n in enumerate(totals)]
    prompts = batch.values("prompt_length")
    found: list[Unit] = []
    for rows in group_rows(batch.values("group")):
        size, members = int(prompts[rows[0]]), list[int]()
        for row in rows:
            response = int(totals[row] - prompts[row])
            if members and size + response > budget:
                found.append((size, members))
                size, members = int(prompts[row]), []
            size += response
            members.append(int(row))
        found.append((size, members))
    return found


def group_rows(groups: npt.NDArray[np.int64]) -> list[Ints]:
    """Row indices of each group, groups in order of first appearance."""
    order = np.argsort(groups, kind="stable")
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    return sorted(np.split(order, cuts), key=lambda rows: int(rows[0])) if len(order) else []


def pack(
    batch: Batch,
    device: torch.device,
    share_prompts: bool,
    attention: Attention = KINDS["blocks"],
    eyes: Eyes | None = None,
) -> PackedBatch:
    """`eyes`: of the model that is called with it, where that looks at images."""
    shown = Shown.of(batch, eyes)
    if _has_groups(batch, share_prompts):
        return _pack_shared(batch, device, attention, shown)
    return _pack_whole(batch, device, attention, shown)


def _pack_whole(batch: Batch, device: torch.device, attention: Attention, shown: Shown | None) -> PackedBatch:
    tokens, prompts = batch["tokens"], batch.values("prompt_length").astype(np.int64)
    inputs = tokens.lengths - 1
    starts = np.concatenate([[0], np.cumsum(inputs)[:-1]])
    responses = tokens.lengths - prompts
    flat = tokens.gather(np.arange(batch.rows)).values
    ends = np.cumsum(tokens.lengths)
    within = _ranges(responses)
    row = np.repeat(np.arange(batch.rows), responses)
    parts = [Part(i, 0, int(n), int(first)) for i, (n, first) in enumerate(zip(inputs, starts))]
    lengths = inputs if STARTS not in batch else _lengths_of_trajectories(batch[STARTS], inputs)
    context = attention.packed(lengths.tolist(), device)
    return PackedBatch(
        tokens=upload(np.delete(flat, ends - 1), device),
        positions=upload(_ranges(lengths) if shown is None else shown.positions(parts), device),
        context=context if shown is None else shown.context(context, parts, device),
        predicts=upload((starts + prompts - 1)[row] + within, device),
        targets=upload(flat[(ends - responses)[row] + within], device),
        row=upload(row, device),
        rows=batch.rows,
        look=None if shown is None else shown.look(parts, device),
    )


def _lengths_of_trajectories(starts: Column, inputs: Ints) -> Ints:
    """Inputs of every trajectory, sample after sample: none sees another's. The last token of one trajectory predicts
    the first of the next, which is a prompt's and masked."""
    found = [np.diff([0, *starts[row].tolist(), int(count)]) for row, count in enumerate(inputs)]
    return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)


def _pack_shared(batch: Batch, device: torch.device, attention: Attention, shown: Shown | None) -> PackedBatch:
    tokens, prompts = batch["tokens"], batch.values("prompt_length").astype(np.int64)
    groups = group_rows(batch.values("group"))
    group_of = np.empty(batch.rows, np.int64)
    for g, rows in enumerate(groups):
        group_of[rows] = g
    lengths = np.array([prompts[rows[0]] for rows in groups])
    prompt_ends = np.cumsum(lengths)
    responses = tokens.lengths - prompts
    inputs = np.maximum(responses - 1, 0)  # a sample may have no response
    split = int(prompt_ends[-1])
    starts = split + np.concatenate([[0], np.cumsum(inputs)[:-1]])
    within, row = _ranges(responses), np.repeat(np.arange(batch.rows), responses)
    row_starts = tokens.offsets[:-1] if tokens.offsets is not None else np.arange(batch.rows)
    response_at = (row_starts + prompts)[row] + within  # of every response token, in the column's own values
    is_input = within < inputs[row]
    _refuse_other_prompts(tokens.values, row_starts, prompts, np.array([rows[0] for rows in groups])[group_of])
    prompt_tokens = [tokens[int(rows[0])][: lengths[g]] for g, rows in enumerate(groups)]
    begins = prompt_ends - lengths
    parts = [Part(int(rows[0]), 0, int(lengths[g]), int(begins[g])) for g, rows in enumerate(groups)]
    parts += [
        Part(i, int(prompts[i]), int(prompts[i] + inputs[i]), int(starts[i]), int(begins[group_of[i]]))
        for i in range(batch.rows)
    ]
    places = np.concatenate([_ranges(lengths), (prompts[row] + within)[is_input]])
    context = attention.shared(lengths.tolist(), inputs.tolist(), group_of.tolist(), device)
    return PackedBatch(
        tokens=upload(np.concatenate([*prompt_tokens, tokens.values[response_at[is_input]]]), device),
        positions=upload(places if shown is None else shown.positions(parts), device),
        context=context if shown is None else shown.context(context, parts, device),
        # The first response token is predicted by the prompt's last, the others by the response token before them.
        predicts=upload(np.where(within == 0, prompt_ends[group_of[row]] - 1, starts[row] + within - 1), device),
        targets=upload(tokens.values[response_at], device),
        row=upload(row, device),
        rows=batch.rows,
        look=None if shown is None else shown.look(parts, device),
    )


def _refuse_other_prompts(values: npt.NDArray[Any], starts: Ints, prompts: Ints, first: Ints) -> None:
    """Every row's prompt must be that of its group's `first`: it is computed for all of them."""
    row, within = np.repeat(np.arange(len(prompts)), prompts), _ranges(prompts)
    is_same_length = np.array_equal(prompts, prompts[first])
    if is_same_length and np.array_equal(values[starts[row] + within], values[starts[first][row] + within]):
        return
    raise DataError(
        "the samples of a group begin with different prompts, which cannot be computed once for all of them",
        "set learn.share_prompts=false, or give a group to each prompt",
    )


def input_places(batch: Batch, share_prompts: bool) -> tuple[Ints, Ints]:
    """Of every input of `pack`'s row: its sample, and its place in the sample's tokens."""
    totals, prompts = batch["tokens"].lengths, batch.values("prompt_length").astype(np.int64)
    if not _has_groups(batch, share_prompts):
        return np.repeat(np.arange(batch.rows), totals - 1), _ranges(totals - 1)
    first = np.array([rows[0] for rows in group_rows(batch.values("group"))])
    inputs = np.maximum(totals - prompts - 1, 0)
    row = np.concatenate([np.repeat(first, prompts[first]), np.repeat(np.arange(batch.rows), inputs)])
    own = np.repeat(prompts, inputs) + _ranges(inputs)
    return row, np.concatenate([_ranges(prompts[first]), own])


def _has_groups(batch: Batch, share_prompts: bool) -> bool:
    return share_prompts and STARTS not in batch and len(np.unique(batch.values("group"))) < batch.rows


def response_column(values: npt.NDArray[np.float32], batch: Batch) -> Column:
    """Flat values of all response tokens as a jagged column of the batch's rows."""
    lengths = batch["tokens"].lengths - batch.values("prompt_length")
    return Column(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _ranges(lengths: Ints) -> Ints:
    """0..n0-1, 0..n1-1, …"""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
