"""The part of a plan that is an all-gather: blocks that every other rank of the group wants.

The backend's own collective moves those, for it knows the links better than messages between pairs do. The rest of the
plan goes point to point.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.reshard.plan import Plan, Transfer
from tidemill.reshard.schedule import Page, pages


def split(plan: Plan, ranks: int) -> tuple[Plan, Plan]:
    """What goes to everybody, and the rest. A plan whose ranks pass bytes on is left alone: it has its reasons."""
    if ranks < 3 or any(t.hop for t in plan.transfers):
        return replace(plan, transfers=()), plan
    wanted: dict[tuple[object, ...], list[Transfer]] = {}
    for t in plan.transfers:
        wanted.setdefault((t.sender, t.name, t.box), []).append(t)
    to_all = {key for key, copies in wanted.items() if len({t.receiver for t in copies}) == ranks - 1}
    together = tuple(t for t in plan.transfers if (t.sender, t.name, t.box) in to_all)
    apart = tuple(t for t in plan.transfers if (t.sender, t.name, t.box) not in to_all)
    return replace(plan, transfers=together), replace(plan, transfers=apart)


def rounds(plan: Plan, ranks: int, *, half_bytes: int, check_every: int, version: int) -> list[list[Page]]:
    """By round, every rank's page. All that a round brings fits half a buffer; a rank with nothing left sends nothing
    that counts."""
    if not plan.transfers:
        return []
    laid = pages(plan, page_bytes=half_bytes // ranks // 64 * 64, check_every=check_every, version=version)
    count = max(map(len, laid.values()), default=0)
    return [[laid[r][i] if r in laid and i < len(laid[r]) else Page() for r in range(ranks)] for i in range(count)]
