"""Stage and Graph: an algorithm as a table of stages over columns, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidemill.errors import TidemillError, did_you_mean

Scope = Literal["sample", "group"]


class GraphError(TidemillError):
    """The table of stages does not fit together."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A function from columns to columns, run by a role on single samples or on complete groups."""

    name: str
    role: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    scope: Scope = "sample"
    keeps: int = 0  # rows, the newest, that stay once all stages are through with them: it reads them again and again


@dataclass(frozen=True, slots=True)
class Graph:
    """`source`: the columns each row has when it enters. A stage may run on a row once all it reads is written."""

    name: str
    source: tuple[str, ...]
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        check(self)

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise GraphError(f"{self.name}: no stage {name!r}{did_you_mean(name, [s.name for s in self.stages])}")

    @property
    def columns(self) -> tuple[str, ...]:
        return self.source + tuple(c for s in self.stages for c in s.writes)

    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.role for s in self.stages))


def check(graph: Graph) -> None:
    """Every column read is written once, by an earlier stage or the source; names are unique."""
    writer = dict.fromkeys(graph.source, "the source")
    seen: set[str] = set()
    for stage in graph.stages:
        if stage.name in seen:
            raise GraphError(f"{graph.name}: two stages are called {stage.name!r}")
        seen.add(stage.name)
        for column in stage.reads:
            if column not in writer:
                later = [s.name for s in graph.stages if column in s.writes]
                why = f"only {later[0]!r}, which comes later, writes it" if later else "no stage writes it"
                hint = did_you_mean(column, writer)
                raise GraphError(f"{graph.name}: stage {stage.name!r} reads column {column!r}, but {why}{hint}")
        for column in stage.writes:
            if column in writer:
                raise GraphError(
                    f"{graph.name}: stage {stage.name!r} writes column {column!r}, already written by {writer[column]}"
                )
            writer[column] = repr(stage.name)
