"""The fast way from chunks to a batch says what the plain way says."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.batch import Batch, Column
from tidemill.dock.ledger.records import META, Grant, Piece
from tidemill.dock.store.buffer import PackedBuffer
from tidemill.dock.store.gather import assemble, meta_columns
from tidemill.errors import DockError


def assemble_plainly(grant, chunks):
    """Say what `assemble` does in a few lines, row by row."""
    columns = meta_columns(grant)
    pieces = [piece.of_rows(grant.rows) for piece in grant.pieces]
    for name in (name for name in grant.columns if name not in META):
        rows = []
        for i in range(grant.rows):
            holders = [(c[i], p[i]) for c, p in pieces if c[i] >= 0 and name in chunks[int(c[i])]]
            chunk, place = holders[-1]
            rows.append(chunks[int(chunk)][name].gather(np.array([place])))
        columns[name] = Column.concat(rows)
    return Batch(columns)


def ledgers(ids):
    """What the ledger keeps of rows."""
    return {"id": ids, "group": ids, "version": ids.astype(np.int32), "length": ids.astype(np.int32)}


def make_chunk(rng, rows, long_rows):
    top = 200 if long_rows else 6
    return Batch(
        {
            "fixed": rng.random((rows, 3)),
            "jagged": Column.jagged([rng.integers(0, 9, rng.integers(0, top)) for _ in range(rows)], np.int16),
            "text": Column.text(["é" * int(rng.integers(0, 4)) for _ in range(rows)]),
        }
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 12), st.booleans(), st.booleans())
def test_the_fast_gather_agrees_with_the_plain_one(seed, n_chunks, n, long_rows, in_order):
    rng = np.random.default_rng(seed)
    chunks = {key: make_chunk(rng, 8, long_rows) for key in range(n_chunks)}
    chunk_of = rng.integers(0, n_chunks, n)
    if in_order:
        chunk_of = np.sort(chunk_of)
    place_of = rng.integers(0, 8, n).astype(np.int32)
    if in_order and n <= 8:
        place_of = np.arange(n, dtype=np.int32)
    chunks[99] = Batch({"fixed": np.zeros((8, 3))})  # a later part that holds some rows' newer values
    newer = np.where(rng.random(n) < 0.3, 99, -1)
    pieces = [Piece(0, chunk_of, place_of), Piece(1, newer, place_of)]
    meta = np.arange(n)
    grant = Grant(1, 0.0, ("fixed", "jagged", "text"), n, ledgers(meta), pieces)
    plain = assemble_plainly(grant, chunks)
    for fast in (assemble(grant, chunks), assemble(grant, chunks, PackedBuffer(pinned=False).allocate)):
        assert set(fast) == set(plain)
        for name in plain:
            assert np.array_equal(fast[name].values, plain[name].values), name
            assert np.array_equal(fast[name].lengths, plain[name].lengths), name
        assert list(fast["text"]) == list(plain["text"])


def test_rows_that_lie_together_are_views():
    chunk = make_chunk(np.random.default_rng(0), 8, True)
    ids = np.arange(3)
    pieces = [Piece(0, np.zeros(3, np.int64), np.arange(2, 5, dtype=np.int32))]
    grant = Grant(1, 0.0, ("fixed", "jagged"), len(ids), ledgers(ids), pieces)
    batch = assemble(grant, {0: chunk})
    for name in ("fixed", "jagged"):
        assert np.shares_memory(batch.values(name), chunk.values(name))


@given(st.integers(0, 10_000), st.integers(0, 5), st.integers(1, 3))
def test_pieces_that_are_runs_say_what_the_same_pieces_row_by_row_say(seed, first, n):
    rng = np.random.default_rng(seed)
    chunks = {0: make_chunk(rng, 8, True), 7: Batch({"fixed": rng.random((8, 3))})}
    pieces = [Piece(0, 0, first), Piece(2, 7, first)]
    ids = np.arange(n)
    grant = Grant(1, 0.0, ("text", "fixed"), len(ids), ledgers(ids), pieces)
    plain = assemble_plainly(grant, chunks)
    row_by_row = replace(grant, pieces=[Piece(p.part, *p.of_rows(n)) for p in pieces])
    for batch in (assemble(grant, chunks), assemble(row_by_row, chunks)):
        assert np.array_equal(batch.values("fixed"), plain.values("fixed"))
        assert list(batch["text"]) == list(plain["text"])
        assert np.shares_memory(batch.values("fixed"), chunks[7].values("fixed"))
    with pytest.raises(DockError, match="'absent' is not stored"):
        assemble(replace(grant, columns=("absent",)), chunks)


def test_a_batch_of_views_is_a_batch_like_any_other():
    chunk = make_chunk(np.random.default_rng(0), 8, True)
    ids = np.arange(8)
    grant = Grant(1, 0.0, ("fixed", "text"), 8, ledgers(ids), [Piece(0, 0, 0)])
    batch, plain = assemble(grant, {0: chunk}), assemble_plainly(grant, {0: chunk})
    assert list(batch) == list(plain) and len(batch) == 6 and batch.rows == 8 and "id" in batch and "no" not in batch
    assert batch.nbytes == plain.nbytes and repr(batch) == repr(plain)
    assert batch.row(3)["text"] == plain.row(3)["text"] and batch.values("length").tolist() == ids.tolist()
    assert batch.gather([1, 2]).values("id").tolist() == [1, 2]
    assert batch.merge({"new": ids}).values("new") is ids
    with pytest.raises(KeyError, match="no column 'jagged'"):
        batch["jagged"]
    copied = pickle.loads(pickle.dumps(batch))
    assert list(copied) == list(plain) and np.array_equal(copied.values("fixed"), plain.values("fixed"))


def test_rows_outside_of_a_chunk_are_refused():
    chunk = make_chunk(np.random.default_rng(0), 8, True)
    grant = Grant(1, 0.0, ("fixed",), 4, ledgers(np.arange(4)), [Piece(0, 0, 6)])
    with pytest.raises(DockError, match="8 rows"):
        assemble(grant, {0: chunk})


def test_a_reused_buffer_does_not_grow():
    buffer = PackedBuffer(pinned=False)
    first = buffer.allocate("x", (10,), np.dtype(np.float64))
    size = buffer.nbytes
    again = buffer.allocate("x", (4, 2), np.dtype(np.float64))
    assert buffer.nbytes == size and np.shares_memory(first, again)
