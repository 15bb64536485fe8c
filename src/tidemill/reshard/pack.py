"""Blocks: reading them out of local tensors into a buffer and back, cast and summed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tidemill.errors import ReshardError
from tidemill.reshard.layouts.layout import Shape, extents, fit
from tidemill.reshard.plan import Spot, Transfer, cut

Tensors = Mapping[str, torch.Tensor]
ALIGN = 8  # bytes: blocks in a buffer begin at whole words, which is what checksums are made of
CHECK_BYTES = 16
ROW_WORDS = 1024  # of a checksum: position matters by row and by column


@dataclass(frozen=True, slots=True)
class BlockMerge:
    """A low-rank addition to a weight, merged as it is read: `scale` × `up` (out, r) @ `down` (r, in), or stacks of
    both for a stack of weights. `rows` (out,): a factor of each row of the sum, for adapters with magnitudes of their
    own."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    rows: torch.Tensor | None = None


Changes = Mapping[str, BlockMerge]  # by logical name: what happens to a tensor as it is read


def region(tensors: Tensors, spot: Spot, extent: Shape) -> torch.Tensor:
    """A view of the block of `extent` at `spot`."""
    tensor = tensors.get(spot.home)
    if tensor is None:
        raise ReshardError(f"this rank has no tensor {spot.home!r}", "give the tensors that its layout names")
    sizes = fit(extent, tensor.dim())
    for dim, (at, n) in enumerate(zip(spot.at, sizes)):
        if at + n > tensor.shape[dim]:
            raise ReshardError(f"{spot.home} has shape {tuple(tensor.shape)}; its layout reaches {at + n} in {dim}")
        if n != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at, n)
    return tensor


def pieces_of(transfer: Transfer, most_bytes: int) -> Iterator[Transfer]:
    """The same transfer in blocks of at most `most_bytes`."""
    if transfer.nbytes <= most_bytes:
        yield transfer
        return
    count = -(-transfer.nbytes // most_bytes)
    for box in cut(transfer.box, count):
        yield from pieces_of(transfer.narrowed(box), most_bytes)


def room(transfer: Transfer) -> int:
    """Bytes of a block in a buffer."""
    return -(-transfer.nbytes // ALIGN) * ALIGN


def block(buffer: torch.Tensor, at: int, transfer: Transfer) -> torch.Tensor:
    """A block in a buffer of bytes, as a tensor of its dtype and shape."""
    flat = buffer[at : at + transfer.nbytes].view(getattr(torch, transfer.dtype))
    return flat.view(extents(transfer.box))


def read(transfer: Transfer, tensors: Tensors, into: torch.Tensor, changes: Changes | None = None) -> None:
    """Copy a block out of its source: cast and merged on the way."""
    merge = changes.get(transfer.name) if changes and not transfer.hop else None
    view = region(tensors, transfer.source, extents(transfer.box))
    if merge is not None:
        (rows, columns) = transfer.box[-2:]
        stacked = tuple(slice(*each) for each in transfer.box[: merge.up.dim() - 2])
        up, down = merge.up[(*stacked, slice(*rows))], merge.down[(*stacked, slice(None), slice(*columns))]
        view = view.float() + (merge.scale * (up.float() @ down.float())).view(view.shape)
        if merge.rows is not None:
            view = view * merge.rows[slice(*rows)].unsqueeze(-1)
    into.copy_(view.view(into.shape) if view.dim() != into.dim() and view.is_contiguous() else view.reshape(into.shape))


def write(transfer: Transfer, tensors: Tensors, block: torch.Tensor) -> None:
    """Copy a block to all its targets, cast on the way."""
    for spot in transfer.targets:
        view = region(tensors, spot, extents(transfer.box))
        view.copy_(block.view(view.shape))


def checksum(block: torch.Tensor) -> torch.Tensor:
    """Two 64-bit words over a contiguous block's bits: their plain sum, which any single flipped bit changes, and sums
    weighted by row and by column, which misplaced words change. Integer sums wrap and have no order: every device
    gives the same."""
    flat = block.reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64) if flat.storage_offset() % 8 == 0 else flat[:whole].clone().view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=block.device)
    rows = words.numel() // ROW_WORDS
    _add(sums, words[: rows * ROW_WORDS].view(rows, ROW_WORDS))
    _add(sums, words[rows * ROW_WORDS :].view(-1, 1))
    if whole < flat.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=block.device)
        last[: flat.numel() - whole] = flat[whole:]
        _add(sums, last.view(torch.int64).view(1, 1))
    return sums


def _add(sums: torch.Tensor, words: torch.Tensor) -> None:
    if not words.numel():
        return
    by_row, by_column = words.sum(1), words.sum(0)
    sums[0] += by_row.sum()
    sums[1] += (by_row * _weights(by_row)).sum() + (by_column * _weights(by_column)).sum() * 0x9E3779B1


def _weights(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, like.numel() + 1, dtype=torch.int64, device=like.device)


def written_checksum(transfer: Transfer, tensors: Tensors) -> Iterator[torch.Tensor]:
    """Checksums of a block as it now lies in each of its targets."""
    dtype = getattr(torch, transfer.dtype)
    for spot in transfer.targets:
        yield checksum(region(tensors, spot, extents(transfer.box)).to(dtype).contiguous())
