"""Segments and arenas: views stay valid, recycled bytes are never seen, memory that is short goes to disk."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tidemill.batch import Batch, Column
from tidemill.dock.net import stream
from tidemill.dock.net.messages import ChunkAt, Copy, Lent
from tidemill.dock.net.warehouse_server import WarehouseServer, _claim_identity, _identity
from tidemill.dock.setup import DockSetup
from tidemill.dock.store import chunk
from tidemill.dock.store import segment as seg
from tidemill.dock.store.arena import NUMBERS, Arena, choose_place, claim, remove_orphans, spill_name
from tidemill.dock.store.segment import SegmentGone, Views
from tidemill.dock.store.writer import Writer
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


def test_who_has_read_a_segment_and_then_writes_to_it_opens_nothing_more(arena):
    def held():
        links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith(str(arena.folder)) for link in links if link.is_symlink())

    reservation, _ = store(writer_for(arena, Views()), some_batch())
    mapped = seg.Mapped(arena.folder, reservation.copy.segment)
    before = held()
    seen = mapped.map(mapped.header(), writable=False)
    assert held() > before
    once = held()
    mapped.map(mapped.header(), writable=True)[seg.HEADER_BYTES] = 77
    assert held() == once
    assert seen[seg.HEADER_BYTES] == 77


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


def test_who_waits_for_a_segment_that_is_being_spilled_holds_nobody_else_up(arena):
    views = Views()
    spilling, other = arena.lend(8), arena.lend(8)
    arena.close(spilling.number, 0)
    assert arena.spillable() is spilling  # locked from here on
    arena.copy_out(spilling)
    read, written = [], []
    reader = threading.Thread(target=lambda: read.append(views.read(arena.folder, spilling.number, 0, 0, 8)))
    reader.start()
    writer = threading.Thread(target=lambda: written.append(views.hold_for_writing(arena.folder, other.number, 0)))
    time.sleep(0.05)  # the reader waits by now
    writer.start()
    writer.join(10)
    was_free = not writer.is_alive()
    arena.finish_spill(spilling)
    for thread in (reader, writer):
        thread.join(10)
    assert was_free and len(read[0]) == 8 and written


def test_a_spill_that_fails_leaves_the_segment_readable_where_it_was(arena):
    views = Views()
    writer = writer_for(arena, views)
    reservation, nbytes = store(writer, some_batch())
    writer.settle(reservation)
    writer.close()
    segment = arena.spillable()
    seg.spill_path_of(arena.folder, segment.number).write_bytes(b"half of it")
    arena.give_up_spill(segment)
    assert read(views, arena, reservation, nbytes).values("reward").tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert not seg.spill_path_of(arena.folder, segment.number).exists() and arena.spilled_bytes == 0


def test_after_a_spill_that_failed_for_whatever_reason_there_are_others(tmp_path, monkeypatch):
    setup = DockSetup((), memory_bytes=8 * SIZE, spill_bytes=1, segment_bytes=SIZE)
    server = WarehouseServer(setup, "node0", tmp_path, str(tmp_path), "127.0.0.1", "tcp://127.0.0.1:1")

    def strange(_):
        raise ValueError("neither the disk nor the file")

    monkeypatch.setattr(server._arena, "copy_out", strange)
    segment = server._arena.lend(8)
    server._arena.close(segment.number, 0)
    server._spill_if_needed()
    assert segment.state == "spilling"
    os.read(server._wake_read, 1)
    server._finish_jobs()
    assert segment.state == "closed" and server.figures()["failed_spills"] == 1
    monkeypatch.undo()
    server._spill_again = 0.0
    server._spill_if_needed()
    os.read(server._wake_read, 1)
    server._finish_jobs()
    assert segment.is_spilled
    server.shut()


def test_recycled_spills_do_not_bring_more_into_memory_than_it_holds(tmp_path):
    arena = Arena(tmp_path / "arena", tmp_path / "spilled", 2 * SIZE, SIZE)
    made = []
    for _ in range(2):
        lent = [arena.lend(SIZE) for _ in range(2)]
        assert all(lent) and arena.lend(SIZE) is None
        made += lent
        for segment in lent:
            arena.close(segment.number, segment.generation)
            assert arena.spillable() is segment
            arena.copy_out(segment)
            arena.finish_spill(segment)
    for segment in made:
        assert arena.recycle(segment.number)
    assert arena.used_bytes <= arena.memory_bytes and arena.spilled_bytes == 0
    assert list((tmp_path / "spilled").iterdir()) == []
    assert [arena.lend(SIZE) is not None for _ in range(3)] == [True, True, False]
    arena.destroy()


def test_a_recycled_spill_for_which_shared_memory_has_no_room_is_let_go(arena, monkeypatch):
    segment = arena.lend(SIZE)
    arena.close(segment.number, 0)
    arena.copy_out(arena.spillable())
    arena.finish_spill(segment)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert arena.recycle(segment.number)
    assert segment.number not in arena.segments and arena.used_bytes == 0


def test_the_number_of_a_segment_that_was_destroyed_is_never_given_again(tmp_path):
    """A reader may still have the old file open; of a new one of that name it would see the old bytes."""
    arena = Arena(tmp_path / "arena", tmp_path / "spilled", 2 * SIZE, SIZE)
    small, last = arena.lend(SIZE), arena.lend(SIZE)
    arena.close(last.number, 0)
    assert arena.recycle(last.number)
    arena._destroy(last)
    again = Arena(tmp_path / "arena", tmp_path / "spilled", 2 * SIZE, SIZE)
    assert small.number in again.segments
    assert again.lend(SIZE).number > last.number
    again.destroy()


def test_memory_of_a_spill_that_its_warehouse_did_not_live_to_free_is_freed_by_the_next(arena, tmp_path, monkeypatch):
    segment = arena.lend(SIZE)
    arena.close(segment.number, 0)
    arena.copy_out(arena.spillable())
    seg.write_header(segment.fd, seg.Header(0, seg.SPILLED, segment.nbytes))  # and then it was killed
    path = seg.path_of(arena.folder, segment.number)
    assert os.stat(path).st_blocks * 512 >= SIZE
    Arena(tmp_path / "arena", tmp_path / "spilled", 8 * SIZE, SIZE)
    assert os.stat(path).st_blocks * 512 < SIZE // 4


def test_a_warehouse_does_not_take_the_arena_of_one_whose_name_begins_as_its_own(tmp_path):
    key, other = _identity(tmp_path / "dock-node-1")
    mine, arena = _identity(tmp_path / "dock-node")
    assert mine != key and arena != other and arena.is_dir()
    assert _identity(tmp_path / "dock-node") == (mine, arena)  # its own it finds again


def test_arenas_that_nobody_will_use_again_are_removed_and_no_others(tmp_path):
    names = {
        "orphan": "tidemill-0123456789ab-node-1-0123456789abcd",
        "in use": "tidemill-0123456789ab-node-2-0123456789abcd",
        "young": "tidemill-0123456789ab-node-3-0123456789abcd",
        "strange": "tidemill-notes",
    }
    made = {what: Arena(tmp_path / name, tmp_path / f"spill {what}", 8 * SIZE, SIZE) for what, name in names.items()}
    for arena in made.values():
        arena.lend(8)
    assert claim(made["in use"].folder) is not None
    for what in ("orphan", "in use", "strange"):
        os.utime(made[what].folder / NUMBERS, (0, 0))
    assert remove_orphans(tmp_path) == [made["orphan"].folder]
    assert [arena.folder.exists() for arena in made.values()] == [False, True, True, True]
    made["in use"].touch()
    assert time.time() - os.stat(made["in use"].folder / NUMBERS).st_mtime < 60
    for arena in made.values():
        arena.destroy()


def test_with_an_arena_that_nobody_will_use_goes_what_it_spilled_and_nothing_else(tmp_path):
    name = "tidemill-0123456789ab-node-{}-0123456789abcd"
    spills = tmp_path / spill_name(0x0123456789ABCD), tmp_path / "home"
    for i, spill in enumerate(spills):
        arena = Arena(tmp_path / name.format(i), spill, 8 * SIZE, SIZE)
        (spill / "s0").write_bytes(b"spilled")
        os.utime(arena.folder / NUMBERS, (0, 0))
    assert len(remove_orphans(tmp_path)) == 2
    assert [spill.exists() for spill in spills] == [False, True]


def test_two_warehouses_do_not_work_in_one_arena(arena, tmp_path):
    numbers = claim(arena.folder)
    with pytest.raises(DockError, match="another warehouse works in"):
        claim(arena.folder, within_s=0.05)
    os.close(numbers)


@pytest.mark.parametrize("is_killed", [True, False])
def test_who_waited_for_a_warehouse_finds_what_it_did_meanwhile(tmp_path, monkeypatch, is_killed):
    place = tmp_path / "dock-node"
    try_lock, waits = seg.try_lock_alone, threading.Event()

    def try_and_tell(fd):
        got = try_lock(fd)
        if not got:
            waits.set()
        return got

    monkeypatch.setattr(seg, "try_lock_alone", try_and_tell)
    key, folder, numbers = _claim_identity(place)
    old = Arena(folder, tmp_path / "spilled", 8 * SIZE, SIZE, numbers)
    came = []
    waiting = threading.Thread(target=lambda: came.append(_claim_identity(place)))
    waiting.start()
    assert waits.wait(10)
    made = old.lend(8)
    if is_killed:
        os.close(numbers)
    else:
        old.destroy()
    waiting.join(10)
    next_key, next_folder, next_numbers = came[0]
    new = Arena(next_folder, tmp_path / "spilled", 8 * SIZE, SIZE, next_numbers)
    if is_killed:
        assert (next_key, next_folder) == (key, folder)
        assert made.number in new.segments and new.lend(8).number > made.number
    else:  # its bytes went with it, so this is another warehouse, in a folder that is there
        assert next_key != key and not folder.exists()
        assert new.lend(8) is not None and seg.path_of(next_folder, 0).exists()
    new.destroy()


def test_a_file_that_is_there_already_is_not_taken_for_a_segment_half_made(arena):
    assert arena.lend(SIZE).number == 0
    others = seg.path_of(arena.folder, 1)
    others.write_bytes(b"somebody's")
    assert arena.lend(SIZE) is None and others.read_bytes() == b"somebody's"
    assert arena.lend(SIZE).number == 2


def test_a_listener_out_of_files_for_a_moment_goes_on_listening(arena, monkeypatch):
    accept, calls = socket.socket.accept, []

    def scarce(listener):
        calls.append(listener)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    server = stream.StreamServer(arena.folder, "token", "127.0.0.1", Views())
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        assert stream.greet(peer, "token", b"client")
    server.close()


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
    server = stream.StreamServer(arena.folder, "token", "127.0.0.1", Views())
    puller = stream.Puller("token", streams)
    came = np.zeros(len(sent), np.uint8)
    copy = Copy(1, segment.number, segment.generation, 128)
    for _ in range(3):  # the second time over the same connections
        came[:] = 0
        puller.pull(ChunkAt(0, len(sent), (copy,)), {1: server.address}, came.data)
        assert np.array_equal(came, sent)
    # One that ended before the next began has lent it its connection.
    assert 1 <= sum(len(idle) for idle in puller._idle.values()) <= streams
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
