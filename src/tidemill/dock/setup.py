"""DockSetup: a dock's settings, as plain data with which a process can be started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tidemill.dock.keyed.sampling import sampler_of
from tidemill.dock.keyed.table import KeyedTable
from tidemill.dock.ledger.credit import Chunks
from tidemill.dock.ledger.ledger import Ledger
from tidemill.graph import Stage


@dataclass(frozen=True, slots=True)
class KeyedSetup:
    """Settings of the dock's keyed table."""

    sampler: str = ""  # import path of a function that makes one of the dock's folder; empty: rows as they came
    polls: bool = False  # a fetch that finds too little gets nothing at once, instead of waiting
    spare_rows: int = 1  # of a new partition, that count as not consumed before they are written
    max_rows: int | None = None  # writes beyond it are refused
    lease_s: float = 60.0  # a consumer on another machine that is silent for this long is dead

    def table(self, chunks: Chunks, folder: Path) -> KeyedTable:
        return KeyedTable(
            chunks,
            sampler=sampler_of(self.sampler, folder),
            polls=self.polls,
            spare_rows=self.spare_rows,
            max_rows=self.max_rows,
            lease_s=self.lease_s,
        )


@dataclass(frozen=True, slots=True)
class DockSetup:
    stages: tuple[Stage, ...]
    source: tuple[str, ...] = ()  # columns that every put must have
    lease_s: float = 600.0
    max_staleness: int | None = None
    stale: Literal["requeue", "drop"] = "drop"
    group_size: int | None = None
    max_rows: int | None = None  # per tag; producers wait beyond it
    max_bytes: int | None = None
    watch: str = "reward"  # the column that samplers may compare
    replicas: int = 0  # number of further warehouses that hold each chunk
    warehouse_timeout_s: float = 120.0  # a warehouse silent for this long is given up
    memory_bytes: int | None = None  # of each warehouse; None: half of the shared memory
    spill_bytes: int | None = None  # above this much in memory, segments are spilled to disk; None: at memory_bytes
    segment_bytes: int = 32 << 20
    keyed: KeyedSetup = KeyedSetup()

    def ledger(self, epoch: int = 1) -> Ledger:
        return Ledger(
            self.stages,
            lease_s=self.lease_s,
            max_staleness=self.max_staleness,
            stale=self.stale,
            group_size=self.group_size,
            max_rows=self.max_rows,
            max_bytes=self.max_bytes,
            watch=self.watch,
            epoch=epoch,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> DockSetup:
        record: dict[str, Any] = json.loads(text)
        stages = tuple(_stage(stage) for stage in record.pop("stages"))
        keyed = KeyedSetup(**record.pop("keyed"))
        return DockSetup(stages=stages, source=tuple(record.pop("source")), keyed=keyed, **record)


def _stage(record: dict[str, Any]) -> Stage:
    reads, writes = tuple(record["reads"]), tuple(record["writes"])
    return Stage(record["name"], record["role"], reads, writes, record["scope"], record["keeps"])
