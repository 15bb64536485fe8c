"""Messages about keyed tables. Rows are named by key or by number; tags are packed maps."""

from __future__ import annotations

from tidemill.dock.keyed.partition import FieldKind
from tidemill.dock.net.parts import ChunkAt, Message, Outputs

# -- to the ledger ----------------------------------------------------------------------------------------------------


class KeyedWrite(Message):
    """Write fields, tags or both: to rows of these keys (made where they are new), to these rows, or to new rows."""

    partition: str
    keys: list[str] | None
    indexes: bytes | None  # int64
    rows: int
    kinds: list[FieldKind]
    outputs: Outputs
    tags: list[bytes] | None = None
    merges: bool = False  # tags with those that are there


class KeyedFind(Message):
    """Describe rows by their keys; `creates`: also make those that are new."""

    partition: str
    keys: list[str]
    creates: bool = False


class KeyedFetch(Message):
    """Give rows to a task."""

    partition: str
    task: str
    fields: list[str]
    rows: int
    config: bytes  # of the sampler, packed as tags are
    wait_s: float = 0.0


class KeyedLook(Message):
    """Describe all rows of a partition, with these fields; None: with all."""

    partition: str
    fields: list[str] | None = None


class KeyedReserve(Message):
    """Make rows and describe them."""

    partition: str
    fields: list[str]
    rows: int


class KeyedRead(Message):
    """Tell where the values of rows are. `fields` None: those that all the rows have."""

    partition: str
    keys: list[str] | None
    indexes: bytes | None
    fields: list[str] | None


class KeyedTag(Message):
    partition: str
    indexes: bytes
    tags: list[bytes]


class KeyedClear(Message):
    """Clear rows, or with neither keys nor indexes the whole partition."""

    partition: str
    keys: list[str] | None = None
    indexes: bytes | None = None


class KeyedMarks(Message):
    """Tell what a task has consumed, or which rows have these fields."""

    partition: str
    task: str | None = None
    fields: list[str] | None = None


class KeyedReset(Message):
    partition: str
    task: str | None = None


class KeyedList(Message):
    """List keys and tags of one partition, or of all."""

    partition: str | None = None


class KeyedPartitions(Message):
    pass


class KeyedNames(Message):
    partition: str
    indexes: bytes


class KeyedSettle(Message):
    """The sender is done with these fetched rows, or with all that it has."""

    partition: str | None = None
    indexes: bytes | None = None


class KeyedKeep(Message):
    """The sender lives, and works on what it fetched."""


class KeyedSave(Message):
    pass


class KeyedLoad(Message):
    """Replace the table. `chunks`: of each chunk in the state, where its bytes have been written again."""

    state: bytes
    chunks: dict[int, Outputs]


# -- answers ----------------------------------------------------------------------------------------------------------


class KeyedRows(Message):
    """Rows and what they are like. `tags` None: no row has any."""

    indexes: bytes
    kinds: list[FieldKind]
    ready: bytes  # int8, of each row
    tags: list[bytes] | None = None


class FieldPlaces(Message):
    """Where one field's value of each row is, packed: its chunk (int64) and its place there (int32)."""

    name: str
    chunks: bytes
    places: bytes


class KeyedPlaces(Message):
    rows: int
    fields: list[FieldPlaces]
    chunks: list[ChunkAt]


class KeyedMarked(Message):
    """For each row (int64) `columns` marks (int8)."""

    indexes: bytes
    marks: bytes
    columns: int


class KeyedListing(Message):
    partitions: dict[str, dict[str, bytes]]


class KeyedNamed(Message):
    keys: list[str | None]


class KeyedState(Message):
    state: bytes
    chunks: list[ChunkAt]


FromClient = (
    KeyedWrite
    | KeyedFind
    | KeyedFetch
    | KeyedLook
    | KeyedReserve
    | KeyedRead
    | KeyedTag
    | KeyedClear
    | KeyedMarks
    | KeyedReset
    | KeyedList
    | KeyedNames
    | KeyedPartitions
    | KeyedSettle
    | KeyedKeep
    | KeyedSave
    | KeyedLoad
)
Answer = KeyedRows | KeyedPlaces | KeyedMarked | KeyedListing | KeyedNamed | KeyedState
