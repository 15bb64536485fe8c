"""Checks that parallel sizes make a world of ranks, whatever the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.errors import either

if TYPE_CHECKING:  # an engine alone needs no recipes
    from tidemill.recipe.section import ParallelSettings

MOST_SUGGESTED = 256


def folding_problem(parallel: ParallelSettings) -> str:
    """Say why the experts' ranks do not fit over the others; "": they do."""
    shard = parallel.fsdp * parallel.cp
    if shard % parallel.ep == 0:
        return ""
    what = f"which does not divide fsdp × cp = {shard}, the ranks it lies over"
    return f"learn.parallel.ep is {parallel.ep}, {what}; {either(divisors(shard))} would do"


def world_problem(parallel: ParallelSettings, world: int) -> str:
    """Say why these sizes do not make a world of that many ranks; "": they do."""
    problem = folding_problem(parallel)
    if problem or parallel.ranks == world:
        return problem
    product = " × ".join(f"{name} {getattr(parallel, name)}" for name in ("replicate", "fsdp", "cp", "tp", "pp"))
    rest = parallel.ranks // parallel.fsdp
    fit = (
        f"learn.parallel.fsdp={world // rest} would do"
        if world % rest == 0
        else f"the others multiply to {rest}, which must divide {world}"
    )
    return f"learn.parallel needs {parallel.ranks} ranks ({product}), but there are {world}; {fit}"


def divisors(n: int) -> list[int]:
    return [i for i in range(1, min(n, MOST_SUGGESTED) + 1) if n % i == 0] or [1]
