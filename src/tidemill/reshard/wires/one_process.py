"""A wire for one process that holds a learner's weights and an engine's copy of them: nothing travels, blocks are
copied, and checked like blocks that came from afar."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tidemill.errors import ReshardError
from tidemill.reshard import pack
from tidemill.reshard.layouts.layout import extents
from tidemill.reshard.move import BUCKET_BYTES, CHECK_EVERY, Checks, Job, Moved, confirm, copy_local, own_copies
from tidemill.reshard.plan import Transfer


class OneProcessWire:
    def __init__(
        self, bucket_bytes: int = BUCKET_BYTES, *, tamper: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self._tamper = tamper  # tests flip bits of what was copied before it is checked

    def carry(self, job: Job, moved: Moved) -> None:
        if job.plan.transfers:
            raise ReshardError("this plan needs more ranks than one process", "use a GroupWire or a SharedWire")
        checks, every = Checks(), CHECK_EVERY[job.verify]
        for i, transfer in enumerate(own_copies(job)):
            copy_local(transfer, job, moved, self.bucket_bytes)
            if self._tamper:
                self._tamper(pack.region(job.targets, transfer.targets[0], extents(transfer.box)))
            if every and (i + job.version) % every == 0:
                self._check(transfer, job, checks)
        confirm(self, job, moved, checks)

    def _check(self, transfer: Transfer, job: Job, checks: Checks) -> None:
        for piece in pack.pieces_of(transfer, self.bucket_bytes):
            expected = torch.empty(
                extents(piece.box), dtype=getattr(torch, piece.dtype), device=job.targets[piece.targets[0].home].device
            )
            pack.read(piece, job.sources, expected, job.changes)
            checks.compare(piece, job.targets, pack.checksum(expected))

    def agree(self, ok: bool, version: int) -> bool:
        return ok

    def close(self) -> None:
        """Nothing is held."""
