"""Messages between dock processes: msgspec structures in MessagePack, never pickles. Arrays travel as their bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.dock.api import Until, Want
from tidemill.dock.ledger.counts import Counts
from tidemill.dock.net import keyed_messages as keyed
from tidemill.dock.net.parts import ChunkAt, Copy, Message, Outputs, WirePiece

__all__ = ["ChunkAt", "Copy", "Message", "Outputs", "WirePiece"]  # and all below


# -- to the ledger ----------------------------------------------------------------------------------------------------


class Put(Message):
    ids: bytes  # int64
    group: bytes  # int64
    sizes: bytes | None
    outputs: Outputs
    tag: str
    wait_s: float
    waited_s: float = 0.0  # waited already, in earlier pieces of the same wait: it keeps its place


class Take(Message):
    stage: str
    want: Want
    wait_s: float
    waited_s: float = 0.0


class Commit(Message):
    lease: int
    outputs: Outputs
    drop: bytes  # int64
    counts: Counts | None = None


class Renew(Message):
    lease: int


class Abandon(Message):
    lease: int


class Advance(Message):
    version: int


class AskProgress(Message):
    stage: str
    tag: str | None = None
    until: Until | None = None  # if given: answered when that holds, or after `wait_s`
    wait_s: float = 0.0


class AskFinished(Message):
    stage: str
    tag: str


class Retag(Message):
    groups: bytes  # int64
    tag: str


class AskState(Message):
    pass


class AskCounted(Message):
    heard: int  # number of the last report that arrived


class AskSetup(Message):
    pass


class Missing(Message):
    """Asks for ids whose bytes were lost and cannot be made again from what is here."""

    wait_s: float = 0.0


class Announce(Message):
    """A warehouse announces itself and what it holds; sent at its start and whenever the ledger restarted."""

    warehouse: int
    node: str
    arena: str
    control: str  # where its control socket listens
    data: str  # host:port of its byte stream
    segments: dict[int, int]  # number -> generation
    next_segment: int  # numbers from here on are unused


class StateReport(Message):
    """A warehouse's heartbeat: its figures."""

    warehouse: int
    figures: dict[str, int]


class HeldPieces(Message):
    """A warehouse pulled a copy of a chunk."""

    chunk: int
    copy: Copy


class Retire(Message):
    """A warehouse asks which of these segments nobody needs; nothing may be sealed in those from then on."""

    warehouse: int
    segments: dict[int, int]


class Lost(Message):
    """A warehouse is gone with its bytes (sent by the process that watches it)."""

    warehouse: int


# -- to a warehouse ---------------------------------------------------------------------------------------------------


class Lend(Message):
    """A writer asks for a segment with this much room."""

    nbytes: int


class Close(Message):
    """A writer is done with a segment."""

    segment: int
    generation: int


class Fetch(Message):
    """A reader asks for a chunk that is elsewhere; it is pulled once, however many ask."""

    chunk: ChunkAt
    sources: dict[int, str]  # warehouse -> host:port of its byte stream


class AskFigures(Message):
    pass


# -- answers ----------------------------------------------------------------------------------------------------------


class Done(Message):
    count: int = 0


class Nothing(Message):
    """Not enough was ready, or the dock was full, for as long as the caller wanted to wait."""


class Refused(Message):
    kind: str  # lease, gone, error
    message: str
    remedy: str


class Granted(Message):
    """Arrays in the form of `compact.pack`."""

    rows: int
    lease: int
    lease_s: float
    columns: tuple[str, ...]
    ids: bytes
    group: bytes
    version: bytes
    length: bytes
    pieces: tuple[WirePiece, ...]
    chunks: tuple[ChunkAt, ...]


class Ids(Message):
    ids: bytes


class ProgressReply(Message):
    pending: int
    ready: int
    leased: int


class State(Message):
    state: dict[str, Any]


class CountedReply(Message):
    number: int
    sums: dict[str, float]
    means: dict[str, tuple[float, int]]


class Setup(Message):
    """What a client must know about the dock."""

    epoch: int
    stages: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], str, int], ...]
    source: tuple[str, ...]
    watch: str
    replicas: int
    lease_s: float
    keyed_lease_s: float
    warehouses: tuple[Announce, ...]


class Epoch(Message):
    epoch: int


class Retired(Message):
    segments: tuple[int, ...]


class Lent(Message):
    segment: int
    generation: int
    nbytes: int


class Fetched(Message):
    copy: Copy


class Figures(Message):
    figures: dict[str, int]


# -- from the ledger to a warehouse, unasked ---------------------------------------------------------------------------


class Empty(Message):
    """Nobody needs anything of this segment any more."""

    segment: int
    generation: int


class Hold(Message):
    """Pull a copy of this chunk: it has fewer than it should."""

    chunk: ChunkAt
    sources: dict[int, str]


FromClient = (
    Put
    | Take
    | Commit
    | Renew
    | Abandon
    | Advance
    | AskProgress
    | AskFinished
    | Retag
    | AskState
    | AskCounted
    | AskSetup
    | Missing
)
ToLedger = FromClient | keyed.FromClient | Announce | StateReport | HeldPieces | Retire | Lost
ToWarehouse = Lend | Close | Fetch | AskFigures
Answer = (
    Done
    | Nothing
    | Refused
    | Granted
    | Ids
    | ProgressReply
    | State
    | CountedReply
    | Setup
    | Epoch
    | Retired
    | Lent
    | Fetched
    | Figures
    | Empty
    | Hold
    | keyed.Answer
)

encode = msgspec.msgpack.Encoder().encode
decode_for_ledger = msgspec.msgpack.Decoder(ToLedger).decode
decode_for_warehouse = msgspec.msgpack.Decoder(ToWarehouse).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
