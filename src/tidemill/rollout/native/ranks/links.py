"""A rank's links to the others of its engine: what it exchanges with whom while a step is made.

All ranks of a replica get the same requests in the same order. Their schedulers decide the same; sums and gathers give
them the same logits, and random numbers are hashes, so they draw the same tokens. Only the last stage has logits: it
tells the others what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.device import plain
from tidemill.models.mixture.spread import ExpertPlace
from tidemill.rollout.native.draw.sampling import Drawn
from tidemill.rollout.native.ranks.grid import Grid

Group = Any  # torch.distributed.ProcessGroup, which type checkers do not know on every platform


class ExpertRanks:
    """The replicas that exchange rows, as this rank sees them."""

    def __init__(self, group: Group, size: int) -> None:
        self.group, self.size = group, size

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        if self.size == 1:
            return rows
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=self.group)
        return out


class Links:
    """Made by all ranks of `group` together, which are those of `grid` in their order. `made`: groups that were made
    before, by their ranks."""

    def __init__(
        self, grid: Grid, group: Group, timeout_s: float = 300.0, made: dict[tuple[int, ...], Group] | None = None
    ) -> None:
        self.grid, self.group = grid, group
        self.rank = dist.get_rank(group)
        self.at = grid.place(self.rank)
        self._world = dist.get_process_group_ranks(group)
        self._timeout = timedelta(seconds=timeout_s)
        self._made = {tuple(range(grid.ranks)): group} if made is None else made
        self._tp = self._group(grid.sharing_tokens(self.rank))
        self._replicas = self._group(grid.replicas(self.rank))
        self._stages = self._group(grid.stages(self.rank))
        self._alike = self._group(grid.alike(self.rank))
        self.experts = ExpertRanks(self._group(grid.exchanging(self.rank)), grid.joined)
        self._sending: tuple[Any, Tensor] | None = None

    def _group(self, members: tuple[int, ...]) -> Group:
        """Of these ranks of the engine; one group serves all that the same ranks do together."""
        if members not in self._made and len(members) > 1:
            ranks = [self._world[i] for i in members]
            self._made[members] = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        return self._made.get(members)

    def expert_place(self, count: int) -> ExpertPlace:
        """Where experts lie that are numbered by their places, `count` of them on each rank."""
        return ExpertPlace(self.experts, count, self.at.tp // self.grid.widths, self.grid.inside)

    # Within a replica

    def sum(self, x: Tensor) -> Tensor:
        """In place, over the ranks that share each token."""
        if self.grid.tp > 1 and x.numel():
            dist.all_reduce(x, group=self._tp)
        return x

    def join_words(self, logits: Tensor, vocabulary: int) -> Tensor:
        """(rows, own words) → (rows, vocabulary)."""
        if self.grid.tp == 1:
            return logits
        step = -(-vocabulary // self.grid.tp)
        mine = logits.new_zeros(len(logits), step)
        mine[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(mine) for _ in range(self.grid.tp)]
        dist.all_gather(parts, mine, group=self._tp)
        return torch.cat(parts, 1)[:, :vocabulary]

    def least(self, own: int) -> int:
        """Of what the ranks of a replica say."""
        number = torch.tensor(own)
        for size, group in ((self.grid.tp, self._tp), (self.grid.pp, self._stages)):
            if size > 1:
                dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group)
        return int(number)

    # Between stages

    @property
    def is_first(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last(self) -> bool:
        return self.at.pp == self.grid.pp - 1

    def receive(self, like: Tensor) -> Tensor:
        """What the stage before made, of the form of `like`."""
        dist.recv(like, self._neighbour(-1), group=self._stages)
        return like

    def send(self, x: Tensor) -> None:
        """To the next stage. This rank goes on as soon as the message is on its way."""
        if self._sending is not None:
            self._sending[0].wait()
        x = x.contiguous()
        self._sending = dist.isend(x, self._neighbour(1), group=self._stages), x

    def _neighbour(self, step: int) -> int:
        return self._world[self.grid.rank(self.at.pp + step, self.at.dp, self.at.tp)]

    def drawn(self, draw: Callable[[], Drawn], rows: int, has_kept: bool, tops: int, device: torch.device) -> Drawn:
        """What the last stage draws, on all of them."""
        if self.grid.pp == 1:
            return draw()
        made = draw() if self.is_last else None
        columns = [made.tokens, made.logprobs, made.kept] if made is not None else []
        packed = torch.zeros(2 + has_kept + 2 * tops, rows, dtype=torch.float64, device=device)
        for i, column in enumerate(c for c in columns if c is not None):
            packed[i] = column
        if made is not None and made.tops is not None:
            packed[2 + has_kept :] = torch.cat([x.T for x in made.tops])
        source = self._world[self.grid.rank(self.grid.pp - 1, self.at.dp, self.at.tp)]
        dist.broadcast(packed, source, group=self._stages)
        if made is not None:
            return made
        rest = packed[2 + has_kept :]
        return Drawn(
            packed[0].long(),
            packed[1].float(),
            packed[2].float() if has_kept else None,
            (rest[:tops].T.long(), rest[tops:].T.float()) if tops else None,
        )

    # Between replicas

    @property
    def crosses(self) -> bool:
        """Whether a pass of one replica needs the others: they hold some of its experts."""
        return self.grid.joined > 1

    def enter(self, has_work: bool) -> bool:
        """Say whether this replica has a pass to make, and hear whether any has; once in every step."""
        if not self.crosses:
            return has_work
        flag = torch.tensor([float(has_work)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._replicas)
        return bool(flag)

    def gather(self, own: bytes) -> list[bytes]:
        """What one rank of each replica says in each stage: stage by stage, replica by replica."""
        size = len(self.grid.alike(self.rank))
        return [own] if size == 1 else plain.gather_bytes(own, size, self._alike)

    def sum_over_engine(self, x: Tensor) -> Tensor:
        """In place, a number on the host from one rank of each replica in each stage."""
        if self.grid.dp * self.grid.pp > 1:
            dist.all_reduce(x, group=self._alike)
        return x
