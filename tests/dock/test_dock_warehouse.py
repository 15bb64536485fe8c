"""Segments and arenas: views stay valid, recycled bytes are never seen, memory that is short goes to disk."""

import gc
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

from tidemill.batch import Batch, Column
from tidemill.dock import chunk, stream
from tidemill.dock import segment as seg
from tidemill.dock.arena import Arena, choose_place
from tidemill.dock.messages import ChunkAt, Copy, Lent
from tidemill.dock.segment import SegmentGone, Views
from tidemill.dock.writer import Writer
from tidemill.errors import DockError

SIZE = 1 << 20


@pytest.fixture
def arena(tmp_path):
    made = Arena(tmp_path / "arena", tmp_path / "spilled", 8 * SIZE, SIZE)
    yield made
    made.destroy()


def writer_for(arena, views):
    def lend(nbytes):
        segment = arena.lend(nbytes)
        return Lent(segment.number, segment.generation, segment.nbytes)

    return Writer(arena.folder, 1, views, lend, arena.close)


def store(writer, batch):
    plan = chunk.plan(batch)
    reservation = writer.reserve(plan.nbytes)
    chunk.write(batch, plan, reservation.target)
    return reservation, plan.nbytes


def read(views, arena, reservation, nbytes):
    copy = reservation.copy
    return chunk.read(views.read(arena.folder, copy.segment, copy.generation, copy.offset, nbytes))


def some_batch(rows=5):
    return Batch(
        {
            "tokens": Column.jagged([np.arange(i) for i in range(rows)], np.int32),
            "reward": np.linspace(0, 1, rows, dtype=np.float32),
            "table": np.arange(rows * 6, dtype=np.uint8).reshape(rows, 2, 3),
            "text": Column.text("é" * i for i in range(rows)),
        }
    )


def test_a_chunk_reads_back_as_it_was_written_aligned_and_unpadded(arena):
    views = Views()
    batch = some_batch()
    reservation, nbytes = store(writer_for(arena, views), batch)
    got = read(views, arena, reservation, nbytes)
    for name in batch:
        assert np.array_equal(got.values(name), batch.values(name)), name
        assert np.array_equal(got[name].lengths, batch[name].lengths)
        assert got.values(name).ctypes.data % 64 == 0 and not got.values(name).flags.writeable
    assert list(got["text"]) == list(batch["text"])
    assert nbytes < batch.nbytes + 64 * (2 * len(batch) + 6)


def test_a_segment_with_a_view_out_is_not_recycled_and_afterwards_the_old_view_is_refused(arena):
    views = Views()
    writer = writer_for(arena, views)
    reservation, nbytes = store(writer, some_batch())
    number, generation = reservation.copy.segment, reservation.copy.generation
    view = read(views, arena, reservation, nbytes).values("reward")[1:3]
    writer.settle(reservation)
    writer.close()
    assert arena.retirable() == {number: generation}
    assert not arena.recycle(number)
    assert view.tolist() == [0.25, 0.5]
    del view
    gc.collect()
    assert arena.recycle(number)
    with pytest.raises(SegmentGone, match="recycled"):
        read(views, arena, reservation, nbytes)


def test_a_torch_tensor_keeps_its_view_alive(arena):
    torch = pytest.importorskip("torch")
    views = Views()
    writer = writer_for(arena, views)
    reservation, nbytes = store(writer, some_batch())
    array = read(views, arena, reservation, nbytes).values("reward")
    with pytest.warns(UserWarning) if not array.flags.writeable else pytest.MonkeyPatch.context():
        tensor = torch.from_numpy(array)
    del array
    writer.settle(reservation)
    writer.close()
    assert not arena.recycle(reservation.copy.segment)
    assert tensor.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    del tensor
    assert arena.recycle(reservation.copy.segment)


def _hold_and_wait(folder, number, generation, ready):
    held = Views().read(folder, number, generation, 0, 8)
    ready.set()
    signal.pause()
    del held


def test_a_reader_that_dies_lets_go(arena):
    context = multiprocessing.get_context("spawn")
    segment = arena.lend(8)
    arena.close(segment.number, 0)
    ready = context.Event()
    reader = context.Process(target=_hold_and_wait, args=(arena.folder, segment.number, 0, ready))
    reader.start()
    assert ready.wait(30)
    assert not arena.recycle(segment.number)
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    assert arena.recycle(segment.number)


def test_a_dead_writers_segment_is_closed(arena):
    segment = arena.lend(8)
    arena.close_orphans(now=segment.since + 1)
    assert segment.state == "lent"  # it may still be on its way to taking the lock
    arena.close_orphans(now=segment.since + 3)
    assert segment.state == "closed"


