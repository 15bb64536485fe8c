import os
import queue as queues
import signal
import time

import pytest
import torch.distributed as dist

from tests.reshard import ranks
from tests.reshard.ranks import DENSE
from tidemill.errors import ReshardError
from tidemill.reshard.layouts import parallel
from tidemill.reshard.move import BufferRing, GroupWire, Job
from tidemill.reshard.plan import plan
from tidemill.reshard.serve import TORN, Serving
from tidemill.reshard.wires.one_node import SharedWire

TIMEOUT_S = 15.0
SOURCE = parallel.learner(DENSE, parallel.parse("fsdp2"))  # ranks 0 and 1
TARGET = parallel.engine(DENSE, parallel.parse("dp2"), first=2)  # ranks 2 and 3
RANKS = 4


def open_wire(kind, rank, port, tamper=None):
    if kind == "group":
        ranks.join(rank, RANKS, port, TIMEOUT_S)
        return GroupWire(BufferRing(2, 1 << 12), timeout_s=TIMEOUT_S, tamper=tamper)
    return SharedWire(f"fault-{port}", rank, RANKS, bucket_bytes=1 << 12, timeout_s=TIMEOUT_S, tamper=tamper)


def close_wire(wire):
    wire.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class DiesWhenRead(dict):
    """A learner's tensors; reading the tenth block ends the process as the kernel would, without a word."""

    reads = 0

    def get(self, name, default=None):
        self.reads += 1
        if self.reads == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get(name, default)


def publish(rank, wire, serving, version, aside, dies=False):
    made = plan(SOURCE, TARGET, direct=True)
    sources = ranks.cut(SOURCE, rank, ranks.whole(DENSE, seed=version))
    job = Job(made, rank, DiesWhenRead(sources) if dies else sources, {}, version, "all")
    serving.receive(job, wire)
    return serving.flip()


def live(rank, size, say, kind, ports, victim, aside, reborn=False):
    serving = Serving(ranks.empty(TARGET, rank, fill=0.0), 0, aside)
    if not reborn:
        wire = open_wire(kind, rank, ports[0], _killer if rank == victim and rank >= 2 else None)
        wire_tamper, wire._tamper = wire._tamper, None
        publish(rank, wire, serving, 1, aside)
        wire._tamper = wire_tamper
        started = time.monotonic()
        try:
            publish(rank, wire, serving, 2, aside, dies=rank == victim)
            say(("published", serving.version))
        except ReshardError as error:
            old = ranks.same(serving.tensors, ranks.cut(TARGET, rank, ranks.whole(DENSE, seed=1)))
            say(("failed", time.monotonic() - started, serving.version, serving.flip(), old, str(error)))
        close_wire(wire)
    wire = open_wire(kind, rank, ports[1])
    now = publish(rank, wire, serving, 3, aside)
    say(("rebuilt", now, ranks.same(serving.tensors, ranks.cut(TARGET, rank, ranks.whole(DENSE, seed=3)))))
    close_wire(wire)


def _killer(_):
    os.kill(os.getpid(), signal.SIGKILL)


def watch(kind, victim, aside):
    """Start the ranks, replace the one that dies, and give what all said."""
    ports = ranks.free_port(), ranks.free_port()
    processes, queue = ranks.start(live, RANKS, kind, ports, victim, aside)
    processes[victim].join(60)
    assert processes[victim].exitcode == -signal.SIGKILL
    replacement = ranks.start_one(live, victim, RANKS, queue, kind, ports, victim, aside, True)
    said, left = {r: [] for r in range(RANKS)}, set(range(RANKS))
    while left:
        try:
            rank, what, value = queue.get(timeout=60)
        except queues.Empty:
            raise AssertionError(f"ranks {left} hang; heard {said}") from None
        assert what != "failed", value
        if what == "done":
            left.discard(rank)
        else:
            said[rank].append(value)
    for process in [*processes, replacement]:
        process.join(10)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 3], ids=["a learner", "an engine"])
@pytest.mark.parametrize("kind", ["group", "shared"])
def test_a_rank_killed_in_mid_transfer_leaves_the_old_version_serving_and_the_next_transfer_works(kind, victim):
    said = watch(kind, victim, "device")
    for rank in set(range(RANKS)) - {victim}:
        what, seconds, version, flipped, old, _ = said[rank][0]
        assert what == "failed"
        assert seconds < TIMEOUT_S + 2
        if rank >= 2:  # the engines that live
            assert (version, flipped, old) == (1, 1, True)
    assert all(words[-1] == ("rebuilt", 3, True) for words in said.values())


def flip(rank, size, say, kind, port, verify):
    def one_bit(buffer):
        buffer[40] ^= 1

    wire = open_wire(kind, rank, port, one_bit if rank == 3 else None)
    serving = Serving(ranks.empty(TARGET, rank), 0, "device")
    job = Job(plan(SOURCE, TARGET, direct=True), rank, ranks.cut(SOURCE, rank, ranks.whole(DENSE)), {}, 1, verify)
    try:
        serving.receive(job, wire)
        say(("whole", serving.flip()))
    except ReshardError as error:
        say((str(error), serving.flip()))
    close_wire(wire)


@pytest.mark.parametrize("kind", ["group", "shared"])
def test_a_flipped_byte_is_caught_and_nobody_takes_the_version(kind):
    said = ranks.run(flip, RANKS, kind, ranks.free_port(), "all")
    assert "do not match their checksums" in said[3][0][0]
    assert "model." in said[3][0][0]
    if kind == "group":  # a page of a shared ring is read by both engines
        assert "another rank found wrong bytes" in said[2][0][0]
    assert said[2][0][1] == said[3][0][1] == 0


def test_without_checks_a_flipped_byte_goes_unseen():
    """What `verify: off` gives up, and the proof that the test above can fail."""
    said = ranks.run(flip, RANKS, "group", ranks.free_port(), "off")
    assert said[3] == [("whole", 1)]


class Fails:
    def carry(self, job, moved):
        next(iter(job.targets.values())).fill_(-1)
        raise ReshardError("half way")

    def agree(self, ok, version):
        return False

    def close(self):
        pass


def serving_one(aside):
    layout = parallel.engine(DENSE, parallel.parse("dp1"))
    tensors = ranks.cut(layout, 0, ranks.whole(DENSE))
    return Serving(tensors, 4, aside), Job(plan(layout, layout), 0, tensors, {}, 5), tensors


@pytest.mark.parametrize("aside", ["device", "host"])
def test_a_half_transfer_leaves_what_is_served_alone(aside):
    serving, job, tensors = serving_one(aside)
    before = {n: t.clone() for n, t in tensors.items()}
    with pytest.raises(ReshardError):
        serving.receive(job, Fails())
    assert serving.flip() == 4
    assert ranks.same(tensors, before)


def test_a_half_transfer_in_place_serves_nothing_until_the_next_one():
    serving, job, _ = serving_one("none")
    with pytest.raises(ReshardError):
        serving.receive(job, Fails())
    assert serving.version == TORN


def test_a_wire_leaves_nothing_behind():
    wire = SharedWire(f"once-{os.getpid()}", 0, 1)
    wire.close()
    SharedWire(f"once-{os.getpid()}", 0, 1).close()  # the name is free again