def test_a_full_arena_lends_nothing_until_something_is_recycled(arena):
    lent = [arena.lend(SIZE) for _ in range(8)]
    assert arena.lend(1) is None
    arena.close(lent[0].number, 0)
    assert arena.recycle(lent[0].number)
    assert arena.lend(1).number == lent[0].number


def test_a_spilled_segment_is_read_from_disk_and_comes_back_when_recycled(arena):
    views = Views()
    writer = writer_for(arena, views)
    batch = some_batch()
    reservation, nbytes = store(writer, batch)
    writer.settle(reservation)
    writer.close()
    segment = arena.spillable()
    arena.copy_out(segment)
    arena.finish_spill(segment)
    assert arena.used_bytes == 0 and arena.spilled_bytes == SIZE
    path = seg.path_of(arena.folder, segment.number)
    assert os.stat(path).st_blocks * 512 < SIZE // 4, "the memory was not given back"
    got = read(views, arena, reservation, nbytes)
    assert np.array_equal(got.values("table"), batch.values("table"))
    assert not arena.recycle(segment.number)
    del got
    gc.collect()
    assert arena.recycle(segment.number)
    assert arena.spilled_bytes == 0 and not seg.spill_path_of(arena.folder, segment.number).exists()


def test_a_new_warehouse_adopts_what_the_old_one_left(arena, tmp_path):
    views = Views()
    writer = writer_for(arena, views)
    reservation, nbytes = store(writer, some_batch())
    adopted = Arena(tmp_path / "arena", tmp_path / "spilled", 8 * SIZE, SIZE)
    assert adopted.segments[0].state == "lent"
    assert read(views, adopted, reservation, nbytes).rows == 5


def test_without_enough_shared_memory_a_folder_serves(tmp_path):
    place, _, is_shared = choose_place("x", tmp_path, memory_bytes=1 << 60, segment_bytes=SIZE)
    assert not is_shared and place.parent == tmp_path
    place, nbytes, is_shared = choose_place("x", tmp_path, memory_bytes=SIZE, segment_bytes=1 << 10)
    assert is_shared and nbytes == SIZE and str(place) == "/dev/shm/x"


@pytest.mark.parametrize("streams", [1, 3])
def test_a_pull_brings_every_byte_over_however_many_streams(arena, monkeypatch, streams):
    monkeypatch.setattr(stream, "STREAM_BYTES", 1000)
    segment, sent = arena.lend(SIZE), np.random.default_rng(0).integers(0, 256, 100_003, np.uint8)
    views = Views()
    held, body = views.hold_for_writing(arena.folder, segment.number, segment.generation)
    body[128 : 128 + len(sent)] = sent
    server = stream.StreamServer(arena.folder, 1, "token", "127.0.0.1", Views())
    puller = stream.Puller("token", streams)
    came = np.zeros(len(sent), np.uint8)
    copy = Copy(1, segment.number, segment.generation, 128)
    for _ in range(3):  # the second time over the same connections
        came[:] = 0
        puller.pull(ChunkAt(0, len(sent), (copy,)), {1: server.address}, came.data)
        assert np.array_equal(came, sent)
    assert sum(len(idle) for idle in puller._idle.values()) == streams
    gone = Copy(1, segment.number, segment.generation + 1, 128)
    with pytest.raises(SegmentGone, match="no longer holds it"):
        puller.pull(ChunkAt(0, len(sent), (gone,)), {1: server.address}, came.data)
    with pytest.raises(SegmentGone, match="no holder known"):
        puller.pull(ChunkAt(0, len(sent), (copy,)), {}, came.data)
    assert not puller._idle  # who is no longer in the directory is hung up on
    views.release(held)
    puller.close()
    server.close()


def test_a_pull_that_failed_writes_nothing_afterwards(monkeypatch):
    """One half fails at once while the other is still on its way: the memory may be lent to someone else next."""
    monkeypatch.setattr(stream, "STREAM_BYTES", 1)
    puller = stream.Puller("token", 2)
    first_failed = threading.Event()

    def pull_range(address, copy, start, into):
        if start == 0:
            first_failed.set()
            raise ConnectionError("gone")
        first_failed.wait()
        time.sleep(0.05)
        into[:] = bytes([1]) * len(into)

    monkeypatch.setattr(puller, "_pull_range", pull_range)
    memory = bytearray(10)
    with pytest.raises(SegmentGone):
        puller.pull(ChunkAt(0, 10, (Copy(1, 0, 0, 0),)), {1: "h:1"}, memoryview(memory))
    memory[:] = bytes(10)
    time.sleep(0.1)
    assert memory == bytes(10)
    puller.close()


def test_what_is_not_a_chunk_is_refused():
    with pytest.raises(DockError):
        chunk.read(np.zeros(64, np.uint8))
    with pytest.raises(DockError, match="cannot be stored"):
        chunk.plan(Batch({"x": np.array([object()])}))
